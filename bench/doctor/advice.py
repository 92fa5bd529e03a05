"""Derives the verdict, problems, notes and options from the facts."""

from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from tightwire.bench.doctor.gpus import Driver, Gpu, Torch
from tightwire.bench.doctor.host import Host
from tightwire.comm.sizes import format_bytes

# NVIDIA recommends --shm-size=1g for containers; with Docker's 64 MB NCCL fails to start several ranks.
_NCCL_SHM_BYTES = 1 << 30
_KERNELS = {"v3": "AVX2", "v4": "AVX-512", "v4-bf16": "AVX-512 with bfloat16", "neon": "NEON"}  # by level


class Facts(Struct, frozen=True, kw_only=True):
    """All findings. ``failures``: what went wrong, by the name of the probe."""

    host: Host
    driver: Driver = Driver()
    torch: Torch = Torch()
    failures: dict[str, str] = {}

    @property
    def num_gpus(self) -> int:
        return len(self.torch.devices)


class Speed(Struct, frozen=True):
    """``tokens_per_s`` of ``model`` for one request, measured; ``reason``: why it is unknown, or lower than usual."""

    model: str
    tokens_per_s: float | None = None
    reason: str = ""


class Advice(Struct, frozen=True):
    """``problem``: something is wrong; ``note``: it may matter; ``use``: options for ``serve`` with a reason."""

    kind: Literal["problem", "note", "use"]
    text: str
    options: str = ""


def describe_verdict(facts: Facts, options: str, speed: Speed) -> str:
    """The machine, the options to use and the speed to expect, in one sentence."""
    host = facts.host
    vectors = _KERNELS.get(host.kernels, "no compiled kernels")
    machine = f"{host.num_usable} CPU core{'s' * (host.num_usable != 1)}, {vectors}"
    if facts.num_gpus:
        machine = f"{facts.num_gpus} GPU{'s' * (facts.num_gpus > 1)} ({', '.join(sorted(set(facts.torch.devices)))})"
    if speed.tokens_per_s is None:
        return f"{machine}; use {options}; {speed.reason}"
    reason = f" ({speed.reason})" if speed.reason else ""
    expected = f"expect about {speed.tokens_per_s:.0f} tokens/s of {speed.model} for one request{reason}"
    return f"{machine}; use {options}; {expected}"


def advise(facts: Facts, tp: int) -> list[Advice]:
    """Problems first, then notes, then options. ``tp``: the number of ranks without a GPU."""
    found = [
        *(Advice("problem", f"the probe of {name} {problem}") for name, problem in facts.failures.items()),
        *_driver(facts),
        *_peers(facts.torch),
        *(advice for gpu in facts.driver.gpus for advice in _link(gpu)),
        *_isolation(facts),
        *_host(facts, tp),
        *_options(facts, tp),
    ]
    return sorted(found, key=lambda advice: ("problem", "note", "use").index(advice.kind))


def _driver(facts: Facts) -> Iterator[Advice]:
    torch, num_driver = facts.torch, len(facts.driver.gpus)
    if num_driver and not torch.devices:
        reason = "is a CPU build" if torch.cuda is None else "cannot use them"
        yield Advice("problem", f"the driver has {num_driver} GPUs, but torch {facts.host.software['torch']} {reason}")
    elif facts.num_gpus < num_driver:
        yield Advice("note", f"torch sees {facts.num_gpus} of {num_driver} GPUs; check CUDA_VISIBLE_DEVICES")
    yield from (Advice("problem", text) for text in facts.driver.nvlink_problems)


def _peers(torch: Torch) -> Iterator[Advice]:
    for test in torch.tests:
        if not test.ok:
            claim = f"GPU {test.writer} claims access to GPU {test.owner}'s memory, but its writes fail"
            yield Advice("problem", f"{claim}: {test.detail}")
    if torch.under_way is not None:
        writer, owner = torch.under_way
        yield Advice("problem", f"a write from GPU {writer} into GPU {owner}'s memory did not finish")


def _link(gpu: Gpu) -> Iterator[Advice]:
    """An idle link may be slow to save power, but it is never narrower."""
    name = f"GPU {gpu.index} ({gpu.name}, {gpu.address})"
    if gpu.width is not None and gpu.max_width is not None and gpu.width < gpu.max_width:
        cure = "reseat it, or check the board's manual for slots that share lanes"
        yield Advice("problem", f"{name} runs at x{gpu.width} of x{gpu.max_width}: {cure}")
    if gpu.generation is not None and gpu.max_generation is not None and gpu.generation < gpu.max_generation:
        slow = f"{name} runs at PCIe {gpu.generation} of {gpu.max_generation}"
        if gpu.power_state == "P0":
            cure = "check the link speed in the BIOS, and any riser cable"
            yield Advice("problem", f"{slow} although it is not idle: {cure}")
        else:
            yield Advice("note", f"{slow}; idle links slow down, so check again under load")


def _isolation(facts: Facts) -> Iterator[Advice]:
    host = facts.host
    if facts.num_gpus < 2:
        return
    if host.acs_redirects:
        ports = ", ".join(host.acs_redirects)
        cure = "turn ACS off in the BIOS unless devices are passed to virtual machines"
        yield Advice("problem", f"ACS of {ports} routes writes between GPUs through the host: {cure}")
    elif host.acs_redirects is None:
        yield Advice("note", f"cannot tell if ACS redirects peer writes: {host.acs_problem}")
    if host.num_iommu_groups and not any(option.endswith(("=pt", "=off")) for option in host.kernel_options):
        yield Advice("note", "an IOMMU translates device writes; the kernel option iommu=pt avoids most of the cost")


def _host(facts: Facts, tp: int) -> Iterator[Advice]:
    host, ranks = facts.host, facts.num_gpus or tp
    if host.num_usable < ranks:
        quota = f"a quota allows {host.num_usable} of {host.num_allowed}"
        why = quota if host.num_usable < host.num_allowed else "all there are"
        cost = "ranks share cores, and each waits for all others"
        yield Advice("problem", f"{ranks} ranks for {host.num_usable} cores ({why}): {cost}")
    if host.kernels not in _KERNELS:
        cure = "install a C++ compiler (g++), or python -m pip install ziglang"
        yield Advice("problem", f"no compiled CPU kernels, so torch's much slower references compute: {cure}")
    if len(host.numa_nodes) > 1 and not facts.num_gpus:
        cure = "keep a model that fits on one node there (numactl --cpunodebind=0 --membind=0)"
        yield Advice("note", f"{len(host.numa_nodes)} NUMA nodes: memory of another node is slower; {cure}")
    if facts.num_gpus > 1 and (host.shm_bytes or 0) < _NCCL_SHM_BYTES:
        cure = "use docker run --shm-size=1g, or a larger emptyDir"
        small = f"/dev/shm has {format_bytes(host.shm_bytes or 0)}, too little for NCCL between {facts.num_gpus} GPUs"
        yield Advice("problem", f"{small}: {cure}")


def _options(facts: Facts, tp: int) -> Iterator[Advice]:
    """The first one is for every server on this machine."""
    if facts.num_gpus > 1:
        yield _gpu_options(facts.num_gpus, facts.torch)
        if not facts.driver.has_nvlink:
            why = "no NVLink: with this, auto may quantize AllReduces of prompts; decode rows stay exact"
            yield Advice("use", why, "--comm-error-budget 0.01")
    elif facts.num_gpus == 1:
        yield Advice("use", "one GPU: nothing to split", "--tp 1")
    elif facts.host.num_usable < 2:
        yield Advice("use", "one usable core: a second rank would share it", "--tp 1")
    else:
        problem = facts.host.shared_memory_problem
        sums = "ranks exchange messages in shared memory" if problem is None else f"messages go through gloo: {problem}"
        yield Advice("use", f"no GPU; {sums}", f"--tp {min(tp, facts.host.num_usable)}")


def _gpu_options(num: int, torch: Torch) -> Advice:
    passed = {(test.writer, test.owner) for test in torch.tests if test.ok}
    if len(passed) == num * (num - 1):
        return Advice("use", "every GPU can write to every other GPU's memory", f"--tp {num}")
    if torch.peers:
        why = "not all GPUs can write to each other's memory, so NCCL sends the messages"
    else:
        why = "the driver offers no peer access, so NCCL sends messages through the host"
    return Advice("use", why, f"--tp {num} --transport process-group")
