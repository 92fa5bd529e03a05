"""The page of ``bench ttft``: who is faster and by how much, where the time goes, what an error buys, every cell."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from tightwire.bench.report.environment import environment_facts
from tightwire.bench.report.html import Page, Section, TableView, render
from tightwire.bench.report.plots import Ecdf, Part, Plot, Samples, Series, StackedBars, draw
from tightwire.bench.report.quiet import quiet_facts
from tightwire.bench.ttft.summary import PARTS
from tightwire.bench.ttft.words import (
    LEGENDS,
    OTHER_COLUMNS,
    RANDOM_WEIGHTS,
    TTFT_COLUMNS,
    describe_link,
    describe_setting,
    other_texts,
    recommended_lines,
    ttft_texts,
)
from tightwire.comm.sizes import format_bytes

_Rows = Sequence[Mapping[str, Any]]
_LABEL_SHARE = 0.06  # of a plot's height: what a label takes
_TICK_RATIO = 1.3  # of two message sizes whose names do not touch


def make_page(result: Mapping[str, Any]) -> str:
    """The result, as ``bench ttft`` keeps it in JSON, in one HTML document."""
    rows = result["cells"]
    numbers = {name: i for i, name in enumerate(dict.fromkeys(row["arm"] for row in rows))}
    sections = [_recommended(result)]
    for concurrency in sorted({row["concurrency"] for row in rows}):
        own = [row for row in rows if row["concurrency"] == concurrency]
        sections += [_by_length(own, numbers, concurrency), _parts(own, concurrency)]
    sections += [_by_size(result["traced_all_reduces"], numbers), _bargain(rows, numbers)]
    sections += _ecdfs(result["samples"], numbers)
    sections += [
        _table("TTFT, ms", LEGENDS[0], TTFT_COLUMNS, rows),
        _table("Beside it", LEGENDS[1], OTHER_COLUMNS, rows),
    ]
    return render(
        Page(
            title="Time to first token by AllReduce",
            lead=describe_setting(result),
            sections=[section for section in sections if section is not None],
            alarms=[] if result["error"] is None else [result["error"]],
            facts=_facts(result),
        )
    )


def _recommended(result: Mapping[str, Any]) -> Section | None:
    lines = recommended_lines(result)
    return Section(title="What to take", words=lines, wide=True) if lines else None


def _by_length(rows: _Rows, numbers: Mapping[str, int], concurrency: int) -> Section:
    """Medians, with the bootstrap interval of the ratio to the baseline laid around them."""
    series = []
    for name, number in numbers.items():
        own = [row for row in rows if row["arm"] == name]
        y = [row["ttft_s"]["p50"] * 1e3 for row in own]
        ratios = [row["ratio"] or {"ratio": 1.0, "low": 1.0, "high": 1.0} for row in own]
        series.append(
            Series(
                name=name,
                number=number,
                x=[row["prompt_len"] for row in own],
                y=y,
                dashed=not own[0]["lossless"],
                low=[value * ratio["low"] / ratio["ratio"] for value, ratio in zip(y, ratios, strict=True)],
                high=[value * ratio["high"] / ratio["ratio"] for value, ratio in zip(y, ratios, strict=True)],
            )
        )
    lengths = sorted({row["prompt_len"] for row in rows})
    title = f"TTFT by prompt length, {concurrency} at a time"
    plot = Plot(
        name=f"length-{concurrency}",
        title=title,
        x_label="prompt tokens",
        y_label="median ms",
        series=series,
        ticks=(lengths, [str(length) for length in lengths]),
    )
    words = "Bars: the 95 % interval of the ratio to the baseline. Dashed: quantized."
    return Section(title=title, words=[words], svg=draw(plot))


def _parts(rows: _Rows, concurrency: int) -> Section:
    title = f"Where TTFT goes, {concurrency} at a time"
    parts = [
        Part(name=part.removesuffix("_s"), number=i, values=[(row["parts_s"][part] or 0.0) * 1e3 for row in rows])
        for i, part in enumerate(PARTS)
    ]
    bars = [f"{row['prompt_len']} {row['arm']}" for row in rows]
    plot = StackedBars(name=f"parts-{concurrency}", title=title, x_label="ms inside the server", bars=bars, parts=parts)
    words = "Medians of each part. AllReduce: waiting for slower ranks included"
    inside = any(row["parts_s"]["codec_s"] is None for row in rows)
    return Section(
        title=title, words=[words + ("; so is coding, in fused kernels." if inside else ".")], svg=draw(plot)
    )


def _by_size(traced: _Rows, numbers: Mapping[str, int]) -> Section | None:
    """Of the untimed turns in which every message was recorded."""
    series = []
    for name, number in numbers.items():
        times: dict[int, list[float]] = {}
        for event in traced:
            if event["arm"] == name:
                times.setdefault(event["message_bytes"], []).append(event["seconds"])
        sizes = sorted(times)
        series.append(Series(name=name, number=number, x=sizes, y=[median(times[size]) * 1e6 for size in sizes]))
    sizes = sorted({event["message_bytes"] for event in traced})
    if not sizes:
        return None
    title = "AllReduce by message size"
    shown = [size for i, size in enumerate(sizes) if i == 0 or size >= _TICK_RATIO * sizes[i - 1]]
    ticks = None if len(shown) > 8 else (shown, [format_bytes(size) for size in shown])
    plot = Plot(name="size", title=title, x_label="message size", y_label="median us", series=series, ticks=ticks)
    words = "Of prompt rows on rank 0, coding included, as recorded in the turns that prove what was sent."
    return Section(title=title, words=[words], svg=draw(plot))


def _bargain(rows: _Rows, numbers: Mapping[str, int]) -> Section | None:
    """Speed-up over the best lossless one against error."""
    series = []
    gains = [row["ratio_to_best_lossless"] for row in rows if not row["lossless"] and row["ratio_to_best_lossless"]]
    height = max((1 / g["low"] for g in gains), default=0.0) - min((1 / g["high"] for g in gains), default=0.0)
    for name, number in numbers.items():
        own = [row for row in rows if row["arm"] == name and not row["lossless"] and row["ratio_to_best_lossless"]]
        if own:
            ratios = [row["ratio_to_best_lossless"] for row in own]
            series.append(
                Series(
                    name=name,
                    number=number,
                    x=[row["error"] for row in own],
                    y=[1 / ratio["ratio"] for ratio in ratios],
                    low=[1 / ratio["high"] for ratio in ratios],
                    high=[1 / ratio["low"] for ratio in ratios],
                    labels=_joint_labels(
                        [f"{row['prompt_len']}, {row['concurrency']}" for row in own],
                        [1 / ratio["ratio"] for ratio in ratios],
                        least_gap=_LABEL_SHARE * height,
                    ),
                )
            )
    if not series:
        return None
    title = "What an error buys"
    plot = Plot(
        name="bargain",
        title=title,
        x_label="relative RMS error of one AllReduce",
        y_label="times as fast as the best lossless one",
        series=series,
        log_y=False,
        joined=False,
        line_y=1.0,
    )
    words = "Further up is faster, further left is more exact. Beside a point: prompt tokens, requests at a time."
    return Section(title=title, words=[words], svg=draw(plot))


def _joint_labels(labels: Sequence[str], y: Sequence[float], *, least_gap: float) -> list[str]:
    """Of points above each other, those that would lie on one another share the lowest one's place."""
    shown = [""] * len(labels)
    lowest: int | None = None
    for place in sorted(range(len(labels)), key=lambda place: y[place]):
        if lowest is None or y[place] - y[lowest] >= least_gap:
            lowest = place
            shown[place] = labels[place]
        else:
            shown[lowest] += f"; {labels[place]}"
    return shown


def _ecdfs(samples: _Rows, numbers: Mapping[str, int]) -> list[Section]:
    """Of the fewest requests at a time: with more, those of a turn wait for each other."""
    sections = []
    fewest = min(sample["concurrency"] for sample in samples)
    samples = [sample for sample in samples if sample["concurrency"] == fewest]
    for length in sorted({sample["prompt_len"] for sample in samples}):
        title = f"TTFT of {length} prompt tokens, {fewest} at a time"
        own = [
            Samples(
                name=name,
                number=number,
                values=[s["ttft_s"] * 1e3 for s in samples if (s["arm"], s["prompt_len"]) == (name, length)],
            )
            for name, number in numbers.items()
        ]
        plot = Ecdf(name=f"ecdf-{length}", title=title, x_label="ms", samples=own, log_x=True)
        sections.append(Section(title=title, words=["The share of requests that were faster."], svg=draw(plot)))
    return sections


def _table(title: str, legend: str, columns: Sequence[str], rows: _Rows) -> Section:
    texts = ttft_texts if columns is TTFT_COLUMNS else other_texts
    table = TableView(
        columns=["prompt", "at a time", "algorithm", *columns],
        num_words=3,
        rows=[[str(row["prompt_len"]), str(row["concurrency"]), row["arm"], *texts(row)] for row in rows],
        strong=frozenset(i for i, row in enumerate(rows) if row["ratio"] and row["ratio"]["verdict"] == "faster"),
    )
    return Section(title=title, words=[legend], table=table, wide=True)


def _facts(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    comm = result.get("comm") or {}
    facts = [
        *environment_facts(result["environment"]),
        ("transport", str(comm.get("transport", "unknown"))),
        ("wire", describe_link(comm.get("link"))),
        ("warm-up", "two turns of each algorithm in each cell, not counted"),
    ]
    if result["random_weights"]:
        facts.append(("answers", RANDOM_WEIGHTS))
    return [*facts, *quiet_facts(result)]
