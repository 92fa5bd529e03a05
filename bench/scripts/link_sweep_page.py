"""The page of a sweep over links: how much quantizing gains on each, how near the bound it comes, where it stops paying."""

from collections.abc import Mapping, Sequence
from typing import Any

from tightwire.bench.report.html import Page, Section, TableView, render
from tightwire.bench.report.plots import Plot, Series, draw

_Rows = Sequence[Mapping[str, Any]]
_COLUMNS = ["TTFT ms", "share", "speed-up", "by formula", "MB", "/ (computing + wire)", "/ (with coding)"]


def make_page(result: Mapping[str, Any]) -> str:
    """The result of ``ttft_link`` in one HTML document."""
    rows, given = result["rows"], result["options"]
    numbers = {name: i for i, name in enumerate(dict.fromkeys(row["arm"] for row in rows))}
    nodes = f" on {given['nodes']} nodes" if given["nodes"] > 1 else ""
    sections = [
        _plot("TTFT", "ms", rows, numbers, lambda row: row["ttft_s"] * 1e3),
        _speed_up(rows, numbers),
        _plot("Share of the AllReduce in TTFT", "%", rows, numbers, lambda row: row["share"] * 100, log_y=False),
        _plot(
            "TTFT over computing, coding and bytes / bandwidth",
            "times the bound",
            rows,
            numbers,
            lambda row: row["over_bound"],
            log_y=False,
            line_y=1.0,
        ),
        _crossovers(result["crossovers"]),
        _table(rows),
    ]
    environment = result["environment"]
    return render(
        Page(
            title="Time to first token by bandwidth",
            lead=f"{result['model']}, {given['tp']} ranks{nodes}, {given['prompt_len']} prompt tokens, one at a time",
            sections=sections,
            alarms=[] if result["error"] is None else [result["error"]],
            facts=[
                ("time", environment["time"]),
                ("processor", f"{environment['cpu']}, {environment['usable_cores']} cores"),
                ("packages", ", ".join(f"{name} {version}" for name, version in environment["packages"].items())),
                ("tightwire", f"{environment['tightwire']}, revision {environment['git_revision'] or 'unknown'}"),
                ("command", " ".join(environment["command"])),
                ("wire", ", ".join(dict.fromkeys(row["emulation"] for row in rows))),
            ],
        )
    )


def _plot(title: str, y_label: str, rows: _Rows, numbers: Mapping[str, int], value: Any, **more: Any) -> Section:
    series = [
        Series(
            name=name,
            number=number,
            x=[_mbit(row) for row in rows if row["arm"] == name],
            y=[value(row) for row in rows if row["arm"] == name],
            dashed=not next(row["lossless"] for row in rows if row["arm"] == name),
        )
        for name, number in numbers.items()
    ]
    plot = Plot(
        name=title.split()[0].lower() + "-by-link",
        title=title,
        x_label="Mbit/s of payload",
        y_label=y_label,
        series=series,
        ticks=_ticks(rows),
        **more,
    )
    return Section(title=title, words=["Dashed: quantized."], svg=draw(plot))


def _speed_up(rows: _Rows, numbers: Mapping[str, int]) -> Section:
    series = []
    for name, number in numbers.items():
        own = [row for row in rows if row["arm"] == name and not row["lossless"] and row["speed_up"]]
        if own:
            series.append(
                Series(
                    name=name,
                    number=number,
                    x=[_mbit(row) for row in own],
                    y=[row["speed_up"] for row in own],
                    low=[row["speed_up_low"] for row in own],
                    high=[row["speed_up_high"] for row in own],
                )
            )
    title = "What quantizing gains"
    plot = Plot(
        name="gain-by-link",
        title=title,
        x_label="Mbit/s of payload",
        y_label="times as fast as the best lossless one",
        series=series,
        ticks=_ticks(rows),
        log_y=False,
        line_y=1.0,
    )
    return Section(title=title, words=["Bars: 95 % intervals. Below 1 it does not pay."], svg=draw(plot))


def _crossovers(found: _Rows) -> Section:
    texts = []
    for row in found:
        rates = [row["measured_bytes_per_s"], row["predicted_bytes_per_s"]]
        words = ["none" if rate is None else f"{rate * 8 / 1e6:.0f}" for rate in rates]
        words[0] += " (extrapolated)" if row["extrapolated"] and rates[0] else ""
        words.append(row["predicted_from"])
        texts.append([row["arm"], row["against"], *words, "-" if row["off"] is None else f"{row['off']:+.0%}"])
    table = TableView(
        columns=["AllReduce", "against", "measured Mbit/s", "predicted Mbit/s", "from", "off"], num_words=2, rows=texts
    )
    return Section(title="Where quantizing stops paying", words=["Above this bandwidth it costs time."], table=table)


def _table(rows: _Rows) -> Section:
    texts = []
    for row in rows:
        gain = "-" if row["speed_up"] is None else f"{row['speed_up']:.2f}"
        texts.append(
            [
                f"{row['link']} ({_mbit(row):.0f} Mbit/s)",
                row["arm"],
                f"{row['ttft_s'] * 1e3:.0f}",
                f"{row['share']:.0%}",
                gain,
                "-" if row["formula"] is None else f"{row['formula']:.2f}",
                f"{row['wire_bytes'] / 1e6:.1f}",
                f"{row['over_bytes_bound']:.3f}",
                f"{row['over_bound']:.3f}",
            ]
        )
    strong = frozenset(i for i, row in enumerate(rows) if row["verdict"] == "faster")
    table = TableView(columns=["link", "AllReduce", *_COLUMNS], num_words=2, rows=texts, strong=strong)
    words = "Speed-up against the best lossless one; by formula: 1 / (1 - c + c r), c its share of TTFT, r the ratio of bytes."
    return Section(title="Every link", words=[words], table=table, wide=True)


def _ticks(rows: _Rows) -> tuple[list[float], list[str]]:
    rates = sorted({round(_mbit(row)): _mbit(row) for row in rows}.items())
    return [rate for _, rate in rates], [str(name) for name, _ in rates]


def _mbit(row: Mapping[str, Any]) -> float:
    return row["bytes_per_s"] * 8 / 1e6
