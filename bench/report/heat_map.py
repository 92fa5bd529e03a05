"""Heat maps: a number for each row and column as a shade of one colour, which the page's light or dark paper shines through."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from tightwire.bench.report.svg import canvas, colour, short_name

_STRONG = 0.85  # opacity of the largest value
_WEAK = 0.05  # of it, of the smallest
_SHADES = 5  # shown beside the map


@dataclass(frozen=True, kw_only=True, slots=True)
class HeatMap:
    """A number for each row and column, the larger the stronger its colour; None stays empty. ``log``: shades go by powers of ten."""

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


def draw_heat_map(plot: HeatMap) -> str:
    """The map as an ``<svg>`` element, with what its shades mean beside it."""
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


def _draw_cell(axes: Axes, x: float, y: float, number: int, shade: float) -> None:
    axes.bar(x, 1.0, width=1.0, bottom=y - 0.5, color=colour(number), alpha=_STRONG * shade, linewidth=0)


def _draw_shades(axes: Axes, plot: HeatMap, low: float, high: float) -> None:
    """What the shades mean, from low (below) to high."""
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
    """So many of the labels as find room, evenly."""
    every = max(1, math.ceil(len(labels) / most))
    return list(range(0, len(labels), every)), list(labels[::every])
