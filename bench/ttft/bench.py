"""``tightwire bench ttft``: compares AllReduces on one server that it starts, by time to first token.

Every AllReduce to compare is loaded in that one server, and each request names its own, so all share weights, processes and
the machine's state.
"""

import asyncio
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tightwire.bench.hosts import EmulatedHosts
from tightwire.bench.report.page import Item
from tightwire.bench.report.table import Metric
from tightwire.bench.run import Bench
from tightwire.bench.server_process import ServerFailedError, ServerProcess
from tightwire.bench.ttft import report
from tightwire.bench.ttft.facts import find_facts
from tightwire.bench.ttft.measure import Measurement, RequestFailedError
from tightwire.bench.ttft.options import GROUPS, TtftOptions, to_argv
from tightwire.remote import Remote, RemoteError, connect

_START_TIMEOUT_S = 1800.0  # weights may have to be fetched, or read from a slow disk


class TtftBench(Bench[TtftOptions]):
    verb = "ttft"
    metrics = (
        Metric(name="ttft_ratio"),
        Metric(name="tpot_ratio", decides=False),
        Metric(name="ttft_s", unit="ms", scale=1e3, decides=False),
        Metric(name="tpot_s", unit="ms", scale=1e3, decides=False),
    )
    columns = report.CSV_COLUMNS
    failures = ((ServerFailedError, 1), (RequestFailedError, 1), (RemoteError, 1), (ValueError, 2))

    def __init__(
        self, options: TtftOptions, start: "Callable[[Sequence[str], Path], ServerProcess] | None" = None
    ) -> None:
        super().__init__(options)
        self._start = start or self._start_server
        self._measurement: Measurement | None = None
        self._hosts: EmulatedHosts | None = None

    def measure(self) -> None:
        facts = find_facts(self.options)
        self.facts = dict(facts.known)
        measurement = self._measurement = Measurement(self.options, facts, self._show)
        self.print(report.describe_setting(self.facts), f"{measurement.num_turns} turns with warm-ups", "")
        with self.watch_others(), self.progress, ExitStack() as stack:
            self._task = self.progress.add_task("starting the server", total=None)
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            if self.options.nnodes > 1:
                link = self.options.config.parallel.link
                assert link is not None, "checked by the options"
                hosts = self._hosts = stack.enter_context(EmulatedHosts(link, self.options.nnodes))
                stack.enter_context(hosts.visiting())
                measurement.use_hosts(hosts)
            with self._start(to_argv(facts.config, GROUPS), Path(folder)) as server:
                server.wait_ready("/health/ready", _START_TIMEOUT_S)
                try:
                    asyncio.run(self._measure_on(measurement, connect(server.url)))
                except (RequestFailedError, RemoteError):
                    server.check()  # a server that died says more than a connection that broke
                    raise

    def _start_server(self, argv: Sequence[str], folder: Path) -> ServerProcess:
        log = folder / "server.log"
        if self._hosts is None:
            return ServerProcess([sys.executable, "-m", "tightwire", "serve", *argv, "--port", "{port}"], {}, log=log)
        head, others = self._hosts.serve(argv)
        return ServerProcess(head, {}, log=log, others=others)

    async def _measure_on(self, measurement: Measurement, remote: Remote) -> None:
        async for _ in measurement.run(remote):
            self.keep()

    def _show(self, step: str, num_done: int) -> None:
        assert self._measurement is not None, "it calls this"
        self.progress.update(self._task, description=step, completed=num_done, total=self._measurement.num_turns)

    def cells(self) -> list[dict[str, Any]]:
        return [] if self._measurement is None else report.make_rows(self._measurement.measured)

    def result(self, error: str | None) -> dict[str, Any]:
        result = super().result(error)
        if self._measurement is None:
            return result | {"recommended": []}
        measured = self._measurement.measured
        recommended = [] if error else report.recommend(measured, self.options)
        return result | {"recommended": recommended, "comm": measured.comm}

    def title(self, result: Mapping[str, Any]) -> tuple[str, str]:
        link = report.describe_link((result.get("comm") or {}).get("link"))
        compared = "layout" if result["options"].get("layouts") else "AllReduce"
        return f"Time to first token by {compared}", f"{report.describe_setting(result)}; link: {link}"

    def sections(self, result: Mapping[str, Any]) -> list[Item]:
        return report.make_sections(result)

    def show_end(self, result: Mapping[str, Any]) -> None:
        if not result["cells"]:
            return
        self.print(f"link: {report.describe_link(result['comm'].get('link'))}", "")
        for table in report.tables(result):
            self.print_table(table)
        self.print(*report.LEGENDS, style="dim")
        self.print(*report.recommended_lines(result), style="bold")
