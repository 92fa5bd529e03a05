"""The page of ``bench serve``: how long users waited under each load, when, and for what."""

from collections.abc import Sequence
from typing import Any

from tightwire.bench.client import Sample
from tightwire.bench.report.environment import environment_facts
from tightwire.bench.report.html import Page, Section, TableView, render
from tightwire.bench.report.plots import Ecdf, Plot, Samples, Series, draw
from tightwire.bench.serve.load import Arm
from tightwire.bench.serve.report import LATENCIES, STATISTICS, latency_cells, thin_tail
from tightwire.bench.serve.summary import latencies

_MOST_POINTS = 600  # of one load in a plot of single requests


def make_page(result: dict[str, Any], arms: Sequence[Arm]) -> str:
    """The result, as ``bench serve`` keeps it, in one HTML document."""
    slo = next((arm["goodput"]["slo"] for arm in result["arms"] if arm["goodput"]), {})
    sections = [
        _ecdf(arms, "ttft_s", "TTFT", "From sending a request to the first text.", slo.get("ttft_s")),
        _ecdf(arms, "itl_s", "ITL", "Gaps between pieces of text; a piece may hold several tokens.", None),
        _throughput(result["arms"]),
        _scatter(arms, "time", "TTFT over the time of the run", "s since the load began", _sent_s),
        _scatter(arms, "length", "TTFT by length of the prompt", "prompt tokens", _prompt_tokens),
        _rates(result["arms"]),
        _latencies(result["arms"]),
    ]
    server, workload = result["server"], result["workload"]
    return render(
        Page(
            title=f"{server['model']} under load",
            lead=f"{server['url']}, {workload['name']} prompts, {', '.join(arm.load.name for arm in arms)}",
            sections=[section for section in sections if section is not None],
            alarms=[
                *([f"Not complete: {result['error']}"] if result["error"] else []),
                *(f"{arm['load']}: {doubt}" for arm in result["arms"] for doubt in arm["doubts"]),
            ],
            facts=_facts(result),
        )
    )


def _ecdf(arms: Sequence[Arm], key: str, name: str, words: str, limit_s: float | None) -> Section | None:
    samples = [
        Samples(name=arm.load.name, number=number, values=[value * 1e3 for value in latencies(arm.samples)[key]])
        for number, arm in enumerate(arms)
        if latencies(arm.samples)[key]
    ]
    if not samples:
        return None
    title = f"{name}: the share that waited at most so long"
    limit = None if limit_s is None else limit_s * 1e3
    svg = draw(Ecdf(name=key.replace("_", "-"), title=title, x_label=f"{name}, ms", samples=samples, line_x=limit))
    return Section(title=title, words=[words if limit is None else f"{words} Dotted: the limit."], svg=svg)


def _throughput(summaries: Sequence[dict[str, Any]]) -> Section | None:
    """Nothing to draw for a single load, whose rates are in the table."""
    if len(summaries) < 2:
        return None
    by_rate = summaries[0]["concurrency"] is None
    x = [summary["request_rate"] if by_rate else summary["concurrency"] for summary in summaries]
    y = [summary["output_tokens_per_s"] for summary in summaries]
    title = "Throughput by load"
    plot = Plot(
        name="throughput",
        title=title,
        x_label="requests per second that were sent" if by_rate else "requests in flight",
        y_label="output tokens per second",
        series=[Series(name="all requests together", number=1, x=x, y=y)],
        ticks=(x, [f"{each:g}" for each in x]),
        log_y=False,
    )
    return Section(title=title, svg=draw(plot))


def _sent_s(sample: Sample) -> float:
    return sample.sent_s


def _prompt_tokens(sample: Sample) -> float:
    return sample.num_prompt


def _scatter(arms: Sequence[Arm], name: str, title: str, x_label: str, place: Any) -> Section | None:
    """One point for each request; None where all lie in one place."""
    series = []
    for number, arm in enumerate(arms):
        ok = [sample for sample in arm.samples if sample.error is None and sample.ttft_s is not None]
        ok = ok[:: max(1, -(-len(ok) // _MOST_POINTS))]
        x, y = [place(sample) for sample in ok], [(sample.ttft_s or 0.0) * 1e3 for sample in ok]
        series.append(Series(name=arm.load.name, number=number, x=x, y=y))
    if len({x for each in series for x in each.x}) < 2:
        return None
    plot = Plot(
        name=name,
        title=title,
        x_label=x_label,
        y_label="TTFT, ms",
        series=series,
        log_x=False,
        log_y=False,
        joined=False,
    )
    return Section(title=title, svg=draw(plot))


def _rates(summaries: Sequence[dict[str, Any]]) -> Section:
    columns = ["load", "succeeded", "failed", "requests/s", "output tokens/s", "tokens/s", "in flight"]
    with_goodput = any(summary["goodput"] for summary in summaries)
    rows = []
    for summary in summaries:
        total, goodput = summary["total_tokens_per_s"], summary["goodput"]
        row = [
            summary["load"],
            f"{summary['succeeded']} of {summary['requested']}",
            str(summary["failed"]),
            f"{summary['requests_per_s']:.2f}",
            f"{summary['output_tokens_per_s']:.1f}",
            "unknown" if total is None else f"{total:.1f}",
            f"{summary['mean_in_flight']:.1f}",
        ]
        good = [f"{goodput['share']:.1%}", f"{goodput['requests_per_s']:.2f}"] if goodput else []
        rows.append([*row, *good])
    errors = [
        f"{summary['load']}: failed {n} times: {error}"
        for summary in summaries
        for error, n in summary["errors"].items()
    ]
    names = [*columns, *(["within limits", "of these a second"] if with_goodput else [])]
    wrong = frozenset(number for number, summary in enumerate(summaries) if summary["failed"])
    table = TableView(columns=names, rows=rows, wrong=wrong)
    return Section(title="Rates", words=errors, table=table, wide=True)


def _latencies(summaries: Sequence[dict[str, Any]]) -> Section:
    rows = [
        [summary["load"], name, *latency_cells(summary[key])] for summary in summaries for key, name, _ in LATENCIES
    ]
    words = (
        "Measured at the client, from when a request is sent. TPOT is the mean of one answer's tokens after the first; ITL "
        "are all gaps between its pieces."
    )
    few = [f"{summary['load']}: {tail}" for summary in summaries if (tail := thin_tail(summary))]
    table = TableView(columns=["load", "ms", *STATISTICS], rows=rows, num_words=2)
    return Section(title="Latencies in milliseconds", words=[words, *few], table=table, wide=True)


def _facts(result: dict[str, Any]) -> list[tuple[str, str]]:
    server, workload = result["server"], result["workload"]
    refused = ", ".join(server["refused"]) or "none"
    return [
        *environment_facts(result["environment"]),
        ("server", f"{server['model']} at {server['url']}"),
        ("fields it refused", refused),
        ("workload", ", ".join(f"{name} {value}" for name, value in workload.items())),
        ("request", ", ".join(f"{name} {value}" for name, value in result["request"].items())),
    ]
