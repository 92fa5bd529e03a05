"""Line and point plots as SVG that stands inside a page and takes the page's colours, light or dark.

Matplotlib draws with stand-in colours, each of which becomes a CSS variable afterwards: ``--ink``, ``--grid`` and ``--c0`` to
``--c9`` for the series. Needs the ``bench`` extra.
"""

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

NUM_COLOURS = 10
_INK, _GRID = "#c0ffe0", "#c0ffe1"
_MARKERS = "osD^vPX<>*"
_STYLE: dict[Any, Any] = {
    "font.size": 11,
    "font.family": "sans-serif",
    "svg.fonttype": "none",  # text stays text: it can be searched, and takes the page's font
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _GRID,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line, or one set of points. ``number`` picks colour and marker, the same in every plot of a page.

    There are ten colours; from the eleventh on they come again, with another marker.
    """

    name: str
    number: int
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """``ticks``: places and labels on the x axis; None: matplotlib's own. ``line_y``: a level to compare with."""

    name: str  # tells the plots of a page apart; letters and dashes
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    ticks: tuple[Sequence[float], Sequence[str]] | None = None
    log_x: bool = True
    log_y: bool = True
    joined: bool = True  # lines between the points
    line_y: float | None = None


def draw(plot: Plot) -> str:
    """The plot as an ``<svg>`` element as wide as its place."""
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": plot.name}):
        figure = Figure(figsize=(6.6, 4.9), layout="constrained")
        axes = figure.add_subplot()
        for series in plot.series:
            _draw_series(axes, series, joined=plot.joined)
        _draw_axes(axes, plot)
        figure.legend(loc="outside lower center", ncols=3, fontsize=10, handlelength=2.4, columnspacing=1.4)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inline(out.getvalue(), plot)


def _draw_series(axes: Axes, series: Series, *, joined: bool) -> None:
    colour = _colour(series.number)
    axes.plot(
        series.x,
        series.y,
        label=series.name,
        color=colour,
        marker=_MARKERS[(series.number + series.number // NUM_COLOURS) % len(_MARKERS)],
        markersize=5 if joined else 8,
        linestyle=("--" if series.dashed else "-") if joined else "none",
        linewidth=1.7,
    )


def _draw_axes(axes: Axes, plot: Plot) -> None:
    if plot.log_x:
        axes.set_xscale("log")
        _number_log_axis(axes.xaxis)
    if plot.log_y:
        axes.set_yscale("log")
        _number_log_axis(axes.yaxis)
    else:
        axes.set_ylim(bottom=0)
    if plot.ticks is not None:
        axes.set_xticks(list(plot.ticks[0]), list(plot.ticks[1]))
        axes.minorticks_off()
    if plot.line_y is not None:
        axes.axhline(plot.line_y, color=_INK, linewidth=1, linestyle=":")
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)


def _number_log_axis(axis: Axis) -> None:
    """1, 2, 5, 10, ... written out, as far as they find room."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=9))
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.set_minor_formatter(NullFormatter())


def _colour(number: int) -> str:
    return f"#c0ff{number % NUM_COLOURS:02x}"


def _inline(svg: str, plot: Plot) -> str:
    """Without the file's head, with names of its own, as wide as the page allows, and in the page's colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{plot.name}-", svg)
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*"', r"<svg \1", svg, count=1)
    svg = re.sub(r'<svg ([^>]*?)height="[^"]*"', rf'<svg role="img" aria-label="{plot.title}" \1', svg, count=1)
    for stand_in, variable in _variables():
        svg = re.sub(stand_in, f"var({variable})", svg, flags=re.IGNORECASE)
    return svg


def _variables() -> Iterable[tuple[str, str]]:
    yield _INK, "--ink"
    yield _GRID, "--grid"
    for number in range(NUM_COLOURS):
        yield _colour(number), f"--c{number}"
