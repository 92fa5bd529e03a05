"""Reads usable CPU cores, free host memory and CUDA devices without torch, which imports slowly."""

import ctypes
import importlib.util
import os
import runpy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaDevice:
    name: str
    total_bytes: int
    free_bytes: int


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


def process_age_s() -> float:
    """Seconds since this process started, imports included."""
    stat = Path("/proc/self/stat").read_text()
    start_ticks = int(stat.rpartition(")")[2].split()[19])  # field 22; the name before it may hold spaces
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")


def torch_has_cuda() -> bool:
    """True if the installed torch is a CUDA build. Does not import torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return False
    version = Path(spec.submodule_search_locations[0]) / "version.py"
    return version.exists() and runpy.run_path(str(version)).get("cuda") is not None


def cuda_devices(visible: str | None = None) -> list[CudaDevice]:
    """The CUDA devices a rank would see, in PCI bus order. ``visible``: as in CUDA_VISIBLE_DEVICES; None means all."""
    if not torch_has_cuda():
        return []
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2() != 0:
        return []
    try:
        if visible is None:
            count = ctypes.c_uint()
            nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
            visible = ",".join(map(str, range(count.value)))
        return [_describe(nvml, handle) for handle in _named_handles(nvml, visible)]
    finally:
        nvml.nvmlShutdown()


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def _named_handles(nvml: ctypes.CDLL, visible: str) -> list[ctypes.c_void_p]:
    """Stops at the first unknown name, as CUDA does."""
    handles: list[ctypes.c_void_p] = []
    for name in filter(None, visible.split(",")):
        handle = ctypes.c_void_p()
        if name.strip().isdigit():
            status = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
        else:
            status = nvml.nvmlDeviceGetHandleByUUID(name.strip().encode(), ctypes.byref(handle))
        if status != 0:
            break
        handles.append(handle)
    return handles


def _describe(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> CudaDevice:
    memory, name = _Memory(), ctypes.create_string_buffer(96)
    nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(len(name)))
    return CudaDevice(name=name.value.decode(), total_bytes=memory.total, free_bytes=memory.free)


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
