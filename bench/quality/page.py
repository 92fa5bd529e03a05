"""Makes the page of ``bench quality``: accuracy against bytes, noise by layer, and all numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

from tightwire.bench.quality.arms import EXACT, LOSSY_SITES
from tightwire.bench.quality.report import (
    COLUMNS,
    LEGEND,
    cell_texts,
    db_text,
    exact_texts,
    finding_words,
)
from tightwire.bench.report.html import Section, TableView
from tightwire.bench.report.plots import Ecdf, HeatMap, Plot, Samples, Series, draw

_Rows = Sequence[Mapping[str, Any]]


def make_sections(result: Mapping[str, Any]) -> list[Section]:
    """Make the plots and tables of a result."""
    rows = result["cells"]
    numbers = {name: i for i, name in enumerate(dict.fromkeys(row["algorithm"] for row in rows))}
    sizes = sorted({row["world_size"] for row in rows})
    sections = [Section(title="Found", words=words)] if (words := finding_words(result)) else []
    sections += [_bargain([row for row in rows if row["world_size"] == size], numbers, size) for size in sizes]
    sections += [_ecdf(rows, numbers, sizes[0])]
    sections += [_heat_map(rows, sizes[0], site) for site in LOSSY_SITES]
    if result["search"] is not None:
        sections.append(_mix(result["search"]))
    sections += [_legs(rows), _every(result)]
    return sections


def _bargain(rows: _Rows, numbers: Mapping[str, int], world_size: int) -> Section:
    title = f"KL against bytes, {world_size} ranks"
    lossy = [row for row in rows if row["kl_mean"] > 0]
    series = [
        Series(
            name=row["algorithm"],
            number=numbers[row["algorithm"]],
            x=[row["bytes_share"]],
            y=[row["kl_mean"]],
        )
        for row in lossy
    ]
    plot = Plot(
        name=f"bargain-{world_size}",
        title=title,
        x_label="bytes sent, of the lossless sum's",
        y_label="mean KL, nats",
        series=series,
        log_x=False,
        joined=False,
    )
    words = ["Further down is more exact, further left sends less."]
    missing = [row["algorithm"] for row in rows if row["kl_mean"] == 0]
    if missing:
        words.append(f"Not drawn, as they are exact: {', '.join(missing)}.")
    return Section(title=title, words=words, svg=draw(plot) if series else "")


def _ecdf(rows: _Rows, numbers: Mapping[str, int], world_size: int) -> Section:
    title = f"KL of each window, {world_size} ranks"
    samples = [
        Samples(name=own["algorithm"], number=numbers[own["algorithm"]], values=own["samples"]["kl"])
        for own in rows
        if own["world_size"] == world_size and min(own["samples"].get("kl", [0.0])) > 0
    ]
    if not samples:
        return Section(title=title, words=["All are exact."])
    plot = Ecdf(name="windows", title=title, x_label="mean KL of a window, nats", samples=samples, log_x=True)
    words = "The share of windows whose KL is at most so large: whether the text or the codec makes the difference."
    return Section(title=title, words=[words], svg=draw(plot))


def _heat_map(rows: _Rows, world_size: int, site: str) -> Section:
    """Plot noise-to-signal, so that worse places are darker."""
    title = f"Noise by layer: {site}, {world_size} ranks"
    own = [row for row in rows if row["world_size"] == world_size]
    values = [[None if db is None else -db for db in row["sqnr_db"][site]["layers"]["total"]] for row in own]
    plot = HeatMap(
        name=f"noise-{site.replace('_', '-')}",
        title=title,
        x_label="layer",
        y_label="",
        columns=[str(layer) for layer in range(len(values[0]))],
        rows=[row["algorithm"] for row in own],
        values=values,
        value_label="noise, dB of signal",
    )
    return Section(title=title, words=["Darker is noisier; empty cells have no noise."], svg=draw(plot))


def _mix(search: Mapping[str, Any]) -> Section:
    """Show the algorithm that the search chose at each place, and the numbers behind the choice."""
    rows = [
        [
            place["site"],
            str(place["layer"]),
            place["algorithm"],
            f"{place['kl_per_noise_power']:.2e}",
            f"{place['predicted_kl']:.2e}",
        ]
        for place in search["chosen"]
    ]
    columns = ["site", "layer", "algorithm", "KL by noise power", "KL predicted"]
    words = (
        f"Of {len(search['candidates'])} candidates at each place, the mix of at most {search['bytes_of']}'s bytes whose "
        "predicted KL is least; sensitivities are of each place quantized alone."
    )
    table = TableView(columns=columns, rows=rows, num_words=3)
    return Section(title="The mix", words=[words], table=table, wide=True)


def _legs(rows: _Rows) -> Section:
    """Show signal-to-noise over all layers, by leg."""
    legs = ("total", "reduce", "gather")
    columns = ["ranks", "algorithm", *(f"{site} {leg}" for site in LOSSY_SITES for leg in legs)]
    texts = [
        [
            str(row["world_size"]),
            row["algorithm"],
            *(db_text(row["sqnr_db"][site][leg]) for site in LOSSY_SITES for leg in legs),
        ]
        for row in rows
    ]
    words = (
        "Decibels, mean of the layers' noise-to-signal ratios. Total: the AllReduce's result against the lossless one, "
        "with its rounding to the model's dtype; the legs are without it."
    )
    table = TableView(columns=columns, rows=texts, num_words=2)
    return Section(title="Signal to noise", words=[words], table=table, wide=True)


def _every(result: Mapping[str, Any]) -> Section:
    rows: list[list[str]] = []
    for exact in result["exact"]:
        size = exact["world_size"]
        rows.append([str(size), EXACT, *exact_texts(exact)])
        rows += [
            [str(size), row["algorithm"], *cell_texts(row)] for row in result["cells"] if row["world_size"] == size
        ]
    table = TableView(columns=["ranks", "algorithm", *COLUMNS], rows=rows, num_words=2)
    return Section(title="Every number", words=[LEGEND], table=table, wide=True)
