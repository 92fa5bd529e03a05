"""Derives problems, notes and suggested options from the findings."""

from collections.abc import Iterator, Sequence
from typing import Literal, TypeVar

from msgspec import Struct

from tightwire.bench.doctor.facts import (
    CpuFacts,
    CudaFacts,
    Facts,
    Gpu,
    GpuFacts,
    IsolationFacts,
    Link,
    MemoryFacts,
    PciFacts,
    PeerFacts,
)
from tightwire.bench.doctor.probing import Finding
from tightwire.comm.sizes import format_bytes

# NVIDIA recommends --shm-size=1g for containers; with Docker's 64 MB NCCL fails to start several ranks.
_NCCL_SHM_BYTES = 1 << 30

_Kind = TypeVar("_Kind")


class Advice(Struct, frozen=True):
    """``problem``: something is wrong; ``note``: it may matter; ``use``: options for ``serve`` with a reason."""

    kind: Literal["problem", "note", "use"]
    text: str
    options: str = ""


class _Machine:
    """The facts by kind; None if a probe failed or did not run."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        facts = [finding.facts for finding in findings if finding.facts is not None]
        self.cpu, self.memory = _of(CpuFacts, facts), _of(MemoryFacts, facts)
        self.pci, self.isolation = _of(PciFacts, facts), _of(IsolationFacts, facts)
        self.gpus, self.cuda, self.peers = _of(GpuFacts, facts), _of(CudaFacts, facts), _of(PeerFacts, facts)

    @property
    def num_cuda(self) -> int:
        return len(self.cuda.devices) if self.cuda else 0


def _of(kind: type[_Kind], facts: Sequence[Facts]) -> _Kind | None:
    return next((fact for fact in facts if isinstance(fact, kind)), None)


def advise(findings: Sequence[Finding], tp: int) -> list[Advice]:
    """Problems first, then notes, then options. ``tp``: the number of ranks without a GPU."""
    machine = _Machine(findings)
    found = [
        *_failures(findings),
        *_gpus(machine),
        *_peers(machine),
        *_links(machine),
        *_isolation(machine),
        *_host(machine, tp),
        *_options(machine, tp),
    ]
    return sorted(found, key=lambda advice: ("problem", "note", "use").index(advice.kind))


def _failures(findings: Sequence[Finding]) -> Iterator[Advice]:
    for finding in findings:
        if finding.problem is not None:
            yield Advice("problem", f"the probe of {finding.probe} {finding.problem}")


def _gpus(machine: _Machine) -> Iterator[Advice]:
    driver, cuda = machine.gpus, machine.cuda
    if driver is None or cuda is None or not driver.gpus:
        return
    if cuda.cuda is None:
        yield Advice("problem", f"the driver has {len(driver.gpus)} GPUs, but torch {cuda.torch} is a CPU build")
    elif not cuda.available:
        yield Advice("problem", f"the driver has {len(driver.gpus)} GPUs, but torch {cuda.torch} cannot use them")
    elif len(cuda.devices) < len(driver.gpus):
        yield Advice(
            "note",
            f"torch sees {len(cuda.devices)} of {len(driver.gpus)} GPUs; check CUDA_VISIBLE_DEVICES",
        )
    for links in driver.nvlinks:
        if links.num_inactive and links.num_active:
            total = links.num_active + links.num_inactive
            yield Advice("problem", f"GPU {links.gpu}: {links.num_inactive} of {total} NVLinks are inactive")


def _peers(machine: _Machine) -> Iterator[Advice]:
    if machine.peers is None:
        return
    for test in machine.peers.tests:
        if not test.ok:
            yield Advice(
                "problem",
                f"GPU {test.writer} claims access to GPU {test.owner}'s memory, but its writes fail: {test.detail}",
            )
    if machine.peers.under_way is not None:
        writer, owner = machine.peers.under_way
        yield Advice("problem", f"a write from GPU {writer} into GPU {owner}'s memory did not finish")


def _links(machine: _Machine) -> Iterator[Advice]:
    """An idle link may be slow to save power, but it is never narrower."""
    gpus = {gpu.link.address: gpu for gpu in machine.gpus.gpus} if machine.gpus else {}
    links = machine.pci.links if machine.pci else []
    for link in links:
        yield from _link(link, gpus.get(link.address))
    for gpu in gpus.values():  # a virtual machine may hide links that its driver reports
        if gpu.link.address not in {link.address for link in links}:
            yield from _link(gpu.link, gpu)


def _link(link: Link, gpu: Gpu | None) -> Iterator[Advice]:
    name = f"{link.kind} {link.address}" + (f" ({gpu.name})" if gpu else "")
    max_width = _least(link.max_width, link.slot_max_width)
    max_speed = _least(link.max_gt_per_s, link.slot_max_gt_per_s)
    if link.width is not None and max_width is not None and link.width < max_width:
        yield Advice(
            "problem",
            f"{name} runs at x{link.width} of x{max_width:g}: reseat it, or check the board's manual for slots that share lanes",
        )
    if link.gt_per_s is not None and max_speed is not None and link.gt_per_s < max_speed:
        slow = f"{name} runs at {link.gt_per_s:g} of {max_speed:g} GT/s"
        if gpu is not None and gpu.power_state == "P0":
            yield Advice(
                "problem", f"{slow} although it is not idle: check the link speed in the BIOS, and any riser cable"
            )
        else:
            yield Advice("note", f"{slow}; idle links slow down, so check again under load")
    if link.slot_max_width is not None and link.max_width is not None and link.slot_max_width < link.max_width:
        yield Advice("note", f"{name} is x{link.max_width} in a slot that is x{link.slot_max_width}")


def _least(*values: float | None) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _isolation(machine: _Machine) -> Iterator[Advice]:
    facts = machine.isolation
    if facts is None or machine.num_cuda < 2:
        return
    if facts.redirecting_bridges:
        yield Advice(
            "problem",
            f"ACS of {', '.join(facts.redirecting_bridges)} routes writes between GPUs through the host: turn ACS off in "
            "the BIOS unless devices are passed to virtual machines",
        )
    elif facts.redirecting_bridges is None:
        yield Advice("note", f"cannot tell if ACS redirects peer writes: {facts.unread_reason}")
    if facts.num_iommu_groups and not any(option.endswith(("=pt", "=off")) for option in facts.kernel_options):
        yield Advice("note", "an IOMMU translates device writes; the kernel option iommu=pt avoids most of the cost")


def _host(machine: _Machine, tp: int) -> Iterator[Advice]:
    cpu, memory = machine.cpu, machine.memory
    ranks = machine.num_cuda or tp
    if cpu is not None and cpu.num_usable < ranks:
        why = (
            f"a quota allows {cpu.num_usable} of {cpu.num_allowed}"
            if cpu.num_usable < cpu.num_allowed
            else "all there are"
        )
        yield Advice(
            "problem",
            f"{ranks} ranks for {cpu.num_usable} cores ({why}): ranks share cores, and each waits for all others",
        )
    if cpu is not None and len(cpu.numa_nodes) > 1 and not machine.num_cuda:
        yield Advice(
            "note",
            f"{len(cpu.numa_nodes)} NUMA nodes: memory of another node is slower; keep a model that fits on one node there "
            "(numactl --cpunodebind=0 --membind=0)",
        )
    if memory is not None and machine.num_cuda > 1 and (memory.shm_bytes or 0) < _NCCL_SHM_BYTES:
        yield Advice(
            "problem",
            f"/dev/shm has {format_bytes(memory.shm_bytes or 0)}, too little for NCCL between {machine.num_cuda} GPUs: "
            "use docker run --shm-size=1g, or a larger emptyDir",
        )


def _options(machine: _Machine, tp: int) -> Iterator[Advice]:
    if machine.num_cuda > 1:
        yield _gpu_transport(machine)
        if not (machine.gpus and machine.gpus.nvlinks):
            yield Advice(
                "use",
                "no NVLink: with this, auto may quantize AllReduces of prompts; decode rows stay exact",
                "--comm-error-budget 0.01",
            )
    elif machine.num_cuda == 1:
        yield Advice("use", "one GPU: nothing to split", "--device cuda --tp 1")
    elif machine.cpu is not None and machine.memory is not None:
        ranks, problem = min(tp, machine.cpu.num_usable), machine.memory.shared_memory_problem
        if ranks < 2:
            yield Advice("use", "one usable core: a second rank would share it", "--device cpu --tp 1")
        elif problem is None:
            yield Advice(
                "use",
                "no GPU; ranks exchange messages in shared memory",
                f"--device cpu --tp {ranks} --transport shared-memory",
            )
        else:
            yield Advice("use", f"no GPU; {problem}", f"--device cpu --tp {ranks} --transport process-group")


def _gpu_transport(machine: _Machine) -> Advice:
    num, peers = machine.num_cuda, machine.peers
    passed = {(test.writer, test.owner) for test in peers.tests if test.ok} if peers else set()
    if len(passed) == num * (num - 1):
        text, transport = "every GPU can write to every other GPU's memory", "peer-memory"
    elif machine.cuda and machine.cuda.peers:
        text, transport = "not all GPUs can write to each other's memory, so NCCL sends the messages", "process-group"
    else:
        text, transport = "the driver offers no peer access, so NCCL sends messages through the host", "process-group"
    return Advice("use", text, f"--device cuda --tp {num} --transport {transport}")
