"""``tightwire bench comm``: times every AllReduce between processes of this machine, and checks every result.

A wrong answer fails the run: other bits on another rank or in a later call, an error above the algorithm's bound, or bytes
on the wire that differ from the algorithm's formula.
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tightwire.bench.comm.measure import Checked, MeasurePlan, Timed, measure
from tightwire.bench.comm.options import CommBenchOptions
from tightwire.bench.comm.page import CELL_COLUMNS, CSV_COLUMNS, describe_setting, is_wrong, make_page
from tightwire.bench.comm.ranks import open_ranks
from tightwire.bench.comm.summary import Cells
from tightwire.bench.options import parse_options
from tightwire.bench.report.html import Page
from tightwire.bench.report.progress import paused
from tightwire.bench.report.quiet import OthersWatch, show_others
from tightwire.bench.report.table import Metric, Table, print_table
from tightwire.bench.run import Bench, BenchFailedError
from tightwire.comm.all_reduce.registry import make_all_reduce
from tightwire.comm.group.group import Group
from tightwire.comm.group.local_ranks import LocalRankError, LocalRanks
from tightwire.comm.protocols import AllReduce
from tightwire.comm.sizes import format_bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 for a wrong answer or a rank that failed, 2 for bad options, 130 after Ctrl-C."""
    description = "Time every AllReduce between processes of this machine, and check every result."
    argv = sys.argv[1:] if argv is None else argv
    return CommBench(parse_options(CommBenchOptions, argv, verb="comm", description=description)).run()


class CommBench(Bench):
    verb = "comm"
    metrics = (Metric(name="seconds", unit="us", scale=1e6),)
    failures = ((LocalRankError, 1), (ValueError, 1))

    def __init__(self, options: CommBenchOptions, make: Callable[[str, Group], AllReduce] = make_all_reduce) -> None:
        super().__init__(options)
        self._options = options
        self._plan = MeasurePlan(
            algorithms=options.names,
            sizes=options.sizes,
            dtype=options.dtype,
            repeats=options.repeats,
            seconds_per_size=options.seconds_per_size,
            seed=options.seed,
            make=make,
        )
        self._cells = Cells(options.ranks)

    def measure(self) -> None:
        options = self._options
        self.facts = {
            "ranks": options.ranks,
            "nodes": options.num_nodes,
            "dtype": options.dtype,
            "device": options.device,
            "seed": options.seed,
        }
        with open_ranks(options) as (ranks, facts):
            self.facts |= facts
            self.console.print(describe_setting(self.facts), soft_wrap=True)
            words = (
                "times are the slowest rank's, from a barrier on; wire bytes are those of the rank that sends most\n"
            )
            self.console.print(words, soft_wrap=True)
            watch = OthersWatch(ranks.pids)
            self._measure_on(ranks)
            self.facts["others_share"] = watch.share()
        show_others(self.console, self.facts)
        if faults := self._cells.faults():
            raise BenchFailedError("; ".join(f"wrong answer: {fault}" for fault in faults))

    def cells(self) -> list[dict[str, Any]]:
        return self._cells.rows()

    def csv(self, result: Mapping[str, Any]) -> Table:
        return Table(columns=CSV_COLUMNS, rows=result["cells"])

    def page(self, result: Mapping[str, Any]) -> Page:
        return make_page(result)

    def _measure_on(self, ranks: LocalRanks) -> None:
        finished: Counter[int] = Counter()
        with self.progress:
            task = self.progress.add_task("", total=None)
            for rank, event in ranks.stream(measure, self._plan):
                self._cells.add(rank, event)
                size = format_bytes(event.size)
                if rank > 0:
                    pass  # ranks proceed together: one of them moves the bar
                elif isinstance(event, Checked):
                    self.progress.update(task, description=f"{size}: {event.algorithm} checked", total=None)
                else:
                    self.progress.update(task, description=size, total=event.rounds, completed=event.done)
                if isinstance(event, Timed) and event.done == event.rounds:
                    finished[event.size] += 1
                    if finished[event.size] == ranks.world_size:
                        self._show_size(event.size)
                        self.keep()

    def _show_size(self, size: int) -> None:
        rows = [row for row in self._cells.rows() if row["size"] == size]
        with paused(self.progress):
            print_table(self.console, Table(title=format_bytes(size), columns=CELL_COLUMNS, rows=rows, wrong=is_wrong))
