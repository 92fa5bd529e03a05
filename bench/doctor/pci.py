"""Probes of PCI Express: how fast each device's link runs against what it could, and what stands between devices.

Source: Linux sysfs-bus-pci ABI; PCI Express Base Specification, Access Control Services (ACS).
"""

import re
import shutil
import subprocess
from pathlib import Path

from tightwire.bench.doctor.facts import IsolationFacts, Link, PciFacts

# The class code's first bytes: display, processing accelerator, network, NVMe.
_KINDS = {"0x03": "gpu", "0x12": "gpu", "0x02": "network", "0x0108": "nvme"}
_OPTION = re.compile(r"iommu|acs|^pci=|^amd_iommu|^intel_iommu", re.IGNORECASE)
# ACS with these two sends what one device writes to another up to the root, where the IOMMU may translate or drop it.
_REDIRECTS = ("ReqRedir+", "CmpltRedir+")


def pci(root: Path = Path("/")) -> PciFacts:
    """Links of GPUs, network cards and NVMe drives. A virtual machine usually shows none."""
    links = [_link(folder) for folder in sorted((root / "sys/bus/pci/devices").glob("*"))]
    return PciFacts(links=[link for link in links if link is not None])


def _link(folder: Path) -> Link | None:
    code = _read(folder / "class")
    kind = next((kind for prefix, kind in _KINDS.items() if code.startswith(prefix)), None)
    width = _width(folder / "current_link_width")
    if kind is None or width is None:
        return None
    slot = folder.resolve().parent  # the port the device is plugged into; for a device of the root, no port at all
    node = _read(folder / "numa_node")
    return Link(
        address=folder.name,
        kind=kind,
        name=f"{_read(folder / 'vendor').removeprefix('0x')}:{_read(folder / 'device').removeprefix('0x')}",
        gt_per_s=_speed(folder / "current_link_speed"),
        max_gt_per_s=_speed(folder / "max_link_speed"),
        width=width,
        max_width=_width(folder / "max_link_width"),
        slot_max_gt_per_s=_speed(slot / "max_link_speed"),
        slot_max_width=_width(slot / "max_link_width"),
        numa_node=int(node) if node.isdigit() else None,  # -1: the kernel does not know
    )


def _speed(path: Path) -> float | None:
    """GT/s of a lane, from "16.0 GT/s PCIe"; None for "Unknown"."""
    found = re.match(r"([\d.]+) GT/s", _read(path))
    return float(found[1]) if found else None


def _width(path: Path) -> int | None:
    """Lanes; None where there is no link (0 and 255 stand for unknown)."""
    text = _read(path)
    return int(text) if text.isdigit() and 0 < int(text) < 255 else None


def isolation(root: Path = Path("/")) -> IsolationFacts:
    groups = root / "sys/kernel/iommu_groups"
    redirecting, reason = None, "lspci is not installed (package pciutils)"
    if shutil.which("lspci") is not None:
        done = subprocess.run(["lspci", "-vvv"], capture_output=True, text=True, check=True)
        redirecting, reason = redirecting_bridges(done.stdout)
    return IsolationFacts(
        num_iommu_groups=len(list(groups.glob("*"))),
        kernel_options=[word for word in _read(root / "proc/cmdline").split() if _OPTION.search(word)],
        redirecting_bridges=redirecting,
        unread_reason=reason,
    )


def redirecting_bridges(lspci: str) -> tuple[list[str] | None, str | None]:
    """Ports whose ACS redirects peer traffic, from ``lspci -vvv``; None and the reason where it is not shown."""
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
        return None, "lspci shows ACS to root alone"
    return found, None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
