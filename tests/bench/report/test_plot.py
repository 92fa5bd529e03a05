"""Every kind of plot as SVG with its text, in the colors of the playground for a light and a dark screen."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tightwire.bench.report.plot import bars, colors, lines, series_color, svg
from tightwire.bench.report.table import Column

ROWS = [
    {"name": "first", "size": 1, "s": 2.0, "low": 1.0, "high": 3.0},
    {"name": "policy:some/where/my-mix.json", "size": 10, "s": 3.0, "low": 2.0, "high": 4.0},
    {"name": "first", "size": 10, "s": 4.0, "low": 3.0, "high": 5.0},
    {"name": "unknown", "size": 10, "s": None},
]
PARTS = [Column("queue", "low"), Column("run", "s"), Column("none", "no"), Column("high", "high")]
X, Y = Column("x words", "size", "d"), Column("y words", "s", ".1f", 1e3)
PLOTS = {
    "lines": (
        lines("Lines & points", ROWS, by="name", x=X, y=Y, ticks=True),
        ["x words", "y words", "first", "policy:my-mix", "10"],
    ),
    "points": (lines("Points", ROWS, by="name", x=X, y=Y, log_x=False, joined=False), ["first"]),
    "no rows": (lines("Nothing yet", [], by="name", x=X, y=Y, log_x=False), ["x words", "y words"]),
    "bars": (
        bars("Bars", ROWS, label=Column("name", "name"), parts=PARTS, x_label="ms"),
        ["first", "unknown", "queue", "run", "ms"],
    ),
}


@pytest.mark.parametrize("kind", PLOTS)
def test_a_plot_is_svg_with_its_words_as_text(kind: str) -> None:
    plot, words = PLOTS[kind]

    texts = {(element.text or "").strip() for element in ElementTree.fromstring(svg(plot)).iter()}

    assert set(words) <= texts


def test_colors_are_those_of_the_playground() -> None:
    css = (Path(__file__).parents[3] / "server/web/css/base.css").read_text()
    light, dark = css.split("@media (prefers-color-scheme: dark)")
    for name in ("text", "line", "compute", "codec", "wire", "other"):
        ours = colors()[name]
        assert f"--{name}: {ours[0]};" in light and f"--{name}: {ours[1]};" in dark
    assert len({series_color(number) for number in range(10)}) == 10


def test_a_dark_screen_gets_the_dark_colors() -> None:
    text = svg(PLOTS["lines"][0])
    light, dark = colors()["series-0"]

    assert f"stroke: {light}" in text.partition("<defs>")[2]
    assert f'@media (prefers-color-scheme: dark) {{ [style*="fill: {colors()["text"][0]}"]' in text
    assert f'[style*="stroke: {light}"] {{ stroke: {dark} !important }}' in text
    assert set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", text.partition("<defs>")[2])) <= {
        color for pair in colors().values() for color in pair
    } | {"#ffffff"}


def test_axes_have_plain_numbers() -> None:
    rows = [{"name": "a", "x": 50.0 * 10**power, "y": 0.001 * 10**power} for power in range(3)]
    text = svg(lines("Plain", rows, by="name", x=Column("x", "x", ",g"), y=Column("y", "y", "g")))

    assert ">100<" in text and ">1,000<" in text and ">0.01<" in text and "mathdefault" not in text
