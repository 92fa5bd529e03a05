"""``tightwire bench comm``: times every AllReduce between processes of this machine, and checks every result.

A wrong answer fails the run: other bits on another rank or in a later call, an error above the algorithm's bound, or bytes
on the wire that differ from the algorithm's formula. With ``--link`` it also compares each time with bytes / rate + computing
alone and, of several links, says at which rate quantizing stops paying.
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tightwire.bench.comm.crossover import COLUMNS as CROSSOVER_COLUMNS
from tightwire.bench.comm.crossover import find_crossovers
from tightwire.bench.comm.measure import (
    Checked,
    ComputingPlan,
    MeasurePlan,
    Timed,
    compute_alone,
    measurable,
    measure,
)
from tightwire.bench.comm.options import CommBenchOptions
from tightwire.bench.comm.page import (
    CELL_COLUMNS,
    CSV_COLUMNS,
    LINK_COLUMNS,
    PREDICTION_COLUMNS,
    describe_setting,
    is_wrong,
    make_sections,
)
from tightwire.bench.comm.ranks import open_ranks
from tightwire.bench.comm.summary import Cells
from tightwire.bench.options import parse_options
from tightwire.bench.report.html import Section
from tightwire.bench.report.progress import paused
from tightwire.bench.report.quiet import OthersWatch, show_others
from tightwire.bench.report.table import Metric, Table, print_table
from tightwire.bench.run import Bench, BenchFailedError
from tightwire.comm.all_reduce.registry import make_all_reduce
from tightwire.comm.group.group import Group
from tightwire.comm.group.local_ranks import LocalRankError, LocalRanks
from tightwire.comm.link.link import Link
from tightwire.comm.link.wire import LinkTooFastError
from tightwire.comm.protocols import AllReduce
from tightwire.comm.sizes import format_bytes

_COMPUTING_CALLS = 15


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
        self._by_link: list[Cells] = []

    def measure(self) -> None:
        options = self._options
        self.facts = {
            "ranks": options.ranks,
            "nodes": options.num_nodes,
            "dtype": options.dtype,
            "device": options.device,
            "seed": options.seed,
            "links": {},
            "link_facts": [],
        }
        faults: list[str] = []
        watch = OthersWatch()
        for link in options.links or (None,):
            try:
                self._measure_on(link)
            except LinkTooFastError as error:
                faults.append(str(error))
        self.facts["others_share"] = watch.share()
        show_others(self.console, self.facts)
        if len(self.facts["links"]) > 1:
            self.facts["crossovers"] = find_crossovers(self.cells(), self.facts)
            print_table(self.console, Table(columns=CROSSOVER_COLUMNS, rows=self.facts["crossovers"]))
        faults += [f"wrong answer: {fault}" for cells in self._by_link for fault in cells.faults()]
        if faults:
            raise BenchFailedError("; ".join(faults))

    def cells(self) -> list[dict[str, Any]]:
        return [row for cells in self._by_link for row in cells.rows()]

    def csv(self, result: Mapping[str, Any]) -> Table:
        return Table(columns=[*LINK_COLUMNS, *CSV_COLUMNS] if result["links"] else CSV_COLUMNS, rows=result["cells"])

    def sections(self, result: Mapping[str, Any]) -> list[Section]:
        return make_sections(result)

    def title(self, result: Mapping[str, Any]) -> tuple[str, str]:
        links = result["link_facts"] or [None]
        return "AllReduce by message size", "; ".join(describe_setting(result, link) for link in links)

    def _measure_on(self, link: Link | None) -> None:
        with open_ranks(self._options.rank_options(link)) as (ranks, joined):
            self.facts["transport"] = joined["transport"]
            rate = None
            if (link_facts := joined["link"]) is not None:
                self.facts["links"][link_facts["name"]] = link_facts["how"]
                self.facts["link_facts"].append(link_facts)
                rate = link_facts["measured_bytes_per_s"] or link_facts["bytes_per_s"]
            self.console.print(describe_setting(self.facts, link_facts), soft_wrap=True)
            words = (
                "times are the slowest rank's, from a barrier on; wire bytes are those of the rank that sends most\n"
            )
            self.console.print(words, soft_wrap=True)
            cells = Cells(self._options.ranks, link=link and link.name, link_bytes_per_s=rate)
            self._by_link.append(cells)
            self._stream(ranks, cells)
            if link is not None:
                plan = ComputingPlan(
                    algorithms=measurable(self._plan.algorithms),
                    sizes=self._plan.sizes,
                    dtype=self._plan.dtype,
                    repeats=_COMPUTING_CALLS,
                )
                for rank, computed in ranks.stream(compute_alone, plan):
                    cells.add(rank, computed)
                print_table(self.console, Table(columns=PREDICTION_COLUMNS, rows=cells.rows()))

    def _stream(self, ranks: LocalRanks, cells: Cells) -> None:
        finished: Counter[int] = Counter()
        with self.progress:
            task = self.progress.add_task("", total=None)
            for rank, event in ranks.stream(measure, self._plan):
                cells.add(rank, event)
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
                        rows = [row for row in cells.rows() if row["size"] == event.size]
                        with paused(self.progress):
                            print_table(
                                self.console, Table(title=size, columns=CELL_COLUMNS, rows=rows, wrong=is_wrong)
                            )
                        self.keep()
            self.progress.remove_task(task)
