"""Binds each CPU rank to cores of its own, so that two ranks that wait for each other never share one."""

import os
from collections.abc import Sequence
from pathlib import Path

from tightwire.server.plan.devices import num_cores


def bind_to_cores(rank: int, num_ranks: int, num_threads: int) -> tuple[int, ...]:
    """Keep this thread, and those it starts from now on, to the rank's share of the cores; gives the share.

    Nothing is bound, and the share is empty, where there is nothing to gain or much to lose: one rank, fewer cores than
    ranks, more threads than cores in the share, or a quota that is less than the cores (they are then not ours to keep).
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
    """Equal shares of neighbours, what is left over to nobody; empty ones where there are fewer cores than ranks."""
    size = len(cores) // num_ranks
    return [tuple(cores[rank * size : (rank + 1) * size]) for rank in range(num_ranks)]


def _place(core: int, root: Path = Path("/sys/devices/system/cpu")) -> tuple[int, int, int]:
    """Package and physical core first: threads of one core stay together."""
    folder = root / f"cpu{core}" / "topology"
    try:
        package, physical = (int((folder / name).read_text()) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):  # a kernel that does not tell
        return 0, 0, core
    return package, physical, core
