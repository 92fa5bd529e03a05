"""The options of ``tightwire bench comm``."""

from dataclasses import dataclass
from typing import ClassVar

from tightwire.bench.options import TRANSPORTS, OutputOptions, RankOptions, known_all_reduce, parse_sizes
from tightwire.comm.all_reduce.names import all_reduce_names, describe_all_reduce_names, split_all_reduce_names
from tightwire.comm.link.link import Link, parse_link
from tightwire.comm.policy.tune_file import PEER_BLOCKS
from tightwire.option import MAX_SECONDS, option

_DTYPES = ("bfloat16", "float16", "float32")
_DEFAULT_SIZES = tuple(8192 * 4**power for power in range(6))  # 8 KiB to 8 MiB
_MAX_SIZE = 1 << 30  # every rank holds a message, its result and what the algorithm needs
_MAX_RANKS = 64
_MAX_WORKERS = 1024


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
class CommOptions(OutputOptions):
    description: ClassVar[str] = "Time every AllReduce between processes of this machine, and check every result."
    algorithms: tuple[str, ...] = option(
        (),
        f"{describe_all_reduce_names()} (default: all whose name needs no codec)",
        parse=lambda text: tuple(map(known_all_reduce, split_all_reduce_names(text))),
    )
    sizes: tuple[int, ...] = option(
        _DEFAULT_SIZES, "bytes of a message before it is encoded", metavar="BYTES,BYTES", parse=parse_sizes, least=4
    )
    ranks: int = option(2, "number of processes, one thread each", least=2, most=_MAX_RANKS)
    dtype: str = option("bfloat16", "data type of the numbers", choices=_DTYPES)
    device: str = option("cpu", "device of the ranks; cuda needs one for each rank", choices=("cpu", "cuda"))
    transport: str = option(
        "auto",
        "transport between the ranks; auto: shared memory between CPU ranks of one node, sockets between nodes, peer memory "
        "between GPUs that have it",
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
    nodes: int | None = option(None, "divide the ranks among so many nodes (default: 1; with --link one for each rank)")
    workers: tuple[int, ...] = option(
        (), "threads of a CPU rank, or blocks of a GPU (default: 1, 32)", unique=True, least=1, most=_MAX_WORKERS
    )
    repeats: int = option(50, "timed calls of each algorithm at a size", least=3)
    seconds_per_size: float = option(
        5.0, "time for the calls at a size; slow calls are repeated less often, but at least three times", above=0
    )
    seed: int = option(0, "seed of the numbers and of the order of calls")
    timeout_s: float = option(60.0, "seconds to wait in a collective", flag="--timeout", above=0, most=MAX_SECONDS)

    def __post_init__(self) -> None:
        if repeated := {name for name in self.algorithms if self.algorithms.count(name) > 1}:
            raise ValueError(f"--algorithms names {', '.join(sorted(repeated))} twice")
        if any(size % 4 or size > _MAX_SIZE for size in self.sizes):
            sizes = ", ".join(map(str, self.sizes))
            raise ValueError(f"--sizes takes multiples of 4 bytes up to {_MAX_SIZE >> 30}GiB, got {sizes}")
        for link in self.links or (None,):
            self.rank_options(link)

    def rank_options(self, link: Link | None, workers: int | None = None) -> RankOptions:
        return RankOptions(
            ranks=self.ranks,
            nodes=self.nodes,
            device=self.device,
            transport=self.transport,
            link=link,
            timeout_s=self.timeout_s,
            peer_blocks=workers if workers and self.device == "cuda" else PEER_BLOCKS,
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
