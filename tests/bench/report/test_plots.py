"""Every kind of plot as it stands in a page: well-formed, in the page's colours, with its words and its data."""

import re
from xml.etree import ElementTree

import pytest

from tightwire.bench.report.html import Page, Section, TableView, render
from tightwire.bench.report.plots import Ecdf, HeatMap, Part, Plot, Samples, Series, StackedBars, draw

PLOTS = {
    "plot": Plot(
        name="one",
        title="Lines & points",
        x_label="x words",
        y_label="y words",
        series=[
            Series(name="first", number=0, x=[1, 10], y=[2, 3], low=[1, 2], high=[3, 4], labels=["here", "there"]),
            Series(name="twelfth", number=11, x=[1, 10], y=[2, 3], dashed=True),
        ],
        line_y=1.0,
    ),
    "bars": StackedBars(
        name="two",
        title="Bars",
        x_label="ms",
        bars=["a 128", "b 128"],
        parts=[Part(name="queue", number=0, values=[1, 2]), Part(name="compute", number=1, values=[0, 4])],
    ),
    "ecdf": Ecdf(
        name="three",
        title="ECDF",
        x_label="ms",
        samples=[Samples(name="a", number=0, values=[3, 1, 2]), Samples(name="b", number=1, values=[5.0] * 5000)],
        line_x=2.0,
    ),
    "heat map": HeatMap(
        name="four",
        title="Map",
        x_label="algorithm",
        y_label="layer",
        columns=["c1", "c2"],
        rows=["r1", "r2", "r3"],
        values=[[1, 2], [None, 0], [1e-3, 100]],
        value_label="dB",
        log=True,
    ),
}


@pytest.mark.parametrize("kind", PLOTS)
def test_a_plot_is_drawn_as_inline_svg(kind: str) -> None:
    plot = PLOTS[kind]

    svg = draw(plot)

    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img" and root.get("aria-label") == plot.title
    assert root.get("width") is None and root.get("viewBox")
    assert "#c0ff" not in svg and "var(--ink)" in svg and "var(--c1)" in svg
    ids = set(re.findall(r'\bid="([^"]+)"', svg))
    assert ids and all(name.startswith(f"{plot.name}-") for name in ids)
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg)) <= ids


def test_an_empty_plot_has_its_labels_and_no_warning() -> None:
    svg = draw(Plot(name="empty", title="Nothing yet", x_label="x words", y_label="y words", series=[], log_x=False))

    assert "x words" in svg and "y words" in svg


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("plot", ["x words", "y words", "first", "twelfth", "here", "there"]),
        ("bars", ["a 128", "b 128", "queue", "compute", "ms"]),
        ("ecdf", ["a", "b", "60%", "share at most this"]),
        ("heat map", ["c1", "c2", "r1", "r3", "dB", "algorithm", "100"]),
    ],
)
def test_labels_are_text(kind: str, words: list[str]) -> None:
    texts = {(element.text or "").strip() for element in ElementTree.fromstring(draw(PLOTS[kind])).iter()}

    assert set(words) <= texts


def test_many_samples_are_thinned_out() -> None:
    many = Samples(name="a", number=0, values=[i**0.5 for i in range(200_000)])

    assert len(draw(Ecdf(name="x", title="t", x_label="ms", samples=[many]))) < 60_000


def test_other_values_are_refused() -> None:
    with pytest.raises(TypeError, match="no plot: str"):
        draw("a plot")


def test_a_page_escapes_words_and_keeps_plots() -> None:
    table = TableView(columns=["<name>", "n"], rows=[["a & b", "1"], ["c", "2"]], wrong=frozenset([1]))
    page = render(
        Page(
            title="<Title>",
            lead="lead",
            sections=[Section(title="s", svg="<svg></svg>", table=table, words=["w <b>"])],
            alarms=["alarm!"],
            facts=[("command", "a 'b'")],
        )
    )

    assert "&lt;Title&gt;" in page and "w &lt;b&gt;" in page and "a &amp; b" in page
    assert "<svg></svg>" in page and '<tr class="wrong">' in page and "alarm!" in page
    assert "@media print" in page and "prefers-color-scheme: dark" in page and 'name="viewport"' in page


@pytest.mark.parametrize("name", ["int8", "flash:int8-had,int8-had", "policy:some/where/rather-deep/my-mix.json"])
def test_a_legend_of_long_names_stays_within_the_plot(name: str) -> None:
    series = [Series(name=name, number=number, x=[1.0], y=[2.0]) for number in range(4)]
    svg = ElementTree.fromstring(draw(Plot(name="legend", title="t", x_label="x", y_label="y", series=series)))
    width = float(svg.attrib["viewBox"].split()[2])
    texts = [text for text in svg.iter() if text.tag.endswith("text") and (text.text or "").startswith(name[:4])]
    assert len(texts) == 4 and all("/" not in (text.text or "") for text in texts)
    # Names begin where their text says; a letter takes some six points.
    lefts = [float(text.attrib["x"]) if "x" in text.attrib else _shift(text) for text in texts]
    assert all(
        left >= 0 and left + 6 * len(text.text or "") <= 1.1 * width for left, text in zip(lefts, texts, strict=True)
    )


def _shift(text: ElementTree.Element) -> float:
    found = re.search(r"translate\(([-\d.]+)", text.attrib["transform"])
    assert found is not None
    return float(found[1])
