"""``tightwire bench serve``: puts load on a running server and measures it as its clients would.

Steps: reach the server, find out which fields it accepts, fit prompts to the wanted length by the server's own count, then
for each load warm up, measure, print, keep. Results are kept when the server dies and after Ctrl-C.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from tightwire.bench.client import BenchClient, Prompt
from tightwire.bench.options import parse_options
from tightwire.bench.report.environment import without_password
from tightwire.bench.report.html import Section
from tightwire.bench.report.progress import paused
from tightwire.bench.report.table import Metric, Table, print_table
from tightwire.bench.run import Bench, BenchFailedError
from tightwire.bench.serve.fit import fit_scale, send_accepted_fields
from tightwire.bench.serve.load import LoadRun, run_load
from tightwire.bench.serve.options import ServeBenchOptions, Workload
from tightwire.bench.serve.page import csv_table, describe_limits, latency_table, make_sections, rate_table, warnings_of
from tightwire.bench.serve.summary import doubts, summarize
from tightwire.bench.serve.workload import FileWorkload
from tightwire.server.cli.remote import Remote, RemoteError, connect

_WITHOUT = {
    "ignore_eos": "answers may end before their length, so rates of different servers count different answers",
    "stream_options": "it may not report token counts; then events with text are counted",
}
STARTUP_METRIC = re.compile(r"^tightwire_startup_seconds(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)


def main(argv: Sequence[str]) -> int:
    """Returns 0, 1 when there is nothing usable or a load was cut short, 2 for bad options, 130 after Ctrl-C."""
    description = "Put load on a running OpenAI-compatible server, Tightwire or another, and measure it at the client."
    return ServeBench(parse_options(ServeBenchOptions, argv, verb="serve", description=description)).run()


class ServeBench(Bench):
    verb = "serve"
    metrics = (
        *(Metric(name=name, unit="ms", scale=1e3) for name in ("ttft_s", "tpot_s", "e2e_s")),
        Metric(name="itl_s", unit="ms", scale=1e3, decides=False),
    )
    pairing_keys = ("workload", "request")
    failures = ((RemoteError, 1), (ValueError, 1))

    def __init__(self, options: ServeBenchOptions) -> None:
        super().__init__(options)
        self._options = options
        self._cells: list[dict[str, Any]] = []
        self._running: LoadRun | None = None

    def measure(self) -> None:
        options = self._options
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

    def cells(self) -> list[dict[str, Any]]:
        return self._cells

    def csv(self, result: Mapping[str, Any]) -> Table:
        return csv_table(result["cells"])

    def sections(self, result: Mapping[str, Any]) -> list[Section]:
        return make_sections(result)

    def title(self, result: Mapping[str, Any]) -> tuple[str, str]:
        server, workload = result["server"], result["workload"]
        loads = ", ".join(cell["name"] for cell in result["cells"])
        return f"{server['model']} under load", f"{server['url']}, {workload['name']} prompts, {loads}"

    async def _measure(self, remote: Remote, workload: Workload) -> None:
        options = self._options
        async with BenchClient(remote, timeout_s=options.timeout_s, extra_body=options.body()) as client:
            trial = _trial(options.endpoint, workload)
            body, refused = await send_accepted_fields(client, options.body(), trial)
            self.facts["server"]["refused"], self.facts["request"] = refused, body
            self.facts["workload"] |= await _fit(client, workload)
            with paused(self.progress):
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
        seed = self._options.seed
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
        full_length = self._options.generates_full_length
        self._close(run, [prompt.max_tokens for prompt in prompts] if full_length else None)

    def _close(self, run: LoadRun, expected_generated: Sequence[int] | None) -> None:
        self._running = None
        cell = {**summarize(run, self._options.slo), "doubts": doubts(run, expected_generated)}
        self._cells.append(cell)
        with paused(self.progress):
            print_table(self.console, latency_table([cell]))
            print_table(self.console, rate_table([cell]))
            for words in describe_limits([cell]):
                self.console.print(words, markup=False, soft_wrap=True)
            for words in warnings_of(cell):
                self.console.print(f"note: {words}", style="yellow", markup=False, soft_wrap=True)
            self.console.print()
        self.keep()

    def _why_unreachable(self) -> str | None:
        """None where the server answers. It may have died too late for many failures in a row."""
        options = self._options
        try:
            connect(options.url, model=options.model, api_key=options.api_key)
        except RemoteError as error:
            return str(error)
        return None

    def _failure(self) -> str | None:
        for cell in self._cells:
            if cell["stopped"]:
                return f"{cell['name']} stopped early: {cell['stopped']}"
            if not cell["succeeded"]:
                return f"{cell['name']}: all requests failed: {'; '.join(cell['errors'])}"
        return None

    def _show_head(self) -> None:
        server, workload = self.facts["server"], self.facts["workload"]
        facts = ", ".join(f"{name} {value}" for name, value in workload.items() if name != "name")
        words = f"{server['model']} at {server['url']}: {workload['name']} prompts, {facts}"
        self.console.print(words, markup=False, soft_wrap=True)
        for name in server["refused"]:
            words = f"note: the server refuses {name}: {_WITHOUT[name]}"
            self.console.print(words, style="yellow", markup=False, soft_wrap=True)
        if server["startup_s"] is not None:
            self.console.print(f"the server was ready {server['startup_s']:.2f} s after its start")
        self.console.print()


def _trial(endpoint: str, workload: Workload) -> Prompt:
    """A prompt of the kind that will be sent, for one token."""
    chat = workload.has_chat if isinstance(workload, FileWorkload) else endpoint == "chat"
    return Prompt(content=[{"role": "user", "content": "Hello"}] if chat else "Hello", max_tokens=1)


async def _fit(client: BenchClient, workload: Workload) -> dict[str, Any]:
    """Fit prompts to their lengths; returns the workload's facts for the result."""
    if isinstance(workload, FileWorkload):
        return {"prompts": len(workload)}
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
