"""The options of ``tightwire bench comm``."""

import math
from dataclasses import dataclass

from tightwire.bench.comm.ranks import TRANSPORTS, RankOptions
from tightwire.bench.options import OutputOptions, option, parse_sizes
from tightwire.comm.all_reduce.names import split_all_reduce_names
from tightwire.comm.all_reduce.registry import all_reduce_names, describe_all_reduce_names, parse_all_reduce
from tightwire.comm.link.link import Link, parse_link

DTYPES = ("bfloat16", "float16", "float32")
_DEFAULT_SIZES = tuple(8192 * 4**power for power in range(6))  # 8 KiB to 8 MiB
_MAX_SIZE = 1 << 30  # every rank holds a message, its result and the exact sum in float64
_MAX_RANKS = 64


def parse_links(text: str) -> tuple[Link, ...]:
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
    dtype: str = option("bfloat16", "of the numbers", choices=DTYPES)
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
        parse=parse_links,
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
