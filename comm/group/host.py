"""Reads the CPU cores and the memory of this host that this process may use. Imports no torch."""

import os
from collections.abc import Sequence
from pathlib import Path


def num_cores(root: Path = Path("/")) -> int:
    """Cores this process may use: its affinity, or the container's CPU quota if that is lower."""
    cores = len(os.sched_getaffinity(0))
    quotas = [_read_quota(folder) for folder in _cgroup_folders(root, "cpu")]
    return max(1, min([cores, *(int(quota) for quota in quotas if quota is not None)]))


def deal(cores: Sequence[int], num_ranks: int) -> list[tuple[int, ...]]:
    """Equal shares of neighbouring cores; the remainder is unused. Empty shares if there are fewer cores than ranks."""
    size = len(cores) // num_ranks
    return [tuple(cores[rank * size : (rank + 1) * size]) for rank in range(num_ranks)]


def core_order(core: int, root: Path = Path("/sys/devices/system/cpu")) -> tuple[int, int, int]:
    """Sort key: package, then physical core, so that hardware threads of one core stay together."""
    folder = root / f"cpu{core}" / "topology"
    try:
        package, physical = (int((folder / name).read_text()) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):  # the kernel does not report the topology
        return 0, 0, core
    return package, physical, core


def available_host_bytes(root: Path = Path("/")) -> int:
    """Bytes this process can still allocate: the kernel's MemAvailable, or less under a cgroup limit."""
    meminfo = (root / "proc/meminfo").read_text()
    available = int(meminfo.partition("MemAvailable:")[2].split()[0]) * 1024
    headrooms = [_read_headroom(folder) for folder in _cgroup_folders(root, "memory")]
    return max(0, min([available, *(room for room in headrooms if room is not None)]))


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """The folders of this process's control group and its parents; a limit on any of them applies."""
    folders: list[Path] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy != "0" and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("" if hierarchy == "0" else controller)
        # Inside a container the path may be the host's and not exist here; the mount itself is then the group.
        folder = base / path.lstrip("/")
        folders += [candidate for candidate in (folder, *folder.parents) if candidate.is_relative_to(base)]
    return folders


def _read_headroom(folder: Path) -> int | None:
    """Bytes below the limit, counting cached files as free because the kernel drops them first. None: no limit."""
    for limit_name, usage_name, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = _read_int(folder / limit_name), _read_int(folder / usage_name)
        if limit is None or usage is None:
            continue
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return limit - usage + int(stat.get(cache_key, 0))
    return None


def _read_quota(folder: Path) -> float | None:
    """The group's CPU quota in cores; None: no limit."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    v1_quota, v1_period = _read_int(folder / "cpu.cfs_quota_us"), _read_int(folder / "cpu.cfs_period_us")
    return v1_quota / v1_period if v1_quota and v1_period and v1_quota > 0 else None


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None
