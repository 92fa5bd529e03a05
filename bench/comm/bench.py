"""``tightwire bench comm``: times every AllReduce between processes of this machine, and checks every result.

Other bits on another rank or in a later call, an error above the algorithm's bound, or sent bytes that differ from its formula
fail the run. With ``--link`` each time is compared with bytes / rate + computing alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tightwire.bench.comm.cells import COLUMNS, LINK, PREDICTION_COLUMNS, SIZE, Cells, size_table
from tightwire.bench.comm.measure import MeasurePlan, measure
from tightwire.bench.options import OutputOptions, option, parse_sizes
from tightwire.bench.ranks import TRANSPORTS, RankOptions, open_ranks
from tightwire.bench.report.page import Item
from tightwire.bench.report.table import Column, Metric, Table
from tightwire.bench.run import Bench, BenchFailedError
from tightwire.comm.all_reduce.entry import describe_all_reduce_names, split_all_reduce_names
from tightwire.comm.all_reduce.registry import (
    all_reduce_names,
    make_all_reduce,
    parse_all_reduce,
)
from tightwire.comm.group.group import Group
from tightwire.comm.group.local_ranks import LocalRankError
from tightwire.comm.link.link import Link, parse_link
from tightwire.comm.link.wire import LinkTooFastError
from tightwire.comm.protocols import AllReduce

_DTYPES = ("bfloat16", "float16", "float32")
_DEFAULT_SIZES = tuple(8192 * 4**power for power in range(6))  # 8 KiB to 8 MiB
_MAX_SIZE = 1 << 30  # every rank holds a message, its result and the exact sum in float64
_MAX_RANKS = 64


def _parse_links(text: str) -> tuple[Link, ...]:
    """``1gbit,200mbit,latency=50us`` as two links: a latency belongs to the rate before it."""
    names: list[str] = []
    for part in text.split(","):
        if names and part.strip().startswith("latency="):
            names[-1] += f",{part}"
        else:
            names.append(part)
    return tuple(map(parse_link, names))


@dataclass(frozen=True, kw_only=True, slots=True)
class CommBenchOptions(OutputOptions):
    algorithms: tuple[str, ...] = option(
        (),
        f"{describe_all_reduce_names()} (default: all whose name needs no codec)",
        parse=split_all_reduce_names,
    )
    sizes: tuple[int, ...] = option(
        _DEFAULT_SIZES, "bytes of a message before it is encoded", metavar="SIZE,SIZE", parse=parse_sizes, least=4
    )
    ranks: int = option(2, "number of processes, one thread each", least=2)
    dtype: str = option("bfloat16", "data type of the numbers", choices=_DTYPES)
    device: str = option("cpu", "device of the ranks; cuda needs one for each rank", choices=("cpu", "cuda"))
    transport: str = option(
        "auto",
        "transport between the ranks; auto: shared memory between CPU ranks of one node, peer memory between GPUs that have it",
        choices=TRANSPORTS,
    )
    links: tuple[Link, ...] = option(
        (),
        "emulate these links between the nodes, one after the other, such as 200mbit, 2.5gbit, pcie3x4 or "
        "1gbit,latency=50us; by the kernel as root, otherwise in user space; the result says which",
        metavar="LINK,LINK",
        flag="--link",
        parse=_parse_links,
    )
    nodes: int | None = option(
        None, "divide the ranks among this many equal nodes (default: 1; with --link one for each rank)"
    )
    repeats: int = option(50, "timed calls of each algorithm at a size", least=3)
    seconds_per_size: float = option(
        5.0, "time for the calls at a size; slow calls are repeated less often, but at least three times", above=0
    )
    seed: int = option(0, "seed of the numbers and of the order of calls")
    timeout_s: float = option(60.0, "longest wait in a collective", flag="--timeout", above=0)

    def __post_init__(self) -> None:
        for name in self.algorithms:
            parse_all_reduce(name)
        if repeated := {name for name in self.algorithms if self.algorithms.count(name) > 1}:
            raise ValueError(f"--algorithms names {', '.join(sorted(repeated))} twice")
        if self.ranks > _MAX_RANKS:
            raise ValueError(f"--ranks must be at most {_MAX_RANKS}, got {self.ranks}")
        if any(size % 4 or size > _MAX_SIZE for size in self.sizes):
            sizes = ", ".join(map(str, self.sizes))
            raise ValueError(f"--sizes takes multiples of 4 bytes up to {_MAX_SIZE >> 30}GiB, got {sizes}")
        for link in self.links or (None,):
            self.rank_options(link)

    def rank_options(self, link: Link | None) -> RankOptions:
        return RankOptions(
            ranks=self.ranks,
            nodes=self.nodes,
            device=self.device,
            transport=self.transport,
            link=link,
            timeout_s=self.timeout_s,
        )

    @property
    def num_nodes(self) -> int:
        return self.rank_options(next(iter(self.links), None)).num_nodes

    @property
    def names(self) -> tuple[str, ...]:
        """The algorithms to measure, ``native`` first: the others are compared with it."""
        names = self.algorithms or tuple(
            name for name in all_reduce_names() if self.num_nodes > 1 or name != "hierarchical"
        )
        return tuple(sorted(names, key=lambda name: name != "native"))


class CommBench(Bench[CommBenchOptions]):
    """Exit codes: 0, 1 for a wrong answer or a rank that failed, 2 for bad options, 130 after Ctrl-C."""

    verb = "comm"
    options_type = CommBenchOptions
    description = "Time every AllReduce between processes of this machine, and check every result."
    metrics = (Metric(name="seconds", unit="us", scale=1e6),)
    failures = ((LocalRankError, 1), (ValueError, 1))

    def __init__(self, options: CommBenchOptions, make: Callable[[str, Group], AllReduce] = make_all_reduce) -> None:
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
        faults: list[str] = []
        with self.watch_others():
            for link in options.links or (None,):
                try:
                    self._measure_on(link)
                except LinkTooFastError as error:
                    faults.append(str(error))
        faults += [f"wrong answer: {fault}" for cells in self._by_link for fault in cells.faults()]
        if faults:
            raise BenchFailedError("; ".join(faults))

    def cells(self) -> list[dict[str, Any]]:
        return [row for cells in self._by_link for row in cells.rows]

    def csv(self, result: Mapping[str, Any]) -> Table:
        columns = (SIZE, *COLUMNS, Column("calls", "seconds.n", "d"), Column("share of bound", "share_of_bound", ".3f"))
        columns = (LINK, *columns) if result["links"] else columns
        note = f"{_TIMES} The result of every call was checked."
        return Table(title="All cells", columns=columns, rows=result["cells"], note=note)

    def title(self, result: Mapping[str, Any]) -> tuple[str, str]:
        links = result["link_facts"] or [None]
        return "AllReduce by message size", "; ".join(_describe_setting(result, link) for link in links)

    def sections(self, result: Mapping[str, Any]) -> list[Item]:
        rows, table = result["cells"], self.csv(result)
        if not result["links"]:
            return [table]
        return [Table(title="Prediction", columns=PREDICTION_COLUMNS, rows=rows, note=_PREDICTED), table]

    def _measure_on(self, link: Link | None) -> None:
        with open_ranks(self.options.rank_options(link)) as (ranks, facts):
            self.facts["transport"] = facts["transport"]
            rate = None
            if (link_facts := facts["link"]) is not None:
                self.facts["links"][link_facts["name"]] = link_facts["how"]
                self.facts["link_facts"].append(link_facts)
                rate = link_facts["measured_bytes_per_s"] or link_facts["bytes_per_s"]
            self.print(_describe_setting(self.facts, link_facts), f"{_TIMES}\n")
            cells = Cells(self.options.ranks, link=link and link.name, link_bytes_per_s=rate)
            self._by_link.append(cells)
            with self.progress:
                task = self.progress.add_task("message sizes", total=len(self._plan.sizes))
                for rank, outcomes in ranks.stream(measure, self._plan):
                    if outcomes and (rows := cells.add(rank, outcomes)):
                        self.print_table(size_table(rows))
                        self.progress.advance(task)
                        self.keep()
                self.progress.remove_task(task)
            if link is not None:
                self.print_table(Table(columns=PREDICTION_COLUMNS, rows=cells.rows))


_PREDICTED = "Predicted: bytes that a rank sends over the link's rate, plus the algorithm's computing without a link."
_TIMES = "Times are the slowest rank's, from a barrier on. Wire bytes are those of the rank that sends most."


def _describe_setting(facts: Mapping[str, Any], link: Mapping[str, Any] | None) -> str:
    nodes = f" on {facts['nodes']} nodes" if facts["nodes"] > 1 else ""
    setting = f"{facts['ranks']} ranks{nodes}, {facts['dtype']}, {facts['transport']}"
    if link is None:
        return setting
    measured = link["measured_bytes_per_s"]
    rate = f", {measured * 8 / 1e6:.1f} Mbit/s of payload" if measured else ""
    return f"{setting} over {link['name']} ({link['how']}{rate})"
