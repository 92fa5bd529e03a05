"""Probes of GPUs by ``nvidia-smi`` and torch: devices, links, peer access claimed and tested."""

import re
import shutil
import subprocess
from collections.abc import Iterator

import torch
from torch.cuda import nccl

from tightwire.bench.doctor.facts import (
    CudaDevice,
    CudaFacts,
    Gpu,
    GpuFacts,
    Link,
    NvLinks,
    PeerFacts,
    PeerTest,
)
from tightwire.comm.transport.peer_access import check_peer_writes, claimed_peers

_QUERY = (
    *("index", "name", "pci.bus_id", "memory.total", "driver_version"),
    *("pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max", "pstate"),
)
_MIB = 1 << 20
_GT_PER_S = {"1": 2.5, "2": 5.0, "3": 8.0, "4": 16.0, "5": 32.0, "6": 64.0}  # by PCIe generation


def gpus() -> GpuFacts:
    """GPUs and NVLinks as the driver reports them; raises RuntimeError if nvidia-smi fails."""
    if shutil.which("nvidia-smi") is None:
        return GpuFacts(absent_reason="nvidia-smi is not installed")
    found = parse_gpus(_nvidia_smi(f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"))
    nvlinks = parse_nvlinks(_nvidia_smi("nvlink", "--status")) if len(found) > 1 else []
    return GpuFacts(absent_reason=None, gpus=found, nvlinks=nvlinks)


def _nvidia_smi(*arguments: str) -> str:
    done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"nvidia-smi {arguments[0]}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def parse_gpus(csv: str) -> list[Gpu]:
    """Parse ``--query-gpu`` with ``_QUERY``: CSV without header and units, "[N/A]" for missing values."""
    found = []
    for line in filter(str.strip, csv.splitlines()):
        values = [None if "N/A" in value or "Not Supported" in value else value.strip() for value in line.split(",")]
        index, name, bus_id, memory, driver, gen, max_gen, width, max_width, state = values
        found.append(
            Gpu(
                index=int(index or 0),
                name=name or "unknown",
                memory_bytes=int(memory or 0) * _MIB,
                driver=driver or "unknown",
                link=Link(
                    address=(bus_id or "").lower()[-12:],  # as in sysfs: 0000:0a:00.0, from 00000000:0A:00.0
                    kind="gpu",
                    name="",
                    gt_per_s=_GT_PER_S.get(gen or ""),
                    max_gt_per_s=_GT_PER_S.get(max_gen or ""),
                    width=_int(width),
                    max_width=_int(max_width),
                ),
                power_state=state,
            )
        )
    return found


def _int(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def parse_nvlinks(status: str) -> list[NvLinks]:
    """Parse ``nvidia-smi nvlink --status``: one entry for each GPU with NVLinks."""
    found = []
    for block in re.split(r"^(?=GPU \d+:)", status, flags=re.MULTILINE):
        head = re.match(r"GPU (\d+):", block)
        active = [float(speed) for speed in re.findall(r"Link \d+: ([\d.]+) GB/s", block)]
        num_inactive = len(re.findall(r"Link \d+: <inactive>", block))
        if head and (active or num_inactive):
            found.append(NvLinks(int(head[1]), len(active), num_inactive, round(sum(active), 3)))
    return found


def cuda() -> CudaFacts:
    available = torch.cuda.is_available()
    devices = []
    for index in range(torch.cuda.device_count() if available else 0):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        devices.append(CudaDevice(index, properties.name, properties.total_memory, capability))
    return CudaFacts(
        torch=str(torch.__version__),  # its type is a subclass of str that JSON does not know
        cuda=torch.version.cuda,
        nccl=".".join(map(str, nccl.version())) if available else None,
        available=available,
        devices=devices,
        peers=claimed_peers() if available else [],
    )


def peers() -> Iterator[PeerFacts]:
    """Test every pair; name it first, because a broken pair may hang."""
    tests: list[PeerTest] = []
    for writer, owner in claimed_peers():
        yield PeerFacts(tests=list(tests), under_way=(writer, owner))
        check = check_peer_writes(torch.device("cuda", writer), torch.device("cuda", owner))
        tests.append(PeerTest(writer, owner, *check))
    yield PeerFacts(tests=tests)
