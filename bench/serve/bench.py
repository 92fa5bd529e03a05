"""``tightwire bench serve``: puts load on a running server and measures it as its clients would.

Steps: reach the server, find out which fields it accepts, fit prompts to the requested length by the server's own count,
then for each load warm up, measure, print and write files. Results are kept when the server dies and after Ctrl-C.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx

from tightwire.bench.client import BenchClient, Prompt
from tightwire.bench.report.environment import without_password
from tightwire.bench.report.page import Item, ecdf, lines
from tightwire.bench.report.table import Column, Metric, Row, Table
from tightwire.bench.run import Bench, BenchFailedError
from tightwire.bench.serve.cells import OUTPUT_RATE, latency_table, rate_table, summarize, warnings_of
from tightwire.bench.serve.fit import fit_scale, send_accepted_fields
from tightwire.bench.serve.load import LoadRun, run_load
from tightwire.bench.serve.options import ServeBenchOptions, Workload
from tightwire.bench.serve.workload import FileWorkload
from tightwire.server.cli.remote import Remote, RemoteError, connect

_MOST_POINTS = 2000  # in a plot of single requests
_CSV_KEYS = (
    *("load", "index", "sent_s", "late_s", "ttft_s", "tpot_s", "e2e_s"),
    *("num_prompt", "num_cached", "num_generated", "finish_reason", "error"),
)
_WITHOUT = {
    "ignore_eos": "answers may end before their length, so rates of different servers count different answers",
    "stream_options": "it may not report token counts; then events with text are counted",
}
STARTUP_METRIC = re.compile(r"^tightwire_startup_seconds(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)


class ServeBench(Bench[ServeBenchOptions]):
    """Exit codes: 0, 1 when there is nothing usable or a load was cut short, 2 for bad options, 130 after Ctrl-C."""

    verb = "serve"
    options_type = ServeBenchOptions
    description = "Put load on a running OpenAI-compatible server, Tightwire or another, and measure at the client."
    metrics = (
        *(Metric(name=name, unit="ms", scale=1e3) for name in ("ttft_s", "tpot_s", "e2e_s")),
        Metric(name="itl_s", unit="ms", scale=1e3, decides=False),
    )
    pairing_keys = ("workload", "request")
    failures = ((RemoteError, 1), (ValueError, 1))

    def __init__(self, options: ServeBenchOptions) -> None:
        super().__init__(options)
        self._running: LoadRun | None = None

    def measure(self) -> None:
        options = self.options
        workload = options.make_workload()
        remote = connect(options.url, model=options.model, api_key=options.api_key)
        self.facts = {
            "server": {
                "url": without_password(remote.base),
                "model": remote.model,
                "startup_s": startup_seconds(remote),
                "refused": [],
            },
            "workload": {"name": workload.name, "seed": options.seed},
        }
        try:
            with self.progress:
                asyncio.run(self._measure(remote, workload))
        except KeyboardInterrupt:
            if self._running is not None:
                self._running.stopped = self._running.stopped or "interrupted"
                self._close(self._running, None)
            raise
        if failure := self._failure():
            raise BenchFailedError(failure)

    def csv(self, result: Mapping[str, Any]) -> Table:
        """A row for each request."""
        rows = [{"load": cell["name"], **raw} for cell in result["cells"] for raw in cell["raw"]]
        return Table(columns=[Column(key, key) for key in _CSV_KEYS], rows=rows)

    def title(self, result: Mapping[str, Any]) -> tuple[str, str]:
        server, workload = result["server"], result["workload"]
        loads = ", ".join(cell["name"] for cell in result["cells"])
        return f"{server['model']} under load", f"{server['url']}, {workload['name']} prompts, {loads}"

    def sections(self, result: Mapping[str, Any]) -> list[Item]:
        cells, limits = result["cells"], self.options.slo
        notes = [f"{cell['name']}: {text}" for cell in cells for text in warnings_of(cell)]
        rates = replace(rate_table(cells), note=". ".join([*_describe_limits(limits), *notes]))
        return [*_plots(cells, limits), rates, replace(latency_table(cells), title="Latencies in milliseconds")]

    async def _measure(self, remote: Remote, workload: Workload) -> None:
        options = self.options
        async with BenchClient(remote, timeout_s=options.timeout_s, extra_body=options.body()) as client:
            trial = _trial(options.endpoint, workload)
            body, refused = await send_accepted_fields(client, options.body(), trial)
            self.facts["server"]["refused"], self.facts["request"] = refused, body
            self.facts["workload"] |= await _fit(client, workload)
            self._show_head()
            # All prompts are taken first: a lack of them is then known before anything is measured.
            shares = [
                (workload.take(options.warmups_of(i)), workload.take(options.requests_of(i)))
                for i in range(len(options.loads))
            ]
            for load, (warmups, prompts) in zip(options.loads, shares, strict=True):
                self._running = run = LoadRun(load=load, num_requests=len(prompts))
                await self._measure_load(client, run, warmups, prompts)
                if run.stopped:
                    return

    async def _measure_load(
        self, client: BenchClient, run: LoadRun, warmups: Sequence[Prompt], prompts: Sequence[Prompt]
    ) -> None:
        seed = self.options.seed
        warm = LoadRun(load=run.load, num_requests=len(warmups))
        task = self.progress.add_task(f"{run.load.name}, warm-up", total=len(warmups))
        if warmups:
            await run_load(warm, warmups, client.measure, seed=seed, done=lambda: self.progress.advance(task))
        if warm.samples and all(sample.error for sample in warm.samples):
            run.stopped = f"every warm-up request failed; the last: {warm.samples[-1].error}"
        else:
            self.progress.update(task, description=run.load.name, total=len(prompts), completed=0)
            await run_load(run, prompts, client.measure, seed=seed, done=lambda: self.progress.advance(task))
            if run.stopped is None and run.samples[-1].error:
                run.stopped = self._why_unreachable()
        self.progress.remove_task(task)
        full_length = self.options.generates_full_length
        self._close(run, [prompt.max_tokens for prompt in prompts] if full_length else None)

    def _close(self, run: LoadRun, expected_generated: Sequence[int] | None) -> None:
        self._running = None
        cell = summarize(run, self.options.slo, expected_generated)
        self.measured.append(cell)
        self.print_table(latency_table([cell]))
        self.print_table(rate_table([cell]))
        self.print(*_describe_limits(self.options.slo))
        for text in warnings_of(cell):
            self.note(text)
        self.print("")
        self.keep()

    def _why_unreachable(self) -> str | None:
        """None where the server answers. It may have died too late for many failures in a row."""
        options = self.options
        try:
            connect(options.url, model=options.model, api_key=options.api_key)
        except RemoteError as error:
            return str(error)
        return None

    def _failure(self) -> str | None:
        for cell in self.measured:
            if cell["stopped"]:
                return f"{cell['name']} stopped early: {cell['stopped']}"
            if not cell["succeeded"]:
                return f"{cell['name']}: all requests failed: {'; '.join(cell['errors'])}"
        return None

    def _show_head(self) -> None:
        server, workload = self.facts["server"], self.facts["workload"]
        facts = ", ".join(f"{name} {value}" for name, value in workload.items() if name != "name")
        self.print(f"{server['model']} at {server['url']}: {workload['name']} prompts, {facts}")
        for name in server["refused"]:
            self.note(f"the server refuses {name}: {_WITHOUT[name]}")
        if server["startup_s"] is not None:
            self.print(f"the server was ready {server['startup_s']:.2f} s after its start")
        self.print("")


def _describe_limits(limits: Mapping[str, float]) -> list[str]:
    text = ", ".join(f"{name.removesuffix('_s')} {limit * 1e3:g} ms" for name, limit in limits.items())
    return [f"within limits: requests that met {text}"] if limits else []


def _plots(cells: Sequence[Row], limits: Mapping[str, float]) -> list[Item]:
    requests = [{"load": cell["name"], **raw} for cell in cells for raw in cell["raw"] if raw["error"] is None]
    ttfts: dict[str, list[float]] = {}
    gaps: dict[str, list[float]] = {}
    for row in requests:
        ttfts.setdefault(row["load"], []).extend([row["ttft_s"] * 1e3] if row["ttft_s"] is not None else [])
        gaps.setdefault(row["load"], []).extend(gap * 1e3 for gap in row["itl_s"])
    limit = limits["ttft_s"] * 1e3 if "ttft_s" in limits else None
    note = "From sending a request to the first text." + (" Dotted: the limit." if limit else "")
    plots: list[Item] = []
    if known := {name: values for name, values in ttfts.items() if values}:
        plots.append(ecdf("TTFT: share at most this", known, x_label="TTFT, ms", limit=limit, note=note))
    if known := {name: values for name, values in gaps.items() if values}:
        note = "Gaps between events with text; an event may hold several tokens."
        plots.append(ecdf("ITL: share at most this", known, x_label="ITL, ms", note=note))
    if len(cells) > 1:
        by_rate = cells[0]["concurrency"] is None
        x = Column("requests per second", "request_rate", "g") if by_rate else Column("in flight", "concurrency", "g")
        rows = [{**cell, "all": "all requests"} for cell in cells]
        plots.append(lines("Throughput by load", rows, by="all", x=x, y=OUTPUT_RATE, ticks=True, log_y=False))
    y, shown = Column("TTFT, ms", "ttft_s", ".1f", 1e3), requests[:: max(1, -(-len(requests) // _MOST_POINTS))]
    for title, x in (
        ("TTFT over the time of the run", Column("s since the load began", "sent_s")),
        ("TTFT by length of the prompt", Column("prompt tokens", "num_prompt")),
    ):
        if len({x.value(row) for row in requests}) > 1:
            plots.append(lines(title, shown, by="load", x=x, y=y, log_x=False, log_y=False, joined=False))
    return plots


def _trial(endpoint: str, workload: Workload) -> Prompt:
    """A prompt of the kind that will be sent, for one token."""
    chat = workload.has_chat if isinstance(workload, FileWorkload) else endpoint == "chat"
    return Prompt(content=[{"role": "user", "content": "Hello"}] if chat else "Hello", max_tokens=1)


async def _fit(client: BenchClient, workload: Workload) -> dict[str, Any]:
    """Fit prompts to their lengths; returns the workload's facts for the result."""
    if isinstance(workload, FileWorkload):
        return workload.facts()
    await fit_scale(client, workload)
    return {**workload.facts(), "tokens_per_word": workload.scale.tokens_per_word}


def startup_seconds(remote: Remote) -> float | None:
    """Seconds from the server's start until it was ready; None for a server whose /metrics does not say so."""
    try:
        page = httpx.get(f"{remote.root}/metrics", timeout=remote.timeout(5.0), trust_env=remote.trust_env)
    except httpx.HTTPError:
        return None
    found = STARTUP_METRIC.search(page.text) if page.status_code == 200 else None
    return float(found.group(1)) if found else None
