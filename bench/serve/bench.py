"""``tightwire bench serve``: puts load on a running server and measures it as its clients would.

Results are kept when the server dies and after Ctrl-C.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tightwire.bench.client import BenchClient, Prompt
from tightwire.bench.report.environment import without_password
from tightwire.bench.report.page import Item
from tightwire.bench.report.table import Column, Metric, Table
from tightwire.bench.run import Bench, BenchFailedError
from tightwire.bench.serve.cells import latency_table, rate_table, summarize, warnings_of
from tightwire.bench.serve.load import LoadRun, run_load
from tightwire.bench.serve.options import ServeOptions
from tightwire.bench.serve.workload import Workload
from tightwire.remote import Remote, RemoteError, connect

_CSV_KEYS = (
    *("load", "index", "sent_s", "late_s", "ttft_s", "tpot_s", "e2e_s"),
    *("num_prompt", "num_cached", "num_generated", "finish_reason", "error"),
)


class ServeBench(Bench[ServeOptions]):
    verb = "serve"
    metrics = (
        *(Metric(name=name, unit="ms", scale=1e3) for name in ("ttft_s", "tpot_s", "e2e_s")),
        Metric(name="itl_s", unit="ms", scale=1e3, decides=False),
    )
    pairing_keys = ("workload", "request")
    failures = ((RemoteError, 1), (ValueError, 1))

    def __init__(self, options: ServeOptions) -> None:
        super().__init__(options)
        self._running: LoadRun | None = None

    def measure(self) -> None:
        options = self.options
        workload = options.make_workload()
        remote = connect(options.url, model=options.model, api_key=options.api_key)
        self.facts["server"] = {"url": without_password(remote.base), "model": remote.model}
        self.facts["workload"] = {**workload.facts(), "seed": options.seed}
        self.facts["request"] = options.body()
        try:
            with self.progress:
                asyncio.run(self._measure(remote, workload))
        except KeyboardInterrupt:
            if self._running is not None:
                self._running.stopped = self._running.stopped or "interrupted"
                self._close(self._running, None)
            raise
        for cell in self.measured:
            if cell["stopped"]:
                raise BenchFailedError(f"{cell['name']} stopped early: {cell['stopped']}")
            if not cell["succeeded"]:
                raise BenchFailedError(f"{cell['name']}: all requests failed: {'; '.join(cell['errors'])}")

    def csv(self, result: Mapping[str, Any]) -> Table:
        """A row for each request."""
        rows = [{"load": cell["name"], **raw} for cell in result["cells"] for raw in cell["raw"]]
        return Table(columns=[Column(key, key) for key in _CSV_KEYS], rows=rows)

    def title(self, result: Mapping[str, Any]) -> tuple[str, str]:
        server, workload = result["server"], result["workload"]
        loads = ", ".join(cell["name"] for cell in result["cells"])
        return f"{server['model']} under load", f"{server['url']}, {workload['name']} prompts, {loads}"

    def sections(self, result: Mapping[str, Any]) -> list[Item]:
        cells = result["cells"]
        notes = ". ".join(f"{cell['name']}: {text}" for cell in cells for text in warnings_of(cell))
        latencies = replace(latency_table(cells), title="Latencies in milliseconds")
        return [replace(rate_table(cells), note=notes), latencies]

    async def _measure(self, remote: Remote, workload: Workload) -> None:
        options = self.options
        async with BenchClient(remote, timeout_s=options.timeout_s, extra_body=options.body()) as client:
            await workload.fit(client)
            self.facts["workload"] |= workload.facts()
            facts = ", ".join(f"{name} {value}" for name, value in self.facts["workload"].items() if name != "name")
            server = self.facts["server"]
            self.print(f"{server['model']} at {server['url']}: {self.facts['workload']['name']} prompts, {facts}\n")
            for number, load in enumerate(options.loads):
                self._running = run = LoadRun(load=load, num_requests=options.requests_of(number))
                warmups = workload.take(options.warmups_of(number))
                await self._measure_load(client, run, warmups, workload.take(run.num_requests))
                if run.stopped:
                    return

    async def _measure_load(
        self, client: BenchClient, run: LoadRun, warmups: Sequence[Prompt], prompts: Sequence[Prompt]
    ) -> None:
        warm = LoadRun(load=run.load, num_requests=len(warmups))
        await self._send(client, warm, warmups, f"{run.load.name}, warm-up")
        if warm.samples and all(sample.error for sample in warm.samples):
            run.stopped = f"every warm-up request failed; the last: {warm.samples[-1].error}"
        else:
            await self._send(client, run, prompts, run.load.name)
            if run.stopped is None and run.samples[-1].error:
                try:  # the server may have died too late for many failures in a row
                    connect(self.options.url, model=self.options.model, api_key=self.options.api_key)
                except RemoteError as error:
                    run.stopped = str(error)
        self._close(run, self.options.output_len if self.options.ignore_eos else None)

    async def _send(self, client: BenchClient, run: LoadRun, prompts: Sequence[Prompt], name: str) -> None:
        task = self.progress.add_task(name, total=len(prompts))
        own = {} if run.load.temperature is None else {"temperature": run.load.temperature}
        send = partial(client.measure, extra_body=own)
        await run_load(run, prompts, send, seed=self.options.seed, done=lambda: self.progress.advance(task))
        self.progress.remove_task(task)

    def _close(self, run: LoadRun, expected_generated: int | None) -> None:
        self._running = None
        cell = summarize(run, expected_generated)
        self.measured.append(cell)
        self.print_table(latency_table([cell]))
        self.print_table(rate_table([cell]))
        for text in warnings_of(cell):
            self.note(text)
        self.print("")
        self.keep()
