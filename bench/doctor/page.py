"""The findings for people: a section for each kind of facts, then what they mean. Fits 80 columns."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tightwire.bench.doctor.advice import Advice
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
from tightwire.bench.doctor.probing import Finding
from tightwire.comm.sizes import format_bytes

_STYLES = {"problem": "bold red", "note": "yellow", "use": "bold green"}
_Row = tuple[str, str]


def show(findings: Sequence[Finding], advice: Sequence[Advice], console: Console) -> None:
    """Write the page."""
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
                else [("links", "none shown")]
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
    yield "cores", f"{facts.num_usable} usable, {facts.num_allowed} allowed, {facts.num_cpus} on line"
    yield "vectors", " ".join(facts.vector_flags) or "none of those known"
    for node in facts.numa_nodes:
        yield f"NUMA {node.node}", f"cpus {node.cpus}, {format_bytes(node.memory_bytes)}"


def _memory(facts: MemoryFacts) -> Iterator[_Row]:
    yield "host", f"{format_bytes(facts.available_bytes)} available of {format_bytes(facts.total_bytes)}"
    if facts.shm_bytes is None:
        yield "/dev/shm", "there is none"
    else:
        yield "/dev/shm", f"{format_bytes(facts.shm_free_bytes or 0)} free of {format_bytes(facts.shm_bytes)}"
    yield "between ranks", facts.shared_memory_problem or "anonymous shared memory works"
    yield "may be pinned", "without limit" if facts.memlock_bytes is None else format_bytes(facts.memlock_bytes)


def _link(link: Link) -> str:
    speed = f"{_or_unknown(link.gt_per_s)} of {_or_unknown(link.max_gt_per_s)} GT/s"
    width = f"x{_or_unknown(link.width)} of x{_or_unknown(link.max_width)}"
    if (link.slot_max_gt_per_s, link.slot_max_width) == (None, None):
        return f"{width}, {speed}"
    return f"{width}, {speed}, slot x{_or_unknown(link.slot_max_width)} {_or_unknown(link.slot_max_gt_per_s)} GT/s"


def _or_unknown(value: float | None) -> str:
    return "?" if value is None else f"{value:g}"


def _isolation(facts: IsolationFacts) -> Iterator[_Row]:
    yield "IOMMU", f"{facts.num_iommu_groups} groups" if facts.num_iommu_groups else "off, or not shown"
    yield "kernel options", " ".join(facts.kernel_options) or "none that concern it"
    if facts.redirecting_bridges is None:
        yield "ACS", f"not read: {facts.unread_reason}"
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
        yield f"GPU {facts.under_way[0]} -> {facts.under_way[1]}", "did not come back"


def _network(facts: NetworkFacts) -> Iterator[_Row]:
    for interface in facts.interfaces:
        speed = f"{interface.mbit_per_s} Mbit/s" if interface.mbit_per_s else "speed unknown"
        yield interface.name, f"{interface.state}, {speed}, MTU {interface.mtu}"
    for port in facts.rdma_ports:
        yield port.name, f"{port.state}, {port.rate}"
    if not facts.interfaces and not facts.rdma_ports:
        yield "interfaces", "none but the loopback"
