"""Plots in the colors of the playground, light or dark as the reader's screen is; only drawing imports matplotlib."""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from tightwire import server
from tightwire.bench import report
from tightwire.bench.report.table import Column, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

NO_PLOTS = "matplotlib is not installed: pip install matplotlib"
PARTS = ("compute", "codec", "wire", "other")  # colors of the parts of a time, as in the playground
_NUM_SERIES = 10
_MARKERS = "osD^vPX<>*"
_LEGEND_CHARS = 64  # that fit into a line of the legend
_DARK = "@media (prefers-color-scheme: dark)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """``draw`` fills the axes; ``note`` stands below the title."""

    title: str
    draw: Callable[["Axes"], object]
    note: str = ""
    height_inches: float = 4.3


def has_matplotlib() -> bool:
    return find_spec("matplotlib") is not None


def style_sheet() -> str:
    """The playground's own rules, then those of a bench's page with the colors of series."""
    return (files(server) / "web" / "css" / "base.css").read_text() + (files(report) / "page.css").read_text()


@cache
def colors() -> dict[str, tuple[str, str]]:
    """The colors of ``style_sheet`` by name, in a light and in a dark scheme, as six hexadecimal digits."""
    light: dict[str, str] = {}
    dark: dict[str, str] = {}
    for root in re.finditer(r"^( *):root \{(.*?)\}", style_sheet(), re.MULTILINE | re.DOTALL):
        for name, digits in re.findall(r"--([\w-]+): #([0-9a-f]+);", root[2]):
            (dark if root[1] else light)[name] = "#" + (digits if len(digits) == 6 else "".join(2 * c for c in digits))
    return {name: (color, dark.get(name, color)) for name, color in light.items()}


def color(name: str) -> str:
    """The light color; ``svg`` adds the dark one."""
    return colors()[name][0]


def series_color(number: int) -> str:
    return color(f"series-{number % _NUM_SERIES}")


def plot_settings() -> dict[Any, Any]:
    """matplotlib's settings for every plot of the project."""
    texts = ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor")
    return {
        "font.size": 10.5,
        "svg.fonttype": "none",  # text stays text
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        **dict.fromkeys(texts, color("text")),
        **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), color("line")),
    }


def lines(
    title: str,
    rows: Sequence[Row],
    *,
    by: str,
    x: Column,
    y: Column,
    dashed: Callable[[str], bool] = lambda series: False,
    ticks: bool = False,
    log_x: bool = True,
    log_y: bool = True,
    joined: bool = True,
    note: str = "",
) -> Plot:
    """Column ``y`` over column ``x``, a series for each value of the key ``by``; rows without x or y are left out.

    ``ticks``: label each x as its column does; by default matplotlib chooses. ``joined``: connect the points.
    """
    known = sorted((row for row in rows if x.scaled(row) is not None and y.scaled(row) is not None), key=x.scaled)
    names = list(dict.fromkeys(row[by] for row in rows))

    def draw(axes: "Axes") -> None:
        for number, name in enumerate(names):
            own = [row for row in known if row[by] == name]
            xs, ys = [x.scaled(row) for row in own], [y.scaled(row) for row in own]
            style = ("--" if dashed(name) else "-") if joined else "none"
            marker = _MARKERS[(number + number // 10) % len(_MARKERS)]  # there are ten colours
            if own:
                label = _short(str(name))
                axes.plot(xs, ys, label=label, color=series_color(number), marker=marker, markersize=5, linestyle=style)
        if log_x:
            _make_log(axes, "x")
        if log_y:
            _make_log(axes, "y")
        if ticks:
            labels = {x.scaled(row): x.text(row) for row in known}
            axes.set_xticks(list(labels), list(labels.values()))
            axes.minorticks_off()
        axes.set(xlabel=x.name, ylabel=y.name)

    return Plot(title=title, draw=draw, note=note)


def bars(
    title: str, rows: Sequence[Row], *, label: Column, parts: Sequence[Column], x_label: str, note: str = ""
) -> Plot:
    """A horizontal bar for each row, the first on top, made of four columns; a missing part is 0."""

    def draw(axes: "Axes") -> None:
        ends = [0.0] * len(rows)
        for part, name in zip(parts, PARTS, strict=True):
            values = [part.scaled(row) or 0.0 for row in rows]
            axes.barh(range(len(rows)), values, left=ends, height=0.72, label=part.name, color=color(name))
            ends = [end + value for end, value in zip(ends, values, strict=True)]
        axes.set_yticks(range(len(rows)), [label.text(row) for row in rows])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set(xlabel=x_label)

    return Plot(title=title, draw=draw, note=note, height_inches=1.6 + 0.34 * len(rows))


def svg(plot: Plot) -> str:
    """Draw the plot with its legend below; its title is the page's to show."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**plot_settings(), "svg.hashsalt": plot.title}):
        figure = Figure(figsize=(5.6, plot.height_inches), layout="constrained")
        axes = figure.subplots()
        plot.draw(axes)
        handles, names = axes.get_legend_handles_labels()
        if names:  # matplotlib warns of an empty legend
            columns = min(4, max(1, _LEGEND_CHARS // max(len(name) + 3 for name in names)))
            figure.legend(handles, names, loc="outside lower center", ncols=columns, fontsize=9.5)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _for_both_schemes(out.getvalue())


def _for_both_schemes(text: str) -> str:
    """``text`` with the page's font, and with rules that replace its light colors in a dark scheme."""
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", text)
    used = [pair for pair in dict.fromkeys(colors().values()) if pair[0] in text]
    rules = [f'[style*="{kind}: {a}"] {{ {kind}: {b} !important }}' for a, b in used for kind in ("fill", "stroke")]
    opening, closing, rest = text.partition("<defs>")
    return f"{opening}<style>{_DARK} {{ {' '.join(rules)} }}</style>\n {closing}{rest}"


def _short(name: str) -> str:
    """``name`` as a plot has room for it: of a policy's path only the file name."""
    kind, colon, path = name.partition(":")
    return f"{kind}:{PurePath(path).stem}" if colon and "/" in path else name


def _make_log(axes: "Axes", which: str) -> None:
    """A log scale with 1, 2, 5, 10, ... written out, as far as there is room."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set(**{f"{which}scale": "log"})
    axis: Axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=9))
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.set_minor_formatter(NullFormatter())
