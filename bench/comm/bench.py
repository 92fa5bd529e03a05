"""``tightwire bench comm``: times every AllReduce between processes of this machine; a wrong result fails the run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from tightwire.bench.comm.cells import COLUMNS, LINK, PREDICTION_COLUMNS, SIZE, US, WORKERS, Cells, size_table
from tightwire.bench.comm.measure import MeasurePlan, measure
from tightwire.bench.comm.options import CommOptions
from tightwire.bench.ranks import open_ranks
from tightwire.bench.report.page import Item
from tightwire.bench.report.plot import lines
from tightwire.bench.report.table import Column, Metric, Table
from tightwire.bench.run import Bench, BenchFailedError
from tightwire.comm.all_reduce.make import make_all_reduce
from tightwire.comm.group.group import Group
from tightwire.comm.group.host import num_cores
from tightwire.comm.group.local_ranks import LocalRankError
from tightwire.comm.link.link import Link
from tightwire.comm.link.wire import LinkTooFastError
from tightwire.comm.protocols import AllReduce
from tightwire.sizes import format_bytes


class CommBench(Bench[CommOptions]):
    verb = "comm"
    metrics = (Metric(name="seconds", unit="us", scale=1e6),)
    failures = ((LocalRankError, 1), (ValueError, 1))

    def __init__(self, options: CommOptions, make: Callable[[str, Group], AllReduce] = make_all_reduce) -> None:
        super().__init__(options)
        self._plan = MeasurePlan(
            algorithms=options.names,
            sizes=options.sizes,
            dtype=options.dtype,
            repeats=options.repeats,
            seconds_per_size=options.seconds_per_size,
            seed=options.seed,
            computing=bool(options.links),
            make=make,
        )
        self._by_link: list[Cells] = []

    def measure(self) -> None:
        options = self.options
        self.facts = {name: getattr(options, name) for name in ("ranks", "dtype", "device", "seed")}
        self.facts |= {"nodes": options.num_nodes, "links": {}, "link_facts": []}
        if options.device == "cpu" and (most := options.ranks * max(options.workers, default=1)) > num_cores():
            self.note(f"{most} threads share {num_cores()} cores: those that wait take time from those that work")
        faults: list[str] = []
        with self.watch_others():
            for link, workers in product(options.links or (None,), options.workers or (None,)):
                try:
                    self._measure_on(link, workers)
                except LinkTooFastError as error:
                    faults.append(str(error))
        faults += [f"wrong answer: {fault}" for cells in self._by_link for fault in cells.faults()]
        if faults:
            raise BenchFailedError("; ".join(faults))

    def cells(self) -> list[dict[str, Any]]:
        return [row for cells in self._by_link for row in cells.rows]

    def csv(self, result: Mapping[str, Any]) -> Table:
        columns = (SIZE, *COLUMNS, Column("calls", "seconds.n", "d"), Column("share of bound", "share_of_bound", ".3f"))
        columns = (*([LINK] if result["links"] else []), *([WORKERS] if self.options.workers else []), *columns)
        note = f"{_TIMES} The result of every call was checked."
        return Table(title="All cells", columns=columns, rows=result["cells"], note=note)

    def title(self, result: Mapping[str, Any]) -> tuple[str, str]:
        links = result["link_facts"] or [None]
        return "AllReduce by message size", "; ".join(_describe_setting(result, link) for link in links)

    def sections(self, result: Mapping[str, Any]) -> list[Item]:
        rows, table = result["cells"], self.csv(result)
        if not result["links"]:
            return [*self._plots(rows), table]
        return [Table(title="Prediction", columns=PREDICTION_COLUMNS, rows=rows, note=_PREDICTED), table]

    def _plots(self, rows: Sequence[Mapping[str, Any]]) -> list[Item]:
        """Time by the number of workers, for each size, where they were varied."""
        kind = "blocks of a kernel" if self.options.device == "cuda" else "threads of a rank"
        return [
            lines(
                f"{format_bytes(size)} by {kind}",
                [row for row in rows if row["size"] == size],
                by="algorithm",
                x=replace(WORKERS, name=kind),
                y=US,
                ticks=True,
            )
            for size in (self.options.sizes if len(self.options.workers) > 1 else ())
        ]

    def _measure_on(self, link: Link | None, workers: int | None) -> None:
        options, plan = self.options, self._plan
        if workers is not None and options.device == "cpu":
            plan = replace(plan, threads=workers)
        with open_ranks(options.rank_options(link, workers)) as (ranks, facts):
            self.facts["transport"] = facts["transport"]
            if link_facts := facts["link"]:
                self.facts["links"][link_facts["name"]] = link_facts["how"]
                self.facts["link_facts"].append(link_facts)
                link = link and replace(link, bytes_per_s=link_facts["measured_bytes_per_s"] or link.bytes_per_s)
            self.print(_describe_setting(self.facts, link_facts), f"{_TIMES}\n")
            cells = Cells(options.ranks, link=link, workers=workers)
            self._by_link.append(cells)
            with self.progress:
                task = self.progress.add_task("message sizes", total=len(self._plan.sizes))
                for rank, outcomes in ranks.stream(measure, plan):
                    if outcomes and (rows := cells.add(rank, outcomes)):
                        self.print_table(size_table(rows))
                        self.progress.advance(task)
                        self.keep()
                self.progress.remove_task(task)
            if link is not None:
                self.print_table(Table(columns=PREDICTION_COLUMNS, rows=cells.rows))


_PREDICTED = "Predicted: bytes that a rank sends over the link's rate, the latency of each round, and the computing without a link."
_TIMES = "Times are the slowest rank's, from a barrier on. Wire bytes are those of the rank that sends most."


def _describe_setting(facts: Mapping[str, Any], link: Mapping[str, Any] | None) -> str:
    nodes = f" on {facts['nodes']} nodes" if facts["nodes"] > 1 else ""
    setting = f"{facts['ranks']} ranks{nodes}, {facts['dtype']}, {facts['transport']}"
    if link is None:
        return setting
    measured = link["measured_bytes_per_s"]
    rate = f", {measured * 8 / 1e6:.1f} Mbit/s of payload" if measured else ""
    return f"{setting} over {link['name']} ({link['how']}{rate})"
