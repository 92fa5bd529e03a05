"""Probes of the host: processor, NUMA, memory, /dev/shm, network, versions. All read files; none needs a library."""

import os
import platform
import re
import resource
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import tightwire
from tightwire.bench.doctor.facts import (
    CpuFacts,
    Interface,
    MemoryFacts,
    NetworkFacts,
    NumaNode,
    RdmaPort,
    VersionFacts,
)
from tightwire.comm.transport.segment import why_unusable
from tightwire.server.plan.devices import available_host_bytes, num_cores

# What matrix products, conversions and block codecs are built from, x86 and ARM.
_VECTOR_FLAGS = (
    *("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2"),
)
_PACKAGES = ("torch", "triton", "numba", "numpy", "transformers", "tokenizers", "safetensors", "pyzmq", "uvicorn")
_LOOPBACK_TYPE = 772


def cpu(root: Path = Path("/")) -> CpuFacts:
    cpuinfo = (root / "proc/cpuinfo").read_text()
    flags = _cpuinfo_flags(cpuinfo)
    return CpuFacts(
        model=_cpuinfo_value(cpuinfo, "model name") or platform.processor() or "unknown",
        architecture=platform.machine(),
        num_cpus=os.cpu_count() or 1,
        num_allowed=len(os.sched_getaffinity(0)),
        num_usable=num_cores(root),
        vector_flags=[flag for flag in _VECTOR_FLAGS if flag in flags],
        virtual="hypervisor" in flags if platform.machine() == "x86_64" else None,
        numa_nodes=numa_nodes(root),
    )


def _cpuinfo_value(cpuinfo: str, name: str) -> str:
    found = re.search(rf"^{name}\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return found[1].strip() if found else ""


def _cpuinfo_flags(cpuinfo: str) -> set[str]:
    """x86 says "flags", ARM "Features"."""
    return {*_cpuinfo_value(cpuinfo, "flags").split(), *_cpuinfo_value(cpuinfo, "Features").split()}


def numa_nodes(root: Path = Path("/")) -> list[NumaNode]:
    """In order of their numbers; empty where the kernel knows no NUMA."""
    nodes = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        total = re.search(r"MemTotal:\s*(\d+) kB", (folder / "meminfo").read_text())
        cpus = (folder / "cpulist").read_text().strip()
        memory_bytes = int(total[1]) * 1024 if total else 0
        nodes.append(NumaNode(node=int(folder.name.removeprefix("node")), cpus=cpus, memory_bytes=memory_bytes))
    return sorted(nodes, key=lambda node: node.node)


def memory(root: Path = Path("/")) -> MemoryFacts:
    total = re.search(r"MemTotal:\s*(\d+) kB", (root / "proc/meminfo").read_text())
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shm = _filesystem(root / "dev/shm")
    return MemoryFacts(
        total_bytes=int(total[1]) * 1024 if total else 0,
        available_bytes=available_host_bytes(root),
        shm_bytes=shm.f_blocks * shm.f_frsize if shm else None,
        shm_free_bytes=shm.f_bavail * shm.f_frsize if shm else None,
        shared_memory_problem=why_unusable(),
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
    )


def _filesystem(path: Path) -> os.statvfs_result | None:
    try:
        return os.statvfs(path)
    except OSError:
        return None


def network(root: Path = Path("/")) -> NetworkFacts:
    interfaces = []
    for folder in sorted((root / "sys/class/net").glob("*")):
        if not (folder / "operstate").exists() or _number(folder / "type") == _LOOPBACK_TYPE:
            continue
        speed = _number(folder / "speed")
        interfaces.append(
            Interface(
                name=folder.name,
                state=_text(folder / "operstate"),
                mbit_per_s=speed if speed and speed > 0 else None,  # -1: virtual, or no cable
                mtu=_number(folder / "mtu") or 0,
            )
        )
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    return NetworkFacts(
        interfaces=interfaces,
        rdma_ports=[
            RdmaPort(
                name=f"{port.parent.parent.name}:{port.name}",
                state=_text(port / "state").rpartition(": ")[2],  # "4: ACTIVE"
                rate=_text(port / "rate"),
            )
            for port in ports
        ],
    )


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the speed of an interface that is down cannot be read
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def versions() -> VersionFacts:
    found = {"tightwire": tightwire.__version__}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    libc = " ".join(filter(None, platform.libc_ver()))
    return VersionFacts(python=platform.python_version(), kernel=platform.release(), libc=libc, packages=found)
