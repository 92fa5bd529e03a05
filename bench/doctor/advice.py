"""Derives the verdict, problems, notes and options from the facts."""

from typing import Literal

from msgspec import Struct

from tightwire.bench.doctor.gpus import Driver, Torch
from tightwire.bench.doctor.host import Host
from tightwire.sizes import format_bytes

# NVIDIA recommends --shm-size=1g for containers; with Docker's 64 MB NCCL fails to start several ranks.
_NCCL_SHM_BYTES = 1 << 30
_KERNELS = {"v3": "AVX2", "v4": "AVX-512", "v4-bf16": "AVX-512 with bfloat16", "v4-amx": "AMX"}
_KERNELS |= {"neon": "NEON", "neon-dot": "NEON with dot products"}


class Facts(Struct, frozen=True, kw_only=True):
    """All findings, and in ``failures`` the fault of each probe that went wrong, by its name."""

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
    problems = [f"the probe of {name} {problem}" for name, problem in facts.failures.items()]
    notes: list[str] = []
    _check_gpus(facts, problems, notes)
    _check_host(facts, tp, problems, notes)
    found = [*(Advice("problem", text) for text in problems), *(Advice("note", text) for text in notes)]
    return [*found, *_options(facts, tp)]


def _check_gpus(facts: Facts, problems: list[str], notes: list[str]) -> None:
    torch, num_driver = facts.torch, len(facts.driver.gpus)
    if num_driver and not torch.devices:
        reason = "is a CPU build" if torch.cuda is None else "cannot use them"
        problems.append(f"the driver has {num_driver} GPUs, but torch {facts.host.software['torch']} {reason}")
    elif facts.num_gpus < num_driver:
        notes.append(f"torch sees {facts.num_gpus} of {num_driver} GPUs; check CUDA_VISIBLE_DEVICES")
    problems += [*filter(None, [torch.no_launch]), *facts.driver.nvlink_problems]
    for test in torch.tests:
        if not test.ok:
            claim = f"GPU {test.writer} claims access to GPU {test.owner}'s memory, but its writes fail"
            problems.append(f"{claim}: {test.detail}")
    if torch.under_way is not None:
        writer, owner = torch.under_way
        problems.append(f"a write from GPU {writer} into GPU {owner}'s memory did not finish")
    for gpu in facts.driver.gpus:  # an idle link may be slow to save power, but it is never narrower
        name = f"GPU {gpu.index} ({gpu.name}, {gpu.address}) runs at"
        if (gpu.width or 0) < (gpu.max_width or 0):
            cure = "reseat it, or check the board's manual for slots that share lanes"
            problems.append(f"{name} x{gpu.width} of x{gpu.max_width}: {cure}")
        slow = f"{name} PCIe {gpu.generation} of {gpu.max_generation}"
        if (gpu.generation or 0) < (gpu.max_generation or 0) and gpu.power_state == "P0":
            problems.append(f"{slow} although it is not idle: check the link speed in the BIOS, and any riser cable")
        elif (gpu.generation or 0) < (gpu.max_generation or 0):
            notes.append(f"{slow}; idle links slow down, so check again under load")


def _check_host(facts: Facts, tp: int, problems: list[str], notes: list[str]) -> None:
    host, ranks = facts.host, facts.num_gpus or tp
    if host.num_usable < ranks:
        quota = f"a quota allows {host.num_usable} of {host.num_allowed}"
        why = quota if host.num_usable < host.num_allowed else "all there are"
        cost = "ranks share cores, and each waits for all others"
        problems.append(f"{ranks} ranks for {host.num_usable} cores ({why}): {cost}")
    if facts.num_gpus > 1 and (host.shm_bytes or 0) < _NCCL_SHM_BYTES:
        small = f"/dev/shm has {format_bytes(host.shm_bytes or 0)}, too little for NCCL between {facts.num_gpus} GPUs"
        problems.append(f"{small}: use docker run --shm-size=1g, or a larger emptyDir")
    if host.kernels not in _KERNELS:
        cure = "install a C++ compiler (g++), or python -m pip install ziglang"
        problems.append(f"no compiled CPU kernels, so torch's much slower references compute: {cure}")
    if len(host.numa_nodes) > 1 and not facts.num_gpus and host.num_usable == host.num_allowed:
        num = len(host.numa_nodes)
        text = f"{num} NUMA nodes: with --tp {num}, or a multiple, each rank computes and allocates on one node"
        notes.append(f"{text}; memory of another node is slower")


def _options(facts: Facts, tp: int) -> list[Advice]:
    """The first one is for every server on this machine."""
    num, torch = facts.num_gpus, facts.torch
    if num > 1:
        if sum(test.ok for test in torch.tests) == num * (num - 1):
            found = [Advice("use", "every GPU can write to every other GPU's memory", f"--tp {num}")]
        else:
            why = "not all GPUs can write" if torch.peers else "the driver does not let GPUs write"
            text = f"{why} to each other's memory, so NCCL sends the messages"
            found = [Advice("use", text, f"--tp {num} --transport process-group")]
        if not facts.driver.has_nvlink:
            why = "no NVLink: with this, auto may quantize AllReduces of prompts; decode rows stay exact"
            found.append(Advice("use", why, "--comm-error-budget 0.01"))
        return found
    if num == 1:
        return [Advice("use", "one GPU: nothing to split", "--tp 1")]
    if facts.host.num_usable < 2:
        return [Advice("use", "one usable core: a second rank would share it", "--tp 1")]
    problem = facts.host.shared_memory_problem
    sums = "ranks exchange messages in shared memory" if problem is None else f"messages go through sockets: {problem}"
    if (num_nodes := len(facts.host.numa_nodes)) > 1 and facts.host.num_usable == facts.host.num_allowed:
        return [Advice("use", f"no GPU; a rank for each of {num_nodes} NUMA nodes; {sums}", f"--tp {num_nodes}")]
    return [Advice("use", f"no GPU; {sums}", f"--tp {min(tp, facts.host.num_usable)}")]
