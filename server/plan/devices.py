"""Reads CUDA devices, and the age of this process, without torch, which imports slowly."""

import ctypes
import importlib.util
import os
import runpy
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaDevice:
    name: str
    total_bytes: int
    free_bytes: int


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
