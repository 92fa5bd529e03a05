"""Turns a matplotlib figure into SVG that is embedded in a page and takes the page's colours, light or dark.

Matplotlib draws with placeholder colours, which are then replaced by CSS variables: ``--ink``, ``--grid`` and ``--c0`` to
``--c9`` for the series. Needs the ``bench`` extra.
"""

import io
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from html import escape
from pathlib import PurePath
from typing import Any

NUM_COLOURS = 10
INK, GRID = "#c0ffe0", "#c0ffe1"
_STYLE: dict[Any, Any] = {
    "font.size": 10.5,
    "font.family": "sans-serif",
    "svg.fonttype": "none",  # text stays text: it can be searched, and takes the page's font
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def colour(number: int) -> str:
    """The placeholder of a series' colour; the eleventh series has the colour of the first."""
    return f"#c0ff{number % NUM_COLOURS:02x}"


def short_name(name: str) -> str:
    """``name`` as a plot has room for it: of a policy's path only the file name."""
    kind, colon, path = name.partition(":")
    return f"{kind}:{PurePath(path).stem}" if colon and "/" in path else name


class Canvas:
    """A figure, and its SVG when it is drawn."""

    def __init__(self, name: str, title: str, *, width: float = 5.6, height: float = 4.3) -> None:
        self._name, self._title = name, title
        from matplotlib.figure import Figure

        self.figure = Figure(figsize=(width, height), layout="constrained")

    def svg(self) -> str:
        out = io.StringIO()
        self.figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        return _inline(out.getvalue(), self._name, self._title)


@contextmanager
def canvas(name: str, title: str, *, width: float = 5.6, height: float = 4.3) -> Iterator[Canvas]:
    """Draw into ``figure`` and call ``svg()`` inside the block. ``name`` is unique on its page."""
    import matplotlib

    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        yield Canvas(name, title, width=width, height=height)


def _inline(svg: str, name: str, title: str) -> str:
    """Without the file header, with ids that are unique on the page, scalable, and in the page's colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*"', r"<svg \1", svg, count=1)
    label = f'<svg role="img" aria-label="{escape(title)}" '
    svg = re.sub(r'<svg ([^>]*?)height="[^"]*"', lambda match: label + match[1], svg, count=1)
    for stand_in, variable in _variables():
        svg = re.sub(stand_in, f"var({variable})", svg, flags=re.IGNORECASE)
    return svg


def _variables() -> Iterable[tuple[str, str]]:
    yield INK, "--ink"
    yield GRID, "--grid"
    for number in range(NUM_COLOURS):
        yield colour(number), f"--c{number}"
