"""Probes of the host: processor, NUMA, memory, network, versions, PCI Express links, IOMMU and ACS.

Source: Linux sysfs-bus-pci ABI; PCI Express Base Specification, Access Control Services (ACS).
"""

import os
import platform
import re
import resource
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import tightwire
from tightwire.bench.doctor.facts import (
    CpuFacts,
    Interface,
    IsolationFacts,
    Link,
    MemoryFacts,
    NetworkFacts,
    NumaNode,
    PciFacts,
    VersionFacts,
)
from tightwire.comm.transport.segment import why_unusable
from tightwire.kernels.cpu.library import level
from tightwire.server.plan.devices import available_host_bytes, num_cores

# The extensions that matrix products, conversions and codecs use, on x86 and ARM.
_VECTOR_FLAGS = (
    *("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2"),
)
_PACKAGES = ("torch", "triton", "numpy", "transformers", "tokenizers", "safetensors", "pyzmq", "uvicorn")
_LOOPBACK_TYPE = 772
# The class code's first bytes: display, processing accelerator, network, NVMe.
_PCI_KINDS = {"0x03": "gpu", "0x12": "gpu", "0x02": "network", "0x0108": "nvme"}
_ISOLATION_OPTION = re.compile(r"iommu|acs|^pci=|^amd_iommu|^intel_iommu", re.IGNORECASE)
# With these two, ACS sends writes between devices up to the root, where the IOMMU may translate or drop them.
_REDIRECTS = ("ReqRedir+", "CmpltRedir+")


def cpu(root: Path = Path("/")) -> CpuFacts:
    cpuinfo = (root / "proc/cpuinfo").read_text()
    flags = _cpuinfo_value(cpuinfo, "(?:flags|Features)").split()  # on x86 and on ARM
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


def numa_nodes(root: Path = Path("/")) -> list[NumaNode]:
    """Sorted by number; empty if the kernel has no NUMA."""
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
    return NetworkFacts(interfaces)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # such as the speed of an interface that is down
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def pci(root: Path = Path("/")) -> PciFacts:
    """Links of GPUs, network cards and NVMe drives. Most virtual machines show none."""
    links = [_pci_link(folder) for folder in sorted((root / "sys/bus/pci/devices").glob("*"))]
    return PciFacts(links=[link for link in links if link is not None])


def _pci_link(folder: Path) -> Link | None:
    code = _text(folder / "class")
    kind = next((kind for prefix, kind in _PCI_KINDS.items() if code.startswith(prefix)), None)
    width = _link_width(folder / "current_link_width")
    if kind is None or width is None:
        return None
    slot = folder.resolve().parent  # the port above the device, or the root
    return Link(
        address=folder.name,
        kind=kind,
        name=f"{_text(folder / 'vendor').removeprefix('0x')}:{_text(folder / 'device').removeprefix('0x')}",
        gt_per_s=_link_speed(folder / "current_link_speed"),
        max_gt_per_s=_link_speed(folder / "max_link_speed"),
        width=width,
        max_width=_link_width(folder / "max_link_width"),
        slot_max_gt_per_s=_link_speed(slot / "max_link_speed"),
        slot_max_width=_link_width(slot / "max_link_width"),
    )


def _link_speed(path: Path) -> float | None:
    """GT/s per lane, from "16.0 GT/s PCIe"; None for "Unknown"."""
    found = re.match(r"([\d.]+) GT/s", _text(path))
    return float(found[1]) if found else None


def _link_width(path: Path) -> int | None:
    """Lanes; None without a link (0 and 255 mean unknown)."""
    text = _text(path)
    return int(text) if text.isdigit() and 0 < int(text) < 255 else None


def isolation(root: Path = Path("/")) -> IsolationFacts:
    groups = root / "sys/kernel/iommu_groups"
    redirecting, reason = None, "lspci is not installed (package pciutils)"
    if shutil.which("lspci") is not None:
        done = subprocess.run(["lspci", "-vvv"], capture_output=True, text=True, check=True)
        redirecting, reason = redirecting_bridges(done.stdout)
    return IsolationFacts(
        num_iommu_groups=len(list(groups.glob("*"))),
        kernel_options=[word for word in _text(root / "proc/cmdline").split() if _ISOLATION_OPTION.search(word)],
        redirecting_bridges=redirecting,
        unread_reason=reason,
    )


def redirecting_bridges(lspci: str) -> tuple[list[str] | None, str | None]:
    """Ports whose ACS redirects peer traffic, from ``lspci -vvv``; None and the reason if it is not shown."""
    found: list[str] = []
    address, denied = "", False
    for line in lspci.splitlines():
        if line and not line[0].isspace():
            address = line.split()[0]
        elif "<access denied>" in line:
            denied = True
        elif "ACSCtl:" in line and any(flag in line for flag in _REDIRECTS):
            found.append(address)
    if denied and not found:
        return None, "lspci shows ACS to root only"
    return found, None


def versions() -> VersionFacts:
    found = {"tightwire": tightwire.__version__}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    libc = " ".join(filter(None, platform.libc_ver()))
    return VersionFacts(
        python=platform.python_version(), kernel=platform.release(), libc=libc, packages=found, kernels=level()
    )
