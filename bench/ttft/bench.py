"""``tightwire bench ttft``: compares AllReduces on one server that it starts, by time to first token.

Every AllReduce to compare is loaded in that one server, and each request names its own, so all share weights, processes and
the machine's state.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tightwire.bench.report.html import Section
from tightwire.bench.report.progress import paused
from tightwire.bench.report.quiet import OthersWatch, show_others
from tightwire.bench.report.table import Metric, Table, print_table
from tightwire.bench.run import Bench
from tightwire.bench.ttft.child import ServerChild, ServerDiedError
from tightwire.bench.ttft.measure import Measurement
from tightwire.bench.ttft.options import GROUPS, TtftOptions, find_facts, parse_options, to_argv
from tightwire.bench.ttft.report import (
    CSV_COLUMNS,
    LEGENDS,
    RANDOM_WEIGHTS,
    describe_link,
    describe_setting,
    make_sections,
    recommended_lines,
    tables,
)
from tightwire.bench.ttft.requests import RequestFailedError
from tightwire.bench.ttft.summary import excluded, recommend, rows, samples
from tightwire.server.cli.remote import Remote, RemoteError, connect

_START_TIMEOUT_S = 1800.0  # weights may have to be fetched, or read from a slow disk


def main(argv: Sequence[str]) -> int:
    """Returns 0, 1 for a wrong answer or a server that failed, 2 for bad options, 130 after Ctrl-C."""
    return TtftBench(parse_options(argv)).run()


class TtftBench(Bench):
    verb = "ttft"
    metrics = (
        Metric(name="ttft_ratio"),
        Metric(name="tpot_ratio", decides=False),
        Metric(name="ttft_s", unit="ms", scale=1e3, decides=False),
        Metric(name="tpot_s", unit="ms", scale=1e3, decides=False),
    )
    # ValueError is a refusal: of the options by this bench, or of what they ask for by the server.
    failures = ((ServerDiedError, 1), (RequestFailedError, 1), (RemoteError, 1), (ValueError, 2))

    def __init__(self, options: TtftOptions, start: Callable[[Sequence[str]], ServerChild] = ServerChild) -> None:
        super().__init__(options)
        self._options, self._start = options, start
        self._measurement: Measurement | None = None
        self._server_log: list[str] = []

    def measure(self) -> None:
        facts = find_facts(self._options)
        self.facts = dict(facts.known)
        measurement = self._measurement = Measurement(self._options, facts, self._told)
        self.console.print(describe_setting(self.facts), soft_wrap=True)
        turns = f"{measurement.num_turns} turns, of which each arm's first two in a cell warm up and are not counted\n"
        self.console.print(turns, soft_wrap=True)
        watch = OthersWatch()
        with self.progress:
            self._task = self.progress.add_task("starting the server", total=None)
            with self._start(to_argv(facts.config, GROUPS)) as child:
                remote = connect(child.wait_ready(_START_TIMEOUT_S))
                try:
                    asyncio.run(self._measure_on(measurement, remote))
                except (RequestFailedError, RemoteError):
                    child.check()  # a server that died says more than a connection that broke
                    raise
                finally:
                    self._server_log = list(child.log)
        self.facts["others_share"] = watch.share()

    async def _measure_on(self, measurement: Measurement, remote: Remote) -> None:
        async for _ in measurement.run(remote):
            if measurement.measured.turns:
                self.keep()
                continue
            seconds = measurement.expected_s
            time = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"
            with paused(self.progress):
                self.console.print(f"warm-up done, every message of every rank is right; timing takes about {time}\n")

    def cells(self) -> list[dict[str, Any]]:
        return [] if self._measurement is None else rows(self._measurement.measured)

    def result(self, error: str | None) -> dict[str, Any]:
        result = super().result(error)
        if self._measurement is None:
            return result | {"recommended": [], "over_budget": []}
        measured, options = self._measurement.measured, self._options
        return result | {
            "recommended": [] if error else [each.plain() for each in recommend(measured, options)],
            "over_budget": [arm.name for arm in excluded(measured.arms, options.error_budget)],
            "comm": measured.comm,
            "samples": samples(measured),
            "raw": {"server_log": self._server_log, "traced_all_reduces": measured.traces},
        }

    def csv(self, result: Mapping[str, Any]) -> Table:
        return Table(columns=CSV_COLUMNS, rows=result["samples"])

    def title(self, result: Mapping[str, Any]) -> tuple[str, str]:
        link = describe_link((result.get("comm") or {}).get("link"))
        return "Time to first token by AllReduce", f"{describe_setting(result)}; wire: {link}"

    def sections(self, result: Mapping[str, Any]) -> list[Section]:
        return make_sections(result)

    def show_end(self, result: Mapping[str, Any]) -> None:
        if not result["cells"]:
            return
        self.console.print(f"wire: {describe_link(result['comm'].get('link'))}\n", soft_wrap=True, markup=False)
        for table in tables(result):
            print_table(self.console, table)
        for legend in LEGENDS:
            self.console.print(legend, style="dim", soft_wrap=True)
        for line in recommended_lines(result):
            self.console.print(line, style="bold", markup=False, soft_wrap=True)
        if result["random_weights"]:
            self.console.print(f"note: {RANDOM_WEIGHTS}", style="yellow", soft_wrap=True)
        show_others(self.console, result)

    def _told(self, what: str, done: int) -> None:
        assert self._measurement is not None, "it calls this"
        self.progress.update(self._task, description=what, completed=done, total=self._measurement.num_turns)
