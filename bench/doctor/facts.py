"""The results of the probes: plain values, passed as JSON from a probe's process and printed by ``doctor --json``.

None means that this system does not report the value. Link rates are per direction; bandwidths are GB/s. ``rows`` yields
label and text of each line on the terminal.
"""

from collections.abc import Iterator

from msgspec import Struct

from tightwire.comm.sizes import format_bytes

Rows = Iterator[tuple[str, str]]


class NumaNode(Struct, frozen=True):
    node: int
    cpus: str  # in the kernel's format, "0-15,32-47"
    memory_bytes: int


class CpuFacts(Struct, frozen=True, tag="cpu"):
    model: str
    architecture: str
    num_cpus: int  # online hardware threads
    num_allowed: int  # those that this process may run on
    num_usable: int  # the same, limited by a container's quota
    vector_flags: list[str]  # relevant for matrix products, such as avx512f
    virtual: bool | None
    numa_nodes: list[NumaNode]

    def rows(self) -> Rows:
        virtual = ", in a virtual machine" if self.virtual else ""
        yield "model", f"{self.model} ({self.architecture}{virtual})"
        yield "cores", f"{self.num_usable} usable, {self.num_allowed} allowed, {self.num_cpus} online"
        yield "vectors", " ".join(self.vector_flags) or "none known"
        for node in self.numa_nodes:
            yield f"NUMA {node.node}", f"cpus {node.cpus}, {format_bytes(node.memory_bytes)}"


class MemoryFacts(Struct, frozen=True, tag="memory"):
    total_bytes: int
    available_bytes: int  # to this process, within a container's limit
    shm_bytes: int | None  # the size of /dev/shm
    shm_free_bytes: int | None
    shared_memory_problem: str | None  # why the shared-memory transport does not work; None: it works
    memlock_bytes: int | None  # limit of pinned memory; None: no limit

    def rows(self) -> Rows:
        yield "host", f"{format_bytes(self.available_bytes)} available of {format_bytes(self.total_bytes)}"
        free = f"{format_bytes(self.shm_free_bytes or 0)} free of {format_bytes(self.shm_bytes or 0)}"
        yield "/dev/shm", "none" if self.shm_bytes is None else free
        yield "between ranks", self.shared_memory_problem or "shared memory works"
        yield "may be pinned", "no limit" if self.memlock_bytes is None else format_bytes(self.memlock_bytes)


class Link(Struct, frozen=True):
    """One device's PCIe link. ``slot_*``: the maximum of the port above it."""

    address: str
    kind: str  # gpu, network or nvme
    name: str  # vendor:device
    gt_per_s: float | None
    max_gt_per_s: float | None
    width: int | None
    max_width: int | None
    slot_max_gt_per_s: float | None = None
    slot_max_width: int | None = None

    def __str__(self) -> str:
        speed = f"{_text(self.gt_per_s)} of {_text(self.max_gt_per_s)} GT/s"
        text = f"{f'{self.address} {self.name}'.strip()}, x{_text(self.width)} of x{_text(self.max_width)}, {speed}"
        if (self.slot_max_gt_per_s, self.slot_max_width) == (None, None):
            return text
        return f"{text}, slot x{_text(self.slot_max_width)} {_text(self.slot_max_gt_per_s)} GT/s"


class PciFacts(Struct, frozen=True, tag="pci"):
    links: list[Link]

    def rows(self) -> Rows:
        yield from ((link.kind, str(link)) for link in self.links)
        if not self.links:
            yield "links", "none visible"


class IsolationFacts(Struct, frozen=True, tag="isolation"):
    """Settings that redirect or block traffic between devices."""

    num_iommu_groups: int
    kernel_options: list[str]  # about IOMMU and ACS
    redirecting_bridges: list[str] | None  # ports whose ACS redirects peer traffic; None: unreadable
    unread_reason: str | None

    def rows(self) -> Rows:
        yield "IOMMU", f"{self.num_iommu_groups} groups" if self.num_iommu_groups else "off, or hidden"
        yield "kernel options", " ".join(self.kernel_options) or "none relevant"
        if self.redirecting_bridges is None:
            yield "ACS", f"unknown: {self.unread_reason}"
        else:
            yield "ACS redirects at", ", ".join(self.redirecting_bridges) or "no port"


class Gpu(Struct, frozen=True):
    index: int
    name: str
    memory_bytes: int
    driver: str
    link: Link  # as the driver reports it
    power_state: str | None  # P0 is full speed; links slow down in other states


class NvLinks(Struct, frozen=True):
    gpu: int
    num_active: int
    num_inactive: int
    gb_per_s: float  # of all active links together


class GpuFacts(Struct, frozen=True, tag="gpus"):
    absent_reason: str | None
    gpus: list[Gpu] = []
    nvlinks: list[NvLinks] = []

    def rows(self) -> Rows:
        if self.absent_reason is not None:
            yield "driver", self.absent_reason
        for gpu in self.gpus:
            yield f"GPU {gpu.index}", f"{gpu.name}, {format_bytes(gpu.memory_bytes)}, driver {gpu.driver}"
            yield "", f"{gpu.link}, {gpu.power_state or 'power state unknown'}"
        for links in self.nvlinks:
            total = links.num_active + links.num_inactive
            yield f"NVLink {links.gpu}", f"{links.num_active} of {total} active, {links.gb_per_s:g} GB/s together"


class CudaDevice(Struct, frozen=True):
    index: int
    name: str
    memory_bytes: int
    compute_capability: str


class CudaFacts(Struct, frozen=True, tag="cuda"):
    """The devices in torch."""

    torch: str
    cuda: str | None  # the version that torch was built for; None: a CPU build
    nccl: str | None
    available: bool
    devices: list[CudaDevice]
    peers: list[tuple[int, int]]  # (writer, owner): the driver claims that the first may write into the second's memory

    def rows(self) -> Rows:
        build = "a CPU build" if self.cuda is None else f"for CUDA {self.cuda}"
        yield "torch", f"{self.torch}, {build}" + (f", NCCL {self.nccl}" if self.nccl else "")
        for device in self.devices:
            memory = format_bytes(device.memory_bytes)
            yield f"cuda:{device.index}", f"{device.name}, {memory}, capability {device.compute_capability}"
        if self.cuda is not None and not self.devices:
            yield "devices", "none"
        if (num := len(self.devices)) > 1:
            yield "peer access", f"claimed for {len(self.peers)} of {num * (num - 1)} pairs"


class PeerTest(Struct, frozen=True):
    writer: int
    owner: int
    ok: bool
    detail: str
    gb_per_s: float | None


class PeerFacts(Struct, frozen=True, tag="peers"):
    tests: list[PeerTest]
    under_way: tuple[int, int] | None = None  # the pair in test, which is the cause if the probe hangs

    def rows(self) -> Rows:
        for test in self.tests:
            speed = "" if test.gb_per_s is None else f", {test.gb_per_s:.1f} GB/s"
            yield f"GPU {test.writer} -> {test.owner}", f"{'ok' if test.ok else 'WRONG'}: {test.detail}{speed}"
        if self.under_way is not None:
            yield f"GPU {self.under_way[0]} -> {self.under_way[1]}", "did not finish"


class Interface(Struct, frozen=True):
    name: str
    state: str
    mbit_per_s: int | None
    mtu: int


class NetworkFacts(Struct, frozen=True, tag="network"):
    interfaces: list[Interface]

    def rows(self) -> Rows:
        for interface in self.interfaces:
            speed = f"{interface.mbit_per_s} Mbit/s" if interface.mbit_per_s else "speed unknown"
            yield interface.name, f"{interface.state}, {speed}, MTU {interface.mtu}"
        if not self.interfaces:
            yield "interfaces", "only loopback"


class VersionFacts(Struct, frozen=True, tag="versions"):
    python: str
    kernel: str
    libc: str
    packages: dict[str, str]
    kernels: str  # level of the CPU kernels, such as v4-bf16; spec: torch's reference

    def rows(self) -> Rows:
        yield "CPU kernels", self.kernels
        yield "system", f"Python {self.python}, Linux {self.kernel}, {self.libc}"
        yield "packages", ", ".join(f"{name} {version}" for name, version in self.packages.items())


def _text(value: float | None) -> str:
    return "?" if value is None else f"{value:g}"


Facts = (
    CpuFacts | MemoryFacts | PciFacts | IsolationFacts | GpuFacts | CudaFacts | PeerFacts | NetworkFacts | VersionFacts
)
