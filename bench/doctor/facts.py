"""What the probes find: plain values that travel as JSON from a probe's process and out of ``doctor --json``.

None stands for what this system does not tell. Links are per direction; bandwidths are gigabytes a second.
"""

from msgspec import Struct


class NumaNode(Struct, frozen=True):
    node: int
    cpus: str  # as the kernel lists them, "0-15,32-47"
    memory_bytes: int


class CpuFacts(Struct, frozen=True, tag="cpu"):
    model: str
    architecture: str
    num_cpus: int  # hardware threads that are on line
    num_allowed: int  # of them this process may run on
    num_usable: int  # the same, less what a container's quota takes away
    vector_flags: list[str]  # those that matter to matrix products, such as avx512f
    virtual: bool | None
    numa_nodes: list[NumaNode]


class MemoryFacts(Struct, frozen=True, tag="memory"):
    total_bytes: int
    available_bytes: int  # to this process, a container's limit considered
    shm_bytes: int | None  # the size of /dev/shm
    shm_free_bytes: int | None
    shared_memory_problem: str | None  # why the shared-memory transport cannot be used; None: it can
    memlock_bytes: int | None  # the most that may be pinned; None: no limit


class Link(Struct, frozen=True):
    """One device's PCIe link. ``slot_*``: the most that the port above it can do."""

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
    """What may send traffic between devices through the host, or block it."""

    num_iommu_groups: int
    kernel_options: list[str]  # those that concern the IOMMU and ACS
    redirecting_bridges: list[str] | None  # ports whose ACS sends peer traffic upstream; None: could not be read
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
    power_state: str | None  # P0 is full speed; links slow down in the others


class NvLinks(Struct, frozen=True):
    gpu: int
    num_active: int
    num_inactive: int
    gb_per_s: float  # of the active ones together


class GpuPath(Struct, frozen=True):
    """How ``nvidia-smi topo -m`` says two GPUs are connected: NV# (NVLink), PIX, PXB, PHB, NODE, SYS."""

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
    """What torch sees."""

    torch: str
    cuda: str | None  # the version torch was built for; None: a CPU build
    nccl: str | None
    available: bool
    devices: list[CudaDevice]
    peers: list[tuple[int, int]]  # (writer, owner): the driver says that one may write into the other's memory


class PeerTest(Struct, frozen=True):
    writer: int
    owner: int
    ok: bool
    detail: str
    gb_per_s: float | None


class PeerFacts(Struct, frozen=True, tag="peers"):
    tests: list[PeerTest]
    under_way: tuple[int, int] | None = None  # the pair being tried: the one to blame when the probe does not end


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
    """Two processes that sum ``num_bytes`` over shared memory."""

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
