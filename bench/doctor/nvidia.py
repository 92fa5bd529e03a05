"""Probe of NVIDIA's driver by way of ``nvidia-smi``: GPUs, their PCIe links, NVLink, and the paths between them."""

import re
import shutil
import subprocess

from tightwire.bench.doctor.facts import Gpu, GpuFacts, GpuPath, NvLinks

_QUERY = (
    *("index", "name", "pci.bus_id", "memory.total", "driver_version", "compute_cap"),
    *("pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max", "pstate"),
)
_MIB = 1 << 20
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # topo underlines its header, also in a file


def gpus() -> GpuFacts:
    """Raises CalledProcessError when the driver does not answer."""
    if shutil.which("nvidia-smi") is None:
        return GpuFacts(absent_reason="nvidia-smi is not installed")
    found = parse_gpus(_nvidia_smi(f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"))
    if len(found) < 2:
        return GpuFacts(absent_reason=None, gpus=found)
    return GpuFacts(
        absent_reason=None,
        gpus=found,
        nvlinks=parse_nvlinks(_nvidia_smi("nvlink", "--status")),
        paths=parse_paths(_nvidia_smi("topo", "-m")),
    )


def _nvidia_smi(*arguments: str) -> str:
    done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"nvidia-smi {arguments[0]}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def parse_gpus(csv: str) -> list[Gpu]:
    """The answer to ``--query-gpu`` of ``_QUERY`` in CSV without header and units; "[N/A]" where there is none."""
    found = []
    for line in filter(str.strip, csv.splitlines()):
        values = [None if "N/A" in value or "Not Supported" in value else value.strip() for value in line.split(",")]
        index, name, bus_id, memory, driver, capability, gen, max_gen, width, max_width, state = values
        found.append(
            Gpu(
                index=int(index or 0),
                name=name or "unknown",
                bus_id=_sysfs_address(bus_id or ""),
                memory_bytes=int(memory or 0) * _MIB,
                driver=driver or "unknown",
                compute_capability=capability,
                pcie_gen=_int(gen),
                max_pcie_gen=_int(max_gen),
                pcie_width=_int(width),
                max_pcie_width=_int(max_width),
                power_state=state,
            )
        )
    return found


def _sysfs_address(bus_id: str) -> str:
    """0000:0a:00.0, from nvidia-smi's 00000000:0A:00.0."""
    return bus_id.lower()[-12:]


def _int(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def parse_nvlinks(status: str) -> list[NvLinks]:
    """``nvidia-smi nvlink --status``, one entry for each GPU that has such links."""
    found = []
    for block in re.split(r"^(?=GPU \d+:)", status, flags=re.MULTILINE):
        head = re.match(r"GPU (\d+):", block)
        active = [float(speed) for speed in re.findall(r"Link \d+: ([\d.]+) GB/s", block)]
        num_inactive = len(re.findall(r"Link \d+: <inactive>", block))
        if head and (active or num_inactive):
            found.append(NvLinks(int(head[1]), len(active), num_inactive, round(sum(active), 3)))
    return found


def parse_paths(matrix: str) -> list[GpuPath]:
    """The pairs of GPUs in ``nvidia-smi topo -m``."""
    lines = [_ESCAPES.sub("", line) for line in matrix.splitlines()]
    header = next((line.split("\t") for line in lines if re.match(r"\s*GPU\d+\b", line) and " X " not in line), [])
    columns = [column.strip() for column in header]
    found = []
    for line in lines:
        cells = [cell.strip() for cell in line.split("\t")]
        row = re.fullmatch(r"GPU(\d+)", cells[0])
        if row is None or cells == columns:
            continue
        for name, path in zip(columns[1:], cells[1:], strict=False):
            column = re.fullmatch(r"GPU(\d+)", name)
            if column is not None and int(row[1]) < int(column[1]):
                found.append(GpuPath(int(row[1]), int(column[1]), path))
    return found
