"""The results of the probes: plain values, passed as JSON from a probe's process and printed by ``doctor --json``.

None means that this system does not report the value. Link rates are per direction; bandwidths are GB/s.
"""

from msgspec import Struct


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


class MemoryFacts(Struct, frozen=True, tag="memory"):
    total_bytes: int
    available_bytes: int  # to this process, within a container's limit
    shm_bytes: int | None  # the size of /dev/shm
    shm_free_bytes: int | None
    shared_memory_problem: str | None  # why the shared-memory transport does not work; None: it works
    memlock_bytes: int | None  # limit of pinned memory; None: no limit


class Link(Struct, frozen=True):
    """One device's PCIe link. ``slot_*``: the maximum of the port above it."""

    address: str
    kind: str  # gpu, network or nvme
    name: str  # vendor:device
    gt_per_s: float | None
    max_gt_per_s: float | None
    width: int | None
    max_width: int | None
    slot_max_gt_per_s: float | None
    slot_max_width: int | None
    numa_node: int | None


class PciFacts(Struct, frozen=True, tag="pci"):
    links: list[Link]


class IsolationFacts(Struct, frozen=True, tag="isolation"):
    """Settings that redirect or block traffic between devices."""

    num_iommu_groups: int
    kernel_options: list[str]  # about IOMMU and ACS
    redirecting_bridges: list[str] | None  # ports whose ACS redirects peer traffic; None: unreadable
    unread_reason: str | None


class Gpu(Struct, frozen=True):
    index: int
    name: str
    bus_id: str
    memory_bytes: int
    driver: str
    compute_capability: str | None
    pcie_gen: int | None
    max_pcie_gen: int | None
    pcie_width: int | None
    max_pcie_width: int | None
    power_state: str | None  # P0 is full speed; links slow down in other states


class NvLinks(Struct, frozen=True):
    gpu: int
    num_active: int
    num_inactive: int
    gb_per_s: float  # of all active links together


class GpuPath(Struct, frozen=True):
    """The connection of two GPUs in ``nvidia-smi topo -m``: NV# (NVLink), PIX, PXB, PHB, NODE, SYS."""

    first: int
    second: int
    path: str


class GpuFacts(Struct, frozen=True, tag="gpus"):
    absent_reason: str | None
    gpus: list[Gpu] = []
    nvlinks: list[NvLinks] = []
    paths: list[GpuPath] = []


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


class PeerTest(Struct, frozen=True):
    writer: int
    owner: int
    ok: bool
    detail: str
    gb_per_s: float | None


class PeerFacts(Struct, frozen=True, tag="peers"):
    tests: list[PeerTest]
    under_way: tuple[int, int] | None = None  # the pair in test, which is the cause if the probe hangs


class Interface(Struct, frozen=True):
    name: str
    state: str
    mbit_per_s: int | None
    mtu: int


class RdmaPort(Struct, frozen=True):
    name: str
    state: str
    rate: str


class NetworkFacts(Struct, frozen=True, tag="network"):
    interfaces: list[Interface]
    rdma_ports: list[RdmaPort]


class VersionFacts(Struct, frozen=True, tag="versions"):
    python: str
    kernel: str
    libc: str
    packages: dict[str, str]


class RoundTripFacts(Struct, frozen=True, tag="round_trip"):
    """An AllReduce of ``num_bytes`` by two processes over shared memory."""

    num_bytes: int
    p50_us: float
    p99_us: float


Facts = (
    CpuFacts
    | MemoryFacts
    | PciFacts
    | IsolationFacts
    | GpuFacts
    | CudaFacts
    | PeerFacts
    | NetworkFacts
    | VersionFacts
    | RoundTripFacts
)
