"""Binds each CPU rank to its own cores, so that two ranks that wait for each other never share one."""

import os
from collections.abc import Sequence
from pathlib import Path

from tightwire.server.plan.devices import num_cores


def bind_to_cores(rank: int, num_ranks: int, num_threads: int) -> tuple[int, ...]:
    """Bind this thread, and those it starts later, to the rank's share of the cores; returns the share.

    Binds nothing and returns () for one rank, for fewer cores than ranks, for more threads than cores in the share, and
    under a CPU quota below the number of cores, which other processes may then use.
    """
    cores = os.sched_getaffinity(0)
    if num_ranks == 1 or num_cores() < len(cores):
        return ()
    share = deal(sorted(cores, key=_place), num_ranks)[rank]
    if not share or num_threads > len(share):
        return ()
    os.sched_setaffinity(0, share)
    return share


def deal(cores: Sequence[int], num_ranks: int) -> list[tuple[int, ...]]:
    """Equal shares of neighbouring cores; the remainder is unused. Empty shares if there are fewer cores than ranks."""
    size = len(cores) // num_ranks
    return [tuple(cores[rank * size : (rank + 1) * size]) for rank in range(num_ranks)]


def _place(core: int, root: Path = Path("/sys/devices/system/cpu")) -> tuple[int, int, int]:
    """Sort key: package, then physical core, so that hardware threads of one core stay together."""
    folder = root / f"cpu{core}" / "topology"
    try:
        package, physical = (int((folder / name).read_text()) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):  # the kernel does not report the topology
        return 0, 0, core
    return package, physical, core
