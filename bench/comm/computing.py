"""What AllReduces compute, without any wire: encoding, adding, decoding, putting slices together; all ranks at once."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tightwire.comm.all_reduce.registry import make_all_reduce
from tightwire.comm.group.group import Group
from tightwire.comm.transport.weightless import WeightlessTransport

_WARM_UPS = 2
_NOT_OURS = ("native", "hierarchical")  # the library's own sum; one that goes through groups of its own


@dataclass(frozen=True, slots=True)
class Computed:
    """Seconds of each call of one algorithm at one size of message, on one rank."""

    algorithm: str
    size: int
    seconds: list[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputingPlan:
    algorithms: tuple[str, ...]
    sizes: tuple[int, ...]  # bytes of messages
    dtype: str
    repeats: int
    seed: int = 0


def measurable(names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of ``names`` whose computing can be had by itself."""
    return tuple(name for name in names if not name.startswith(_NOT_OURS))


def compute_alone(group: Group, plan: ComputingPlan) -> Iterator[Computed]:
    """Runs on every rank of ``group``, whose barrier lets them begin each call together."""
    alone = replace(group, transport=WeightlessTransport(group.rank, group.world_size), nodes=None)
    arms = {name: make_all_reduce(name, alone) for name in plan.algorithms}
    dtype: torch.dtype = getattr(torch, plan.dtype)
    source = torch.Generator().manual_seed(plan.seed + group.rank)
    for size in plan.sizes:
        x = torch.randn(size // dtype.itemsize, generator=source).to(group.device, dtype)
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(_WARM_UPS + plan.repeats):
            for name, all_reduce in arms.items():
                group.transport.barrier()
                start = time.perf_counter()
                all_reduce(x)
                if number >= _WARM_UPS:
                    seconds[name].append(time.perf_counter() - start)
        for name, calls in seconds.items():
            yield Computed(name, size, calls)
