"""Every kind of plot as SVG with its text, and the page around plots and tables."""

from base64 import b64decode
from xml.etree import ElementTree

import pytest

from tightwire.bench.report.page import Plot, Text, bars, lines, render, svg
from tightwire.bench.report.table import Column, Table

ROWS = [
    {"name": "first", "size": 1, "s": 2.0, "low": 1.0, "high": 3.0},
    {"name": "policy:some/where/my-mix.json", "size": 10, "s": 3.0, "low": 2.0, "high": 4.0},
    {"name": "first", "size": 10, "s": 4.0, "low": 3.0, "high": 5.0},
    {"name": "unknown", "size": 10, "s": None},
]
X, Y = Column("x words", "size", "d"), Column("y words", "s", ".1f", 1e3)
PLOTS = {
    "lines": (
        lines("Lines & points", ROWS, by="name", x=X, y=Y, ticks=True),
        ["x words", "y words", "first", "policy:my-mix", "10"],
    ),
    "points": (lines("Points", ROWS, by="name", x=X, y=Y, log_x=False, joined=False), ["first"]),
    "no rows": (lines("Nothing yet", [], by="name", x=X, y=Y, log_x=False), ["x words", "y words"]),
    "bars": (
        bars(
            "Bars", ROWS, label=Column("name", "name"), parts=[Column("queue", "low"), Column("run", "s")], x_label="ms"
        ),
        ["first", "unknown", "queue", "run", "ms"],
    ),
}


@pytest.mark.parametrize("kind", PLOTS)
def test_a_plot_is_svg_with_its_words_as_text(kind: str) -> None:
    plot, words = PLOTS[kind]

    texts = {(element.text or "").strip() for element in ElementTree.fromstring(svg(plot)).iter()}

    assert set(words) <= texts


def test_a_page_escapes_text_and_embeds_plots() -> None:
    table = Table(
        columns=[Column("<name>", "name"), Column("n", "n", "d")],
        rows=[{"name": "a & b", "n": 1}, {"name": "c", "n": None}],
        title="Table",
        note="w <b>",
        wrong=lambda row: row["n"] is None,
    )
    plot: Plot = PLOTS["lines"][0]

    page = render(
        "<Title>", "lead", [plot, table, Text(title="T", lines=["one"])], alarms=["alarm!"], facts=[("k", "a 'b'")]
    )

    assert "&lt;Title&gt;" in page and "w &lt;b&gt;" in page and "a &amp; b" in page and "alarm!" in page
    assert '<tr class="wrong"><td class="word">c</td><td>-</td>' in page and "<td>1</td>" in page
    assert 'alt="Lines &amp; points"' in page and "one" in page and "<dt>k</dt>" in page
    embedded = page.partition("base64,")[2].partition('"')[0]
    assert b64decode(embedded).decode() == svg(plot)
