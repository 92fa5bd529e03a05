"""Plots of a result's page as frozen values: lines and points, stacked bars, ECDFs of samples, heat maps.

``draw`` makes an ``<svg>`` of any of them. It imports matplotlib, which takes half a second and belongs to the ``bench``
extra; the values do not.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import TYPE_CHECKING, Any

from tightwire.bench.report.html import Section
from tightwire.bench.report.svg import INK, NUM_COLOURS, canvas, colour, short_name
from tightwire.bench.report.table import Column, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_MARKERS = "osD^vPX<>*"
_MOST_STEPS = 400  # of an ECDF; more cannot be seen and enlarge the page
_STRONG = 0.85  # opacity of the largest value
_WEAK = 0.05  # of it, of the smallest
_SHADES = 5  # shown beside the map


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line, or one set of points. ``number`` selects colour and marker, the same in every plot of a page.

    There are ten colours; the eleventh series has the first colour with another marker. ``low`` and ``high`` are the ends of
    an interval around each point; ``labels`` are drawn beside the points.
    """

    name: str
    number: int
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    labels: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """``ticks``: positions and labels on the x axis; None: matplotlib's own. ``line_y``: a level to compare with.

    ``from_zero``: a linear y axis begins at 0, so that heights are proportional to values.
    """

    name: str  # unique on the page; letters and dashes
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    ticks: tuple[Sequence[float], Sequence[str]] | None = None
    log_x: bool = True
    log_y: bool = True
    joined: bool = True  # lines between the points
    line_y: float | None = None
    from_zero: bool = True


def lines(
    name: str,
    title: str,
    rows: Sequence[Row],
    *,
    by: str,
    x: Column,
    y: Column,
    dashed: Callable[[str], bool] = lambda series: False,
    ticks: bool = False,
    **style: Any,
) -> Plot:
    """A plot of column ``y`` over column ``x`` with a series for each value of the key ``by``; rows without either are left out.

    ``ticks``: label each x as its column does. ``style``: further fields of ``Plot``.
    """
    names = list(dict.fromkeys(row[by] for row in rows))
    known = [row for row in rows if x.value(row) is not None and y.value(row) is not None]
    places = {x.value(row) * x.scale: x.text(row) for row in sorted(known, key=x.value)}
    series = []
    for number, label in enumerate(names):
        own = sorted((row for row in known if row[by] == label), key=x.value)
        if own:
            xs, ys = ([column.value(row) * column.scale for row in own] for column in (x, y))
            series.append(Series(name=label, number=number, x=xs, y=ys, dashed=dashed(label)))
    return Plot(
        name=name,
        title=title,
        x_label=x.name,
        y_label=y.name,
        series=series,
        ticks=(list(places), list(places.values())) if ticks else None,
        **style,
    )


def plot_section(plot: "Plot | StackedBars | Ecdf | HeatMap", *words: str) -> Section:
    """A section of a page with nothing but the plot, its title, and a few words."""
    return Section(title=plot.title, words=words, svg=draw(plot))


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of every bar, in the order of the bars; ``number`` selects its colour."""

    name: str
    number: int
    values: Sequence[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedBars:
    """Horizontal bars, the first on top, each made of the same parts."""

    name: str
    title: str
    x_label: str
    bars: Sequence[str]  # their labels
    parts: Sequence[Part]


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    name: str
    number: int
    values: Sequence[float]
    dashed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Ecdf:
    """The share of each set of samples that is at most x."""

    name: str
    title: str
    x_label: str
    samples: Sequence[Samples]
    log_x: bool = False
    line_x: float | None = None  # a limit to compare with


@dataclass(frozen=True, kw_only=True, slots=True)
class HeatMap:
    """A number for each row and column; larger is a stronger colour, None is empty. ``log``: logarithmic shades."""

    name: str
    title: str
    x_label: str
    y_label: str
    columns: Sequence[str]
    rows: Sequence[str]  # the first on top
    values: Sequence[Sequence[float | None]]  # one sequence for each row
    value_label: str
    log: bool = False
    number: int = 1  # colour


@singledispatch
def draw(plot: object) -> str:
    """The plot as a scalable ``<svg>`` element."""
    raise TypeError(f"no plot: {type(plot).__name__}")


@draw.register
def _draw_plot(plot: Plot) -> str:
    with canvas(plot.name, plot.title) as board:
        axes = board.figure.add_subplot()
        for series in plot.series:
            _draw_series(axes, series, joined=plot.joined)
        if plot.log_x:
            axes.set_xscale("log")
            _number_log_axis(axes.xaxis)
        if plot.log_y:
            axes.set_yscale("log")
            _number_log_axis(axes.yaxis)
        elif plot.from_zero:
            axes.set_ylim(bottom=0)
        if plot.ticks is not None:
            axes.set_xticks(list(plot.ticks[0]), list(plot.ticks[1]))
            axes.minorticks_off()
        if plot.line_y is not None:
            axes.axhline(plot.line_y, color=INK, linewidth=1, linestyle=":")
        axes.set(xlabel=plot.x_label, ylabel=plot.y_label)
        _draw_legend(board.figure)
        return board.svg()


def _draw_series(axes: "Axes", series: Series, *, joined: bool) -> None:
    axes.plot(
        series.x,
        series.y,
        label=series.name,
        color=colour(series.number),
        marker=_MARKERS[(series.number + series.number // NUM_COLOURS) % len(_MARKERS)],
        markersize=5 if joined else 8,
        linestyle=("--" if series.dashed else "-") if joined else "none",
        linewidth=1.7,
    )
    if series.low:
        axes.vlines(series.x, series.low, series.high, color=colour(series.number), linewidth=1.5)
        axes.plot(
            series.x, series.low, series.x, series.high, color=colour(series.number), marker="_", linestyle="none"
        )
    for x, y, label in zip(series.x, series.y, series.labels, strict=False):
        axes.annotate(label, (x, y), xytext=(6, 5), textcoords="offset points", fontsize=9.5)


@draw.register
def _draw_bars(plot: StackedBars) -> str:
    with canvas(plot.name, plot.title, height=1.6 + 0.34 * len(plot.bars)) as board:
        axes = board.figure.add_subplot()
        places = range(len(plot.bars))
        ends = [0.0] * len(plot.bars)
        for part in plot.parts:
            axes.barh(places, part.values, left=ends, height=0.72, label=part.name, color=colour(part.number))
            ends = [end + value for end, value in zip(ends, part.values, strict=True)]
        axes.set_yticks(places, plot.bars)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set(xlabel=plot.x_label)
        _draw_legend(board.figure)
        return board.svg()


@draw.register
def _draw_ecdf(plot: Ecdf) -> str:
    from matplotlib.ticker import PercentFormatter

    with canvas(plot.name, plot.title) as board:
        axes = board.figure.add_subplot()
        for samples in plot.samples:
            x, share = _steps(samples.values)
            style = "--" if samples.dashed else "-"
            line = {"color": colour(samples.number), "linestyle": style, "linewidth": 1.7}
            axes.plot(x, share, drawstyle="steps-post", label=samples.name, **line)
        if plot.log_x:
            axes.set_xscale("log")
            _number_log_axis(axes.xaxis)
        else:
            axes.set_xlim(left=0)
        if plot.line_x is not None:
            axes.axvline(plot.line_x, color=INK, linewidth=1, linestyle=":")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set(xlabel=plot.x_label, ylabel="share at most this", ylim=(0, 1.02))
        _draw_legend(board.figure)
        return board.svg()


def _steps(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Values at which the share rises and the share from there on; at most ``_MOST_STEPS``, evenly chosen."""
    ordered = sorted(values)
    n = len(ordered)
    count = min(n, _MOST_STEPS)
    indices = sorted({round(i * (n - 1) / max(1, count - 1)) for i in range(count)})
    return [ordered[0], *(ordered[i] for i in indices)], [0.0, *((i + 1) / n for i in indices)]


@draw.register
def _draw_heat_map(plot: HeatMap) -> str:
    """The map, with a scale of its shades beside it."""
    known = [value for row in plot.values for value in row if value is not None and (value > 0 or not plot.log)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    with canvas(plot.name, plot.title, height=min(9.5, 1.5 + 0.22 * len(plot.rows))) as board:
        axes, legend = board.figure.subplots(1, 2, width_ratios=[24, 1])
        for row, values in enumerate(plot.values):
            for column, value in enumerate(values):
                if value is not None:
                    _draw_cell(axes, column, row, plot.number, _shade(value, low, high, log=plot.log))
        axes.set(xlim=(-0.5, len(plot.columns) - 0.5), ylim=(len(plot.rows) - 0.5, -0.5))
        axes.set_xticks(*_spread(plot.columns, 12))
        axes.set_yticks(*_spread([short_name(row) for row in plot.rows], 32))
        axes.set(xlabel=plot.x_label, ylabel=plot.y_label)
        axes.grid(visible=False)
        _draw_shades(legend, plot, low, high)
        return board.svg()


def _draw_cell(axes: "Axes", x: float, y: float, number: int, shade: float) -> None:
    axes.bar(x, 1.0, width=1.0, bottom=y - 0.5, color=colour(number), alpha=_STRONG * shade, linewidth=0)


def _draw_shades(axes: "Axes", plot: HeatMap, low: float, high: float) -> None:
    """The scale of the shades, from low (below) to high."""
    for step in range(_SHADES):
        _draw_cell(axes, 0, step, plot.number, _WEAK + (1 - _WEAK) * step / (_SHADES - 1))
    labels = [_value_at(step / (_SHADES - 1), low, high, log=plot.log) for step in range(_SHADES)]
    axes.set_yticks(range(_SHADES), [f"{value:.3g}" for value in labels])
    axes.set(xticks=[], xlim=(-0.5, 0.5), ylim=(-0.5, _SHADES - 0.5), title=plot.value_label)
    axes.title.set(fontsize=10, ha="right")
    axes.yaxis.tick_right()
    axes.grid(visible=False)


def _shade(value: float, low: float, high: float, *, log: bool) -> float:
    if log:
        value, low, high = (math.log(max(each, low)) for each in (value, low, high))
    return _WEAK + (1 - _WEAK) * (value - low) / (high - low) if high > low else 1.0


def _value_at(share: float, low: float, high: float, *, log: bool) -> float:
    return low * (high / low) ** share if log and low > 0 else low + (high - low) * share


def _spread(labels: Sequence[str], most: int) -> tuple[list[int], list[str]]:
    """At most ``most`` of the labels, evenly spaced."""
    every = max(1, math.ceil(len(labels) / most))
    return list(range(0, len(labels), every)), list(labels[::every])


_LEGEND_ROOM = ((3, 18), (2, 32))  # columns, and the letters that fit into each


def _draw_legend(figure: "Figure") -> None:
    if not any(axes.get_legend_handles_labels()[0] for axes in figure.axes):
        return  # nothing was measured; matplotlib warns of an empty legend
    names = [short_name(name) for axes in figure.axes for name in axes.get_legend_handles_labels()[1]]
    handles = [handle for axes in figure.axes for handle in axes.get_legend_handles_labels()[0]]
    longest = max(map(len, names))
    columns = next((columns for columns, room in _LEGEND_ROOM if longest <= room), 1)
    figure.legend(
        handles, names, loc="outside lower center", ncols=columns, fontsize=9.5, handlelength=2.2, columnspacing=1.2
    )


def _number_log_axis(axis: "Axis") -> None:
    """1, 2, 5, 10, ... written out, as far as there is room."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=9))
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.set_minor_formatter(NullFormatter())
