"""``tightwire bench comm``: times every AllReduce between processes of this machine, and checks every result.

A wrong answer fails the run: other bits on another rank or in a later call, an error above the algorithm's bound, or bytes
on the wire that differ from the algorithm's formula. With ``--link`` it also compares each time with bytes / rate + computing
alone and, of several links, says at which rate quantizing stops paying.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from tightwire.bench.comm.page import (
    CELL_COLUMNS,
    CSV_COLUMNS,
    LINK_COLUMNS,
    PREDICTION_COLUMNS,
    describe_setting,
    is_wrong,
    make_sections,
)
from tightwire.bench.comm.ranks import TRANSPORTS, RankOptions, open_ranks
from tightwire.bench.comm.summary import Cells
from tightwire.bench.options import OutputOptions, option, parse_options, parse_sizes
from tightwire.bench.report.html import Section
from tightwire.bench.report.progress import paused
from tightwire.bench.report.quiet import OthersWatch, show_others
from tightwire.bench.report.table import Metric, Table, print_table
from tightwire.bench.run import Bench, BenchFailedError
from tightwire.comm.all_reduce.names import split_all_reduce_names
from tightwire.comm.all_reduce.registry import (
    all_reduce_names,
    describe_all_reduce_names,
    make_all_reduce,
    parse_all_reduce,
)
from tightwire.comm.group.group import Group
from tightwire.comm.group.local_ranks import LocalRankError, LocalRanks
from tightwire.comm.link.link import Link, parse_link
from tightwire.comm.link.wire import LinkTooFastError
from tightwire.comm.protocols import AllReduce
from tightwire.comm.sizes import format_bytes

_COMPUTING_CALLS = 15  # of each algorithm without a link
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
        f"{describe_all_reduce_names()} (all that need no codec named)",
        metavar="NAME,NAME",
        parse=split_all_reduce_names,
    )
    sizes: tuple[int, ...] = option(
        _DEFAULT_SIZES, "bytes of a message before it is encoded", metavar="SIZE,SIZE", parse=parse_sizes
    )
    ranks: int = option(2, "processes, one thread each", metavar="N")
    dtype: str = option("bfloat16", "of the numbers", choices=_DTYPES)
    device: str = option("cpu", "cuda takes one device per rank", choices=("cpu", "cuda"))
    transport: str = option(
        "auto",
        "auto: shared memory between CPU ranks of one node, peer memory between GPUs that have it",
        choices=TRANSPORTS,
    )
    links: tuple[Link, ...] = option(
        (),
        "emulate these links between the nodes, one after the other, such as 200mbit, 2.5gbit, pcie3x4 or "
        "1gbit,latency=50us; as root in the kernel, else throttled in user space, which the result says",
        metavar="LINK,LINK",
        flag="--link",
        parse=_parse_links,
    )
    nodes: int | None = option(
        None, "divide the ranks among this many equal nodes (1; with --link one for each rank)", metavar="K"
    )
    repeats: int = option(50, "timed calls of each algorithm at a size", metavar="N")
    seconds_per_size: float = option(
        5.0, "fewer repeats, but at least three, where they would take longer", metavar="S"
    )
    seed: int = option(0, "of the numbers and of the order of calls", metavar="N")
    timeout_s: float = option(60.0, "longest wait in a collective", metavar="S", flag="--timeout")

    def __post_init__(self) -> None:
        for name in self.algorithms:
            parse_all_reduce(name)
        if repeated := {name for name in self.algorithms if self.algorithms.count(name) > 1}:
            raise ValueError(f"--algorithms names {', '.join(sorted(repeated))} twice")
        if not 2 <= self.ranks <= _MAX_RANKS:
            raise ValueError(f"--ranks must be 2 to {_MAX_RANKS}, got {self.ranks}")
        if not self.sizes or min(self.sizes) < 4 or any(size % 4 for size in self.sizes):
            raise ValueError(f"--sizes takes multiples of 4 bytes, got {', '.join(map(str, self.sizes)) or 'none'}")
        if max(self.sizes) > _MAX_SIZE:
            raise ValueError(f"--sizes goes up to {_MAX_SIZE >> 30}GiB, got {max(self.sizes)} bytes")
        for link in self.links or (None,):
            self.rank_options(link)
        if self.repeats < 3:
            raise ValueError(f"--repeats must be at least 3, got {self.repeats}")
        for flag, value in (("--seconds-per-size", self.seconds_per_size), ("--timeout", self.timeout_s)):
            if not 0 < value < math.inf:
                raise ValueError(f"{flag} must be above 0, got {value}")

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


def main(argv: Sequence[str]) -> int:
    """Returns 0, 1 for a wrong answer or a rank that failed, 2 for bad options, 130 after Ctrl-C."""
    description = "Time every AllReduce between processes of this machine, and check every result."
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
