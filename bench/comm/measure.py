"""Checks and times AllReduces, on every rank of ``bench comm`` and ``tune``.

Every call is checked: in the first of an algorithm at a size each element's error against the algorithm's bound (on rank 0),
the ranks' digests against each other and counted bytes against the formula; each later call against the bits of the first.
"""

import hashlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tightwire.comm.all_reduce.registry import make_all_reduce
from tightwire.comm.group.group import Group
from tightwire.comm.protocols import AllReduce
from tightwire.comm.transport.emulated import WeightlessTransport

_WARM_UP_ROUNDS = 2
_MIN_ROUNDS = 3
_REPORT_S = 0.25  # between two reports, so that a progress bar moves
_COMPUTING_ROUNDS = 15
_NOT_COMPUTABLE_ALONE = ("native", "hierarchical")  # torch.distributed's sum; one that uses groups of its own


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasurePlan:
    algorithms: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: str
    repeats: int
    seconds_per_size: float
    seed: int
    make: Callable[[str, Group], AllReduce] = make_all_reduce


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """The first answer of an algorithm at a size. Errors are None on all ranks but rank 0."""

    size: int
    algorithm: str
    digest: str
    wire_bytes: int
    formula_bytes: int
    relative_error: float | None = None  # root of the squared error's sum over that of the exact sum's squares
    share_of_bound: float | None = None  # the largest error of an element over its bound; above 1 is wrong


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """Some rounds of calls, one call of each algorithm in a round; ``done`` of ``rounds`` have ended."""

    size: int
    seconds: dict[str, list[float]]
    changed: tuple[str, ...]  # algorithms that gave other bits than before
    done: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Computed:
    """Seconds of each call without a wire: one algorithm at one message size on one rank."""

    algorithm: str
    size: int
    seconds: list[float]


def measure(group: Group, plan: MeasurePlan) -> Iterator[Checked | Timed]:
    arms = {name: plan.make(name, group) for name in plan.algorithms}
    for size in plan.sizes:
        bench = _Size(group, plan, size, arms)
        for name in arms:
            yield bench.check(name)
        yield from bench.time(bench.agree_on_rounds())


def compute_alone(group: Group, plan: MeasurePlan) -> Iterator[Computed]:
    """Time the computing of AllReduces (encode, add, decode, join slices) over a transport that costs nothing, on all ranks."""
    alone = replace(group, transport=WeightlessTransport(group.rank, group.world_size), nodes=None)
    names = [name for name in plan.algorithms if not name.startswith(_NOT_COMPUTABLE_ALONE)]
    arms = {name: make_all_reduce(name, alone) for name in names}
    for size in plan.sizes:
        x = _numbers(plan, size, group.rank).to(group.device)
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(_WARM_UP_ROUNDS + _COMPUTING_ROUNDS):
            for name, all_reduce in arms.items():
                group.transport.barrier()
                start = time.perf_counter()
                all_reduce(x)
                if number >= _WARM_UP_ROUNDS:
                    seconds[name].append(time.perf_counter() - start)
        for name, calls in seconds.items():
            yield Computed(name, size, calls)


class _Size:
    """All algorithms at one size of message."""

    def __init__(self, group: Group, plan: MeasurePlan, size: int, arms: dict[str, AllReduce]) -> None:
        self._group, self._plan, self._size, self._arms = group, plan, size, arms
        inputs = [_numbers(plan, size, rank).to(group.device) for rank in range(group.world_size)]
        self._x = inputs[group.rank]
        self._inputs = inputs if group.rank == 0 else []
        self._exact = _exact_sum(inputs) if group.rank == 0 else None
        self._first: dict[str, Tensor] = {}
        # The same on all ranks: they must call the same algorithm at the same time.
        self._order = random.Random(f"{plan.seed}/{size}/order")

    def check(self, name: str) -> Checked:
        all_reduce, group = self._arms[name], self._group
        sent_before = group.bytes_sent
        result = all_reduce(self._x)
        wire_bytes = group.bytes_sent - sent_before
        self._first[name] = result.clone()
        relative_error = share_of_bound = None
        if self._exact is not None:
            error = (result.double() - self._exact).abs()
            relative_error = float(error.norm() / self._exact.norm())
            share_of_bound = _share(error, all_reduce.max_error(self._inputs))
        return Checked(
            size=self._size,
            algorithm=name,
            digest=hashlib.blake2b(_bits(result).cpu().numpy().data, digest_size=16).hexdigest(),
            wire_bytes=wire_bytes,
            formula_bytes=all_reduce.wire_bytes(self._x.numel(), self._x.element_size()),
            relative_error=relative_error,
            share_of_bound=share_of_bound,
        )

    def agree_on_rounds(self) -> int:
        """Warm up, and let rank 0 decide how many rounds fit into the time."""
        start = time.perf_counter()
        for _ in range(_WARM_UP_ROUNDS):
            self._round()
        per_round_s = (time.perf_counter() - start) / _WARM_UP_ROUNDS
        fitting = int(self._plan.seconds_per_size / per_round_s)
        wanted = torch.tensor([max(_MIN_ROUNDS, min(self._plan.repeats, fitting))], device=self._group.device)
        told = self._group.transport.gather(wanted.view(torch.uint8))
        return int(told[0].view(torch.int64))

    def time(self, rounds: int) -> Iterator[Timed]:
        seconds: dict[str, list[float]] = {name: [] for name in self._arms}
        changed: set[str] = set()
        last_report = time.monotonic()
        for number in range(1, rounds + 1):
            for name, (taken, is_same) in self._round().items():
                seconds[name].append(taken)
                changed |= set() if is_same else {name}
            if number == rounds or time.monotonic() - last_report > _REPORT_S:
                yield Timed(size=self._size, seconds=seconds, changed=tuple(changed), done=number, rounds=rounds)
                seconds = {name: [] for name in self._arms}
                last_report = time.monotonic()

    def _round(self) -> dict[str, tuple[float, bool]]:
        """One call of each algorithm, in random order: seconds, and True if the bits are those of the first call."""
        names = list(self._arms)
        self._order.shuffle(names)
        found: dict[str, tuple[float, bool]] = {}
        for name in names:
            self._group.transport.barrier()
            self._synchronize()
            start = time.perf_counter()
            result = self._arms[name](self._x)
            self._synchronize()
            taken = time.perf_counter() - start
            found[name] = taken, torch.equal(_bits(result), _bits(self._first[name]))
        return found

    def _synchronize(self) -> None:
        if self._group.device.type == "cuda":
            torch.cuda.synchronize(self._group.device)


def _numbers(plan: MeasurePlan, size: int, rank: int) -> Tensor:
    """Normal numbers of unit variance, which every rank can make for every other."""
    dtype: torch.dtype = getattr(torch, plan.dtype)
    source = torch.Generator().manual_seed((plan.seed * 1_000_003 + size) * 64 + rank)
    return torch.randn(size // dtype.itemsize, generator=source).to(dtype)


def _exact_sum(inputs: Sequence[Tensor]) -> Tensor:
    total = inputs[0].double()
    for x in inputs[1:]:
        total += x  # a wider sum rounds at 2**-53 of it, far below any algorithm's bound
    return total


def _share(error: Tensor, bound: Tensor) -> float:
    """The largest error over its bound; no error where none is allowed is 0, and NaN is wrong."""
    shares = torch.where(error == 0, 0.0, error / bound)
    return float("inf") if bool(shares.isnan().any()) else float(shares.max())


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8)
