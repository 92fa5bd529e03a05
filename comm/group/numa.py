"""NUMA nodes of the host: their cores and memory, the ranks' places on them, and binding a rank to its place.

A core reads the memory of its own node faster than that of another one, so a rank's threads and pages belong on the same node.
The kernel puts a page where the policy of the thread that first writes it says, so a rank is bound before it loads anything.
"""

import ctypes
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tightwire.comm.group.host import core_order, deal, num_cores

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # numbers of the system call; glibc has no wrapper
_PREFERRED, _INTERLEAVE = 1, 3  # MPOL_* of linux/mempolicy.h
_MASK_BITS = 64 * 16  # more nodes than Linux supports on these architectures


@dataclass(frozen=True, kw_only=True, slots=True)
class NumaNode:
    """A node with cores that this process may use."""

    number: int
    cores: tuple[int, ...]
    free_bytes: int
    distances: tuple[int, ...]  # to every node of the host, this one included (10: itself)


class RankPlace(NamedTuple):
    """The cores and the NUMA nodes of a rank; both empty: the rank is not bound."""

    cores: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()


def read_numa_nodes(root: Path = Path("/")) -> tuple[NumaNode, ...]:
    """Return the nodes with usable cores, by number; none where the kernel does not report them."""
    allowed, found = os.sched_getaffinity(0), list[NumaNode]()
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        cores = tuple(core for core in _read_list(folder / "cpulist") if core in allowed)
        if cores:
            number = int(folder.name.removeprefix("node"))
            distances = tuple(int(word) for word in _read(folder / "distance").split())
            found.append(NumaNode(number=number, cores=cores, free_bytes=_free_bytes(folder), distances=distances))
    return tuple(sorted(found, key=lambda node: node.number))


def place_ranks(num_ranks: int, nodes: Sequence[NumaNode]) -> list[RankPlace] | None:
    """Divide the nodes over the ranks: some ranks a node, or some nodes a rank. None: neither number divides the other.

    The ranks of one node share its cores equally. One node, or none, gives every rank its share of all cores.
    """
    if len(nodes) < 2:
        shares = deal(sorted(os.sched_getaffinity(0), key=core_order), num_ranks)
        return [RankPlace(share if num_ranks > 1 else ()) for share in shares]
    if num_ranks % len(nodes) == 0:
        ranks_per_node = num_ranks // len(nodes)
        return [
            RankPlace(share, (node.number,))
            for node in nodes
            for share in deal(sorted(node.cores, key=core_order), ranks_per_node)
        ]
    if len(nodes) % num_ranks == 0:
        own = len(nodes) // num_ranks
        groups = [nodes[rank * own : (rank + 1) * own] for rank in range(num_ranks)]
        return [
            RankPlace(tuple(core for node in group for core in node.cores), tuple(node.number for node in group))
            for group in groups
        ]
    return None


def bind_rank(rank: int, num_ranks: int, num_threads: int, *, numa: bool) -> RankPlace:
    """Bind this thread, and the threads it starts later, to the rank's cores and memory; return the place.

    Nothing is bound where the rank's cores are fewer than its threads, and under a CPU quota below the number of cores. Memory
    of one node is preferred, not required: a rank that needs more takes the rest from another node. Several nodes take turns.
    """
    if num_cores() < len(os.sched_getaffinity(0)):
        return RankPlace()
    nodes = read_numa_nodes() if numa else ()
    places = place_ranks(num_ranks, nodes) or place_ranks(num_ranks, ())
    place = RankPlace() if places is None else places[rank]
    if not place.cores or num_threads > len(place.cores):
        return RankPlace()
    os.sched_setaffinity(0, place.cores)
    return place._replace(nodes=place.nodes if place.nodes and _set_memory_policy(place.nodes) else ())


def describe_placement(num_ranks: int, nodes: Sequence[NumaNode], rank_bytes: Sequence[int]) -> str:
    """Say in one line where the ranks run and what does not fit there; empty on a host with one node."""
    if len(nodes) < 2:
        return ""
    places, numbers = place_ranks(num_ranks, nodes), ", ".join(str(node.number) for node in nodes)
    if places is None:
        return (
            f"warning: {num_ranks} ranks cannot be divided over the {len(nodes)} NUMA nodes {numbers}, so ranks read memory of "
            f"other nodes, which is slower; use a multiple of {len(nodes)} ranks"
        )
    free = {node.number: node.free_bytes for node in nodes}
    where = [f"rank {rank} on {_name(place.nodes)}" for rank, place in enumerate(places)]
    needed = dict.fromkeys(free, 0)
    for place, num_bytes in zip(places, rank_bytes, strict=True):
        for number in place.nodes:
            needed[number] += num_bytes // len(place.nodes)
    over = [str(number) for number, num_bytes in needed.items() if num_bytes > free[number]]
    line = f"memory and threads by NUMA node: {', '.join(where)}"
    return (
        f"warning: {line}; too little is free on {', '.join(over)}: the rest comes from another node" if over else line
    )


def describe_numbers(numbers: Sequence[int]) -> str:
    """Format ascending numbers as the kernel writes them: ``0-3,8``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def _name(numbers: Sequence[int]) -> str:
    return f"node{'s' if len(numbers) > 1 else ''} {' and '.join(map(str, numbers))}"


def _set_memory_policy(nodes: Sequence[int]) -> bool:
    """Prefer the memory of one node, or take turns between several; return whether the kernel agreed."""
    call = _SET_MEMPOLICY.get(platform.machine())
    if call is None:
        return False
    mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    mode = _PREFERRED if len(nodes) == 1 else _INTERLEAVE
    return ctypes.CDLL(None).syscall(call, mode, mask, ctypes.c_ulong(_MASK_BITS)) == 0


def _free_bytes(folder: Path) -> int:
    """Bytes that can be allocated on a node; clean pages of files count, because the kernel drops them first."""
    fields = {
        words[2]: int(words[3]) for line in _read(folder / "meminfo").splitlines() if len(words := line.split()) > 3
    }
    return 1024 * (fields.get("MemFree:", 0) + fields.get("Inactive(file):", 0))


def _read_list(path: Path) -> list[int]:
    """Numbers as the kernel writes them: ``0-3,8``."""
    ranges = [part.split("-") for part in _read(path).split(",") if part]
    return [number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
