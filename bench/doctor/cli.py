"""``tightwire doctor``: runs the probes, prints findings and advice, or one JSON object."""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Iterator, Sequence

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tightwire.bench.doctor.advice import Advice, advise
from tightwire.bench.doctor.facts import (
    CpuFacts,
    CudaFacts,
    Facts,
    GpuFacts,
    IsolationFacts,
    Link,
    MemoryFacts,
    NetworkFacts,
    PciFacts,
    PeerFacts,
    RoundTripFacts,
    VersionFacts,
)
from tightwire.bench.doctor.probing import Finding, run_probe
from tightwire.comm.sizes import format_bytes

_PACKAGE = "tightwire.bench.doctor"
# Name -> "module:function". These only read, all at once; PEERS and ROUND_TRIP test hardware, one after the other.
LOOKING = {
    "processor": f"{_PACKAGE}.host:cpu",
    "memory": f"{_PACKAGE}.host:memory",
    "GPUs": f"{_PACKAGE}.gpus:gpus",
    "torch": f"{_PACKAGE}.gpus:cuda",
    "PCIe": f"{_PACKAGE}.host:pci",
    "isolation": f"{_PACKAGE}.host:isolation",
    "network": f"{_PACKAGE}.host:network",
    "versions": f"{_PACKAGE}.host:versions",
}
PEERS = f"{_PACKAGE}.gpus:peers"
ROUND_TRIP = f"{_PACKAGE}.gpus:round_trip"
_STYLES = {"problem": "bold red", "note": "yellow", "use": "bold green"}
_Row = tuple[str, str]


class Report(msgspec.Struct, frozen=True):
    """The output of ``--json``. ``ok``: no probe failed and there is no problem."""

    ok: bool
    findings: list[Finding]
    advice: list[Advice]


def main(argv: Sequence[str]) -> int:
    """``tightwire doctor``: exit code 0, or 1 for a problem or a failed probe."""
    parser = argparse.ArgumentParser(
        prog="tightwire doctor",
        description="Examine this machine's devices, links and memory, test peer access and shared memory, and suggest "
        "options. Each probe has its own process and time limit.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--timeout-s", type=_positive, default=60.0, metavar="S", help="limit of each probe (default: %(default)g)"
    )
    parser.add_argument(
        "--tp",
        type=_ranks,
        default=2,
        metavar="N",
        help="number of ranks without a GPU (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    console = Console(highlight=False)
    waiting = Console(stderr=True).status("probing") if sys.stderr.isatty() else contextlib.nullcontext()
    with waiting:
        findings = asyncio.run(examine(args.timeout_s))
    advice = advise(findings, args.tp)
    report = Report(all(item.kind != "problem" for item in advice), findings, advice)
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
    else:
        show(findings, advice, console)
    return 0 if report.ok else 1


async def examine(limit_s: float) -> list[Finding]:
    """All findings; the first ones decide which tests run."""
    findings = list(await asyncio.gather(*(run_probe(name, target, limit_s) for name, target in LOOKING.items())))
    for finding in tuple(findings):
        match finding.facts:
            case CudaFacts(peers=[_, *_]):
                findings.append(await run_probe("peer access", PEERS, limit_s))
            case MemoryFacts(shared_memory_problem=None):
                findings.append(await run_probe("round trip", ROUND_TRIP, limit_s))
    return findings


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"must be more than 0 and at most 3600 seconds, got {text}")
    return value


def _ranks(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text}")
    return value


def show(findings: Sequence[Finding], advice: Sequence[Advice], console: Console) -> None:
    """Print a section for each finding, then the advice; fits 80 columns."""
    grid = _grid()
    for finding in findings:
        rows = list(_rows(finding.facts)) if finding.facts is not None else []
        if finding.problem is not None:
            rows.append(("", f"the probe {finding.problem}"))
        for number, (label, text) in enumerate(rows):
            grid.add_row(Text("" if number else finding.probe, "bold"), label, Text(text))
    console.print(grid)
    console.print()
    meaning = _grid()
    for item in advice:
        text = Text(item.text)
        if item.options:
            text = Text.assemble((item.options, "bold"), "\n", text)
        meaning.add_row(Text(item.kind, _STYLES[item.kind]), text)
    console.print(meaning)


def _grid() -> Table:
    return Table.grid(padding=(0, 2))


def _rows(facts: Facts) -> Iterator[_Row]:
    match facts:
        case CpuFacts():
            yield from _cpu(facts)
        case MemoryFacts():
            yield from _memory(facts)
        case PciFacts():
            yield from (
                ((link.kind, f"{link.address} {link.name}, {_link(link)}") for link in facts.links)
                if facts.links
                else [("links", "none visible")]
            )
        case IsolationFacts():
            yield from _isolation(facts)
        case GpuFacts():
            yield from _gpus(facts)
        case CudaFacts():
            yield from _cuda(facts)
        case PeerFacts():
            yield from _peers(facts)
        case NetworkFacts():
            yield from _network(facts)
        case VersionFacts():
            yield "system", f"Python {facts.python}, Linux {facts.kernel}, {facts.libc}"
            yield "packages", ", ".join(f"{name} {version}" for name, version in facts.packages.items())
        case RoundTripFacts():
            what = f"sum of {format_bytes(facts.num_bytes)} by two processes"
            yield "one-shot", f"{what}: {facts.p50_us:.0f} us, 99 of 100 within {facts.p99_us:.0f} us"


def _cpu(facts: CpuFacts) -> Iterator[_Row]:
    virtual = ", in a virtual machine" if facts.virtual else ""
    yield "model", f"{facts.model} ({facts.architecture}{virtual})"
    yield "cores", f"{facts.num_usable} usable, {facts.num_allowed} allowed, {facts.num_cpus} online"
    yield "vectors", " ".join(facts.vector_flags) or "none known"
    for node in facts.numa_nodes:
        yield f"NUMA {node.node}", f"cpus {node.cpus}, {format_bytes(node.memory_bytes)}"


def _memory(facts: MemoryFacts) -> Iterator[_Row]:
    yield "host", f"{format_bytes(facts.available_bytes)} available of {format_bytes(facts.total_bytes)}"
    if facts.shm_bytes is None:
        yield "/dev/shm", "none"
    else:
        yield "/dev/shm", f"{format_bytes(facts.shm_free_bytes or 0)} free of {format_bytes(facts.shm_bytes)}"
    yield "between ranks", facts.shared_memory_problem or "shared memory works"
    yield "may be pinned", "no limit" if facts.memlock_bytes is None else format_bytes(facts.memlock_bytes)


def _link(link: Link) -> str:
    speed = f"{_or_unknown(link.gt_per_s)} of {_or_unknown(link.max_gt_per_s)} GT/s"
    width = f"x{_or_unknown(link.width)} of x{_or_unknown(link.max_width)}"
    if (link.slot_max_gt_per_s, link.slot_max_width) == (None, None):
        return f"{width}, {speed}"
    return f"{width}, {speed}, slot x{_or_unknown(link.slot_max_width)} {_or_unknown(link.slot_max_gt_per_s)} GT/s"


def _or_unknown(value: float | None) -> str:
    return "?" if value is None else f"{value:g}"


def _isolation(facts: IsolationFacts) -> Iterator[_Row]:
    yield "IOMMU", f"{facts.num_iommu_groups} groups" if facts.num_iommu_groups else "off, or hidden"
    yield "kernel options", " ".join(facts.kernel_options) or "none relevant"
    if facts.redirecting_bridges is None:
        yield "ACS", f"unknown: {facts.unread_reason}"
    else:
        yield "ACS redirects at", ", ".join(facts.redirecting_bridges) or "no port"


def _gpus(facts: GpuFacts) -> Iterator[_Row]:
    if facts.absent_reason is not None:
        yield "driver", facts.absent_reason
    for gpu in facts.gpus:
        yield f"GPU {gpu.index}", f"{gpu.name}, {format_bytes(gpu.memory_bytes)}, driver {gpu.driver}"
        gen = f"gen {_or_unknown(gpu.pcie_gen)} of {_or_unknown(gpu.max_pcie_gen)}"
        width = f"x{_or_unknown(gpu.pcie_width)} of x{_or_unknown(gpu.max_pcie_width)}"
        yield "", f"{gpu.bus_id}, PCIe {gen}, {width}, {gpu.power_state or 'power state unknown'}"
    for links in facts.nvlinks:
        total = links.num_active + links.num_inactive
        yield f"NVLink {links.gpu}", f"{links.num_active} of {total} active, {links.gb_per_s:g} GB/s together"
    for path in facts.paths:
        yield f"GPU {path.first} - {path.second}", path.path


def _cuda(facts: CudaFacts) -> Iterator[_Row]:
    build = "a CPU build" if facts.cuda is None else f"for CUDA {facts.cuda}"
    yield "torch", f"{facts.torch}, {build}" + (f", NCCL {facts.nccl}" if facts.nccl else "")
    for device in facts.devices:
        memory = format_bytes(device.memory_bytes)
        yield f"cuda:{device.index}", f"{device.name}, {memory}, capability {device.compute_capability}"
    if facts.cuda is not None and not facts.devices:
        yield "devices", "none"
    if len(facts.devices) > 1:
        yield "peer access", f"claimed for {len(facts.peers)} of {len(facts.devices) * (len(facts.devices) - 1)} pairs"


def _peers(facts: PeerFacts) -> Iterator[_Row]:
    for test in facts.tests:
        speed = "" if test.gb_per_s is None else f", {test.gb_per_s:.1f} GB/s"
        yield f"GPU {test.writer} -> {test.owner}", f"{'ok' if test.ok else 'WRONG'}: {test.detail}{speed}"
    if facts.under_way is not None:
        yield f"GPU {facts.under_way[0]} -> {facts.under_way[1]}", "did not finish"


def _network(facts: NetworkFacts) -> Iterator[_Row]:
    for interface in facts.interfaces:
        speed = f"{interface.mbit_per_s} Mbit/s" if interface.mbit_per_s else "speed unknown"
        yield interface.name, f"{interface.state}, {speed}, MTU {interface.mtu}"
    for port in facts.rdma_ports:
        yield port.name, f"{port.state}, {port.rate}"
    if not facts.interfaces and not facts.rdma_ports:
        yield "interfaces", "only loopback"
