"""The HTML page of a result: plots, tables and text in one file that needs no network.

A plot is a value with a function that draws it; ``lines`` and ``bars`` make plots from rows and columns.
Only ``render`` imports matplotlib, which takes half a second and belongs to the ``bench`` extra.
"""

import io
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from jinja2 import Environment

from tightwire.bench.report.table import Column, Row, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

_MARKERS = "osD^vPX<>*"
_LEGEND_CHARS = 64  # that fit into a line of the legend
_STYLE: dict[Any, Any] = {
    "font.size": 10.5,
    "svg.fonttype": "none",  # text stays text
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dfe3e8",
    "legend.frameon": False,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """``draw`` fills the axes; ``note`` stands below the title."""

    title: str
    draw: Callable[["Axes"], object]
    note: str = ""
    height_inches: float = 4.3


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    title: str
    lines: Sequence[str]


Item = Plot | Table | Text


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
                axes.plot(xs, ys, label=label, color=f"C{number}", marker=marker, markersize=5, linestyle=style)
        if log_x:
            _make_log(axes, "x")
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
    """A horizontal bar for each row, the first on top, made of the columns ``parts``; a missing part is 0."""

    def draw(axes: "Axes") -> None:
        ends = [0.0] * len(rows)
        for part in parts:
            values = [part.scaled(row) or 0.0 for row in rows]
            axes.barh(range(len(rows)), values, left=ends, height=0.72, label=part.name)
            ends = [end + value for end, value in zip(ends, values, strict=True)]
        axes.set_yticks(range(len(rows)), [label.text(row) for row in rows])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set(xlabel=x_label)

    return Plot(title=title, draw=draw, note=note, height_inches=1.6 + 0.34 * len(rows))


def svg(plot: Plot) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": plot.title}):
        figure = Figure(figsize=(5.6, plot.height_inches), layout="constrained")
        axes = figure.add_subplot()
        plot.draw(axes)
        handles, names = axes.get_legend_handles_labels()
        if names:  # matplotlib warns of an empty legend
            columns = min(3, max(1, _LEGEND_CHARS // max(len(name) + 3 for name in names)))
            figure.legend(handles, names, loc="outside lower center", ncols=columns, fontsize=9.5)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return out.getvalue()


def render(
    title: str, lead: str, items: Sequence[Item], *, alarms: Sequence[str], facts: Sequence[tuple[str, str]]
) -> str:
    """The page. ``alarms``: reasons not to trust the result; ``facts``: machine, versions, settings."""
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_TEMPLATE)
    images = [b64encode(svg(item).encode()).decode() if isinstance(item, Plot) else "" for item in items]
    sections = list(zip(items, images, strict=True))
    return template.render(title=title, lead=lead, sections=sections, alarms=alarms, facts=facts)


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


_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
body { margin: 0 auto; padding: 1.5rem 1rem; max-width: 72rem; font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; } .note, dt { color: #5b6470; } .alarm { color: #b42318; font-weight: 600; }
section { overflow-x: auto; } section.plot { display: inline-block; vertical-align: top; width: min(100%, 35rem); } img { width: 100%; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid #dfe3e8; white-space: nowrap; } .word { text-align: left; }
tr.wrong td { color: #b42318; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; font-size: .875rem; } dd { margin: 0; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p class="note">{{ lead }}</p>
{% for alarm in alarms %}
<p class="alarm">{{ alarm }}</p>
{% endfor %}
{% for item, image in sections %}
<section{% if image %} class="plot"{% endif %}>
<h2>{{ item.title }}</h2>
{% for line in item.lines or [item.note] %}
<p class="note">{{ line }}</p>
{% endfor %}
{% if image %}
<img src="data:image/svg+xml;base64,{{ image }}" alt="{{ item.title }}">
{% endif %}
{% if item.columns %}
<table>
<tr>{% for column in item.columns %}<th{% if column.is_word %} class="word"{% endif %}>{{ column.name }}</th>{% endfor %}</tr>
{% for row in item.rows %}
<tr{% if item.wrong(row) %} class="wrong"{% endif %}>
{%- for column in item.columns %}<td{% if column.is_word %} class="word"{% endif %}>{{ column.text(row) }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{% endif %}
</section>
{% endfor %}
<h2>Machine and settings</h2>
<dl>
{% for name, value in facts %}
<dt>{{ name }}</dt><dd>{{ value }}</dd>
{% endfor %}
</dl>
</body>
</html>
"""
