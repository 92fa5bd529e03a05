"""Facts of GPUs by ``nvidia-smi`` and torch: devices, links, peer access claimed and tested.

``python -m tightwire.bench.doctor.gpus`` writes torch's facts, a line of JSON each time that they become more complete.
"""

import re
import shutil
import sys
from collections.abc import Iterator

import msgspec
from msgspec import Struct

from tightwire.bench.doctor.probing import run_probe
from tightwire.cuda_devices import torch_has_cuda, why_no_launch
from tightwire.parent_death import die_with_parent

_QUERY = (
    *("index", "name", "pci.bus_id", "memory.total", "driver_version"),
    *("pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max", "pstate"),
)
_CHILD = (sys.executable, "-m", __name__)  # this file as a program; its last lines say what it does


class Gpu(Struct, frozen=True):
    """A GPU as the driver reports it. The PCIe link's generations and widths are None in most virtual machines."""

    index: int
    name: str
    address: str
    memory_bytes: int
    driver: str
    generation: int | None
    max_generation: int | None
    width: int | None
    max_width: int | None
    power_state: str | None  # P0 is full speed; links slow down in other states


class Driver(Struct, frozen=True):
    gpus: list[Gpu] = []
    has_nvlink: bool = False
    nvlink_problems: list[str] = []
    absent_reason: str | None = None


class PeerTest(Struct, frozen=True):
    writer: int
    owner: int
    ok: bool
    detail: str
    gb_per_s: float | None


class Torch(Struct, frozen=True):
    """The devices in torch."""

    cuda: str | None = None  # the version that torch was built for, None in a CPU build
    nccl: str | None = None
    devices: list[str] = []
    peers: list[tuple[int, int]] = []  # (writer, owner): by the driver the first may write into the second's memory
    tests: list[PeerTest] = []
    no_launch: str = ""  # why no Triton kernel can start here
    under_way: tuple[int, int] | None = None  # the pair in test, which is the cause if the probe hangs


def read_driver(limit_s: float) -> tuple[Driver, str | None]:
    """GPUs and NVLinks as the driver reports them, and what is wrong."""
    if shutil.which("nvidia-smi") is None:
        return Driver(absent_reason="nvidia-smi is not installed"), None
    query = run_probe(["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"], limit_s)
    if query.problem:
        return Driver(), query.problem + f" {query.data.decode().strip()}".rstrip()
    gpus = parse_gpus(query.data.decode())
    if len(gpus) < 2:
        return Driver(gpus), None
    nvlinks = run_probe(["nvidia-smi", "nvlink", "--status"], limit_s)
    return Driver(gpus, *parse_nvlinks(nvlinks.data.decode())), nvlinks.problem


def parse_gpus(csv: str) -> list[Gpu]:
    """Parse ``--query-gpu`` with ``_QUERY``: CSV without header and units, "[N/A]" for missing values."""
    found = []
    for line in filter(str.strip, csv.splitlines()):
        values = [None if "N/A" in value or "Not Supported" in value else value.strip() for value in line.split(",")]
        index, name, bus_id, memory, driver, *link, state = values
        address = (bus_id or "").lower()[-12:]  # as in sysfs: 0000:0a:00.0, from 00000000:0A:00.0
        generation, max_generation, width, max_width = (int(x) if x and x.isdigit() else None for x in link)
        known = int(index or 0), name or "unknown", address, int(memory or 0) << 20, driver or "unknown"
        found.append(Gpu(*known, generation, max_generation, width, max_width, state))
    return found


def parse_nvlinks(status: str) -> tuple[bool, list[str]]:
    """Parse ``nvidia-smi nvlink --status``: True if any NVLink is active, and what is wrong."""
    problems = []
    for gpu, links in re.findall(r"^GPU (\d+):.*\n((?:\s+Link.*\n?)*)", status, re.MULTILINE):
        total, num_inactive = links.count("Link "), links.count("<inactive>")
        if 0 < num_inactive < total:
            problems.append(f"GPU {gpu}: {num_inactive} of {total} NVLinks are inactive")
    return " GB/s" in status, problems


def read_torch(limit_s: float) -> tuple[Torch, str | None]:
    """Devices and tested peer access, and what is wrong; a probe that hangs leaves the facts found before."""
    if not torch_has_cuda():
        return Torch(), None
    output = run_probe(_CHILD, limit_s)
    lines = output.data.split(b"\n")[:-1]
    facts = msgspec.json.decode(lines[-1], type=Torch) if lines else Torch(cuda="?")
    return facts, output.problem


def examine_torch() -> Iterator[Torch]:
    """Test every pair of GPUs; name it first, because a broken pair may hang."""
    import torch
    from torch.cuda import nccl

    from tightwire.comm.transport.peer_access import check_peer_writes, claimed_peers

    if not torch.cuda.is_available():
        yield Torch(cuda=torch.version.cuda)
        return
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    version = ".".join(map(str, nccl.version()))
    facts = Torch(torch.version.cuda, version, devices, claimed_peers(), no_launch=why_no_launch())
    for writer, owner in facts.peers:
        yield msgspec.structs.replace(facts, under_way=(writer, owner))
        check = check_peer_writes(torch.device("cuda", writer), torch.device("cuda", owner))
        facts = msgspec.structs.replace(facts, tests=[*facts.tests, PeerTest(writer, owner, *check)])
    yield facts


if __name__ == "__main__":
    die_with_parent()
    for facts in examine_torch():
        sys.stdout.buffer.write(msgspec.json.encode(facts) + b"\n")
        sys.stdout.flush()
