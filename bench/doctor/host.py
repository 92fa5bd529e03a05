"""Facts of the host: cores, CPU kernels, memory, versions (Linux sysfs)."""

import os
import platform
import re
from pathlib import Path

from msgspec import Struct

from tightwire.bench.report.environment import describe_environment
from tightwire.comm.group.host import available_host_bytes, num_cores
from tightwire.comm.group.numa import describe_numbers, read_numa_nodes
from tightwire.comm.transport.segment import why_unusable
from tightwire.kernels.cpu.library import level
from tightwire.sizes import format_bytes


class Host(Struct, frozen=True, kw_only=True):
    """Facts of the host; a value is None where the system does not report it."""

    cpu: str
    kernels: str  # level of the CPU kernels, such as v4-bf16; spec: torch's reference
    num_usable: int  # cores that this process may use, within a container's quota
    num_allowed: int  # the same without the quota
    numa_nodes: list[str]
    total_bytes: int
    available_bytes: int  # to this process, within a container's limit
    shm_bytes: int | None  # the size of /dev/shm
    shared_memory_problem: str | None  # why the shared-memory transport does not work, if it does not
    software: dict[str, str]  # versions by name


def read_host(root: Path = Path("/")) -> Host:
    environment = describe_environment()
    total = re.search(r"MemTotal:\s*(\d+) kB", _text(root / "proc/meminfo"))
    return Host(
        cpu=environment["cpu"],
        kernels=level(),
        num_usable=num_cores(root),
        num_allowed=len(os.sched_getaffinity(0)),
        numa_nodes=_numa_nodes(root),
        total_bytes=int(total[1]) * 1024 if total else 0,
        available_bytes=available_host_bytes(root),
        shm_bytes=_filesystem_bytes(root / "dev/shm"),
        shared_memory_problem=why_unusable(),
        software={
            "tightwire": environment["tightwire"],
            "python": environment["python"],
            "linux": platform.release(),
            **environment["packages"],
        },
    )


def _numa_nodes(root: Path) -> list[str]:
    return [
        f"{node.number}: cores {describe_numbers(node.cores)}, {format_bytes(node.free_bytes)} free, "
        f"distances {' '.join(map(str, node.distances))}"
        for node in read_numa_nodes(root)
    ]


def _filesystem_bytes(path: Path) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
