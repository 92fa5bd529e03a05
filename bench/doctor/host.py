"""Facts of the host: cores, CPU kernels, memory, network, versions, IOMMU and ACS.

Source: Linux sysfs ABI; PCI Express Base Specification, Access Control Services (ACS).
"""

import os
import platform
import re
import shutil
from pathlib import Path

from msgspec import Struct

from tightwire.bench.doctor.probing import run_probe
from tightwire.bench.report.environment import describe_environment
from tightwire.comm.transport.segment import why_unusable
from tightwire.kernels.cpu.library import level
from tightwire.server.plan.devices import available_host_bytes, num_cores

_LOOPBACK_TYPE = 772
_ISOLATION_OPTION = re.compile(r"iommu|acs|^pci=", re.IGNORECASE)
# With these two, ACS sends writes between devices up to the root, where the IOMMU may translate or drop them.
_REDIRECTS = ("ReqRedir+", "CmpltRedir+")


class Host(Struct, frozen=True, kw_only=True):
    """None means that this system does not report the value."""

    cpu: str
    kernels: str  # level of the CPU kernels, such as v4-bf16; spec: torch's reference
    num_usable: int  # cores that this process may use, within a container's quota
    num_allowed: int  # the same without the quota
    numa_nodes: list[str]
    total_bytes: int
    available_bytes: int  # to this process, within a container's limit
    shm_bytes: int | None  # the size of /dev/shm
    shared_memory_problem: str | None  # why the shared-memory transport does not work; None: it works
    interfaces: list[str]
    num_iommu_groups: int
    kernel_options: list[str]  # about IOMMU and ACS
    acs_redirects: list[str] | None  # ports whose ACS redirects peer traffic; None: unknown
    acs_problem: str | None  # why it is unknown
    software: dict[str, str]  # versions by name


def read_host(limit_s: float, root: Path = Path("/")) -> Host:
    """The facts under ``root``. ``limit_s``: for lspci."""
    environment = describe_environment()
    total = re.search(r"MemTotal:\s*(\d+) kB", _text(root / "proc/meminfo"))
    redirects, problem = _acs(limit_s)
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
        interfaces=_interfaces(root),
        num_iommu_groups=len(list((root / "sys/kernel/iommu_groups").glob("*"))),
        kernel_options=[word for word in _text(root / "proc/cmdline").split() if _ISOLATION_OPTION.search(word)],
        acs_redirects=redirects,
        acs_problem=problem,
        software={
            "tightwire": environment["tightwire"],
            "python": environment["python"],
            "linux": platform.release(),
            **environment["packages"],
        },
    )


def _numa_nodes(root: Path) -> list[str]:
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    numbers = sorted(int(folder.name.removeprefix("node")) for folder in folders)
    return [f"{i}: cpus {_text(root / f'sys/devices/system/node/node{i}/cpulist')}" for i in numbers]


def _filesystem_bytes(path: Path) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize


def _interfaces(root: Path) -> list[str]:
    found = []
    for folder in sorted((root / "sys/class/net").glob("*")):
        if (folder / "operstate").exists() and _text(folder / "type") != str(_LOOPBACK_TYPE):
            speed = _text(folder / "speed")  # -1: virtual, or no cable
            rate = f"{speed} Mbit/s" if speed.isdigit() else "speed unknown"
            found.append(f"{folder.name}: {_text(folder / 'operstate')}, {rate}, MTU {_text(folder / 'mtu')}")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # such as the speed of an interface that is down
        return ""


def _acs(limit_s: float) -> tuple[list[str] | None, str | None]:
    if shutil.which("lspci") is None:
        return None, "lspci is not installed (package pciutils)"
    output = run_probe(["lspci", "-vvv"], limit_s)
    return (None, f"lspci {output.problem}") if output.problem else redirecting_ports(output.data.decode())


def redirecting_ports(lspci: str) -> tuple[list[str] | None, str | None]:
    """Ports whose ACS redirects peer traffic, from ``lspci -vvv``; None and the reason if it is not shown."""
    found = []
    for device in re.split(r"\n(?=\S)", lspci):
        control = re.search(r"ACSCtl:(.*)", device)
        if control and any(flag in control[1] for flag in _REDIRECTS):
            found.append(device.split()[0])
    if not found and "<access denied>" in lspci:
        return None, "lspci shows ACS to root only"
    return found, None
