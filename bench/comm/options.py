"""The options of ``tightwire bench comm``: one frozen value, checked where it is born, and its command line."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tightwire.bench.report.label import check_label
from tightwire.bench.report.result_files import add_flags
from tightwire.comm.all_reduce.names import split_all_reduce_names
from tightwire.comm.all_reduce.registry import all_reduce_names, describe_all_reduce_names, parse_all_reduce
from tightwire.comm.link.link import Link, parse_link
from tightwire.comm.sizes import parse_bytes

DTYPES = ("bfloat16", "float16", "float32")
TRANSPORTS = ("auto", "shared-memory", "process-group", "peer-memory")
_MAX_SIZE = 1 << 30  # every rank holds a message, its result and the exact sum in float64
DEFAULT_SIZES = tuple(8192 * 4**power for power in range(6))  # 8 KiB to 8 MiB
_MAX_RANKS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class CommBenchOptions:
    algorithms: tuple[str, ...] = ()  # (): all names that stand for themselves
    sizes: tuple[int, ...] = DEFAULT_SIZES  # bytes of a message, before it is encoded
    ranks: int = 2
    dtype: str = "bfloat16"
    device: str = "cpu"
    transport: str = "auto"
    link: Link | None = None
    nodes: int | None = None  # None: 1, or with a link one node for each rank
    repeats: int = 50
    seconds_per_size: float = 5.0
    seed: int = 0
    timeout_s: float = 60.0
    output: Path | None = None
    label: str = "comm"

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
        if self.nodes is not None and (self.nodes < 1 or self.ranks % self.nodes):
            raise ValueError(f"--nodes must divide the {self.ranks} ranks evenly, got {self.nodes}")
        if self.link is not None and self.num_nodes < 2:
            raise ValueError("--link lies between nodes, so --nodes must be at least 2")
        if self.link is not None and (self.transport == "shared-memory" or self.device != "cpu"):
            raise ValueError("--link joins CPU processes by sockets; leave out --transport and --device")
        if (self.transport == "peer-memory" and self.device != "cuda") or (
            self.transport == "shared-memory" and self.device != "cpu"
        ):
            raise ValueError(f"--transport {self.transport} is not for --device {self.device}")
        if self.repeats < 3:
            raise ValueError(f"--repeats must be at least 3, got {self.repeats}")
        for flag, value in (("--seconds-per-size", self.seconds_per_size), ("--timeout", self.timeout_s)):
            if not 0 < value < math.inf:
                raise ValueError(f"{flag} must be above 0, got {value}")
        check_label(self.label)

    @property
    def num_nodes(self) -> int:
        return self.nodes or (1 if self.link is None else self.ranks)

    @property
    def names(self) -> tuple[str, ...]:
        """What is measured, ``native`` first, as the others are compared with it."""
        names = self.algorithms or tuple(
            name for name in all_reduce_names() if self.num_nodes > 1 or name != "hierarchical"
        )
        return tuple(sorted(names, key=lambda name: name != "native"))


def parse_options(argv: Sequence[str]) -> CommBenchOptions:
    """Read the command line; prints what is wrong and exits with status 2 when it is."""
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        return CommBenchOptions(
            algorithms=() if given.algorithms is None else split_all_reduce_names(given.algorithms),
            sizes=DEFAULT_SIZES if given.sizes is None else _parse_sizes(given.sizes),
            ranks=given.ranks,
            dtype=given.dtype,
            device=given.device,
            transport=given.transport,
            link=None if given.link is None else parse_link(given.link),
            nodes=given.nodes,
            repeats=given.repeats,
            seconds_per_size=given.seconds_per_size,
            seed=given.seed,
            timeout_s=given.timeout,
            output=given.output,
            label=given.label,
        )
    except ValueError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tightwire bench comm",
        description="Time every AllReduce between processes of this machine, and check every result. "
        "The last line of stdout is one JSON object.",
    )
    add = parser.add_argument
    add("--algorithms", metavar="NAME,NAME", help=f"{describe_all_reduce_names()} (all that need no codec named)")
    add("--sizes", metavar="SIZE,SIZE", help="of a message before it is encoded (8KiB to 8MiB in steps of 4)")
    add("--ranks", type=int, default=2, metavar="N", help="processes, one thread each (%(default)s)")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of the numbers (%(default)s)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda takes one device per rank (%(default)s)")
    add(
        "--transport",
        choices=TRANSPORTS,
        default="auto",
        help="auto: shared memory between CPU ranks of one node, peer memory between GPUs that have it",
    )
    add(
        "--link",
        metavar="LINK",
        help="put a real wire of this kind between the nodes, such as 200mbit, 2.5gbit, pcie3x4 or 1gbit,latency=50us; "
        "as root by the kernel, else throttled in user space, which the result says",
    )
    add("--nodes", type=int, metavar="K", help="ranks stand on K equal nodes (1; with --link one for each rank)")
    add("--repeats", type=int, default=50, metavar="N", help="timed calls of each algorithm at a size (%(default)s)")
    add(
        "--seconds-per-size",
        type=float,
        default=5.0,
        metavar="S",
        help="fewer repeats, but never less than three, where they would take longer (%(default)g)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the numbers and of the order of calls (%(default)s)")
    add("--timeout", type=float, default=60.0, metavar="S", help="longest wait in a collective (%(default)g)")
    add_flags(parser, "comm")
    return parser


def _parse_sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted({parse_bytes(part) for part in text.split(",")}))
