"""Checks and times AllReduces, on every rank of ``bench comm`` and ``tune``.

Every call is checked: in the first of an algorithm at a size each element's error against the algorithm's bound,
the ranks' digests against each other and counted bytes against the formula; each later call against the digest of the first.
Ranks make and check numbers in pieces, each rank every W-th piece, so that 1 GiB takes little memory and no rank waits long.
"""

import hashlib
import random
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tightwire.comm.all_reduce.entry import Setting
from tightwire.comm.all_reduce.make import make_all_reduce, parse_all_reduce
from tightwire.comm.group.group import Group
from tightwire.comm.policy.routes import SizedAllReduce
from tightwire.comm.protocols import AllReduce
from tightwire.comm.transport.emulated import AloneTransport

_WARM_UP_ROUNDS = 2
_MIN_ROUNDS = 3
_COMPUTING_ROUNDS = 15
_SIGN_OF_LIFE_S = 1.0
_PIECE_ELEMS = 1 << 20  # whole groups of every codec, so that a piece's bound is that of the whole message
_NOT_COMPUTABLE_ALONE = ("native", "hierarchical")  # torch.distributed's sum; one that uses groups of its own


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasurePlan:
    """``computing``: also time each algorithm over a transport that costs nothing."""

    algorithms: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: str
    repeats: int
    seconds_per_size: float
    seed: int
    computing: bool = False
    threads: int = 1  # of each rank
    make: Callable[[str, Group], AllReduce] = make_all_reduce


@dataclass(kw_only=True, slots=True)
class Outcome:
    """One algorithm at one size on one rank. Errors are those of the first answer's pieces that this rank checked."""

    size: int
    algorithm: str
    digest: str  # of the first answer
    wire_bytes: int
    formula_bytes: int
    squared_error: float = 0.0  # the sum over elements
    squared_exact: float = 0.0  # that of the exact sum
    share_of_bound: float = 0.0  # the largest error of an element over its bound; above 1 is wrong
    seconds: list[float] = field(default_factory=list)
    changed: bool = False  # a later call gave other bits
    computing: list[float] = field(default_factory=list)  # seconds of each call without a wire
    rounds: int = 0  # of messages, each of which takes the link's latency; 0 if ``computing`` was not timed


def measure(group: Group, plan: MeasurePlan) -> Iterator[list[Outcome] | None]:
    """The outcomes of each size; in between None, as a sign of life."""
    torch.set_num_threads(plan.threads)
    arms = {name: plan.make(name, group) for name in plan.algorithms}
    alone = replace(group, transport=AloneTransport(group.rank, group.world_size), nodes=None)
    computing = {
        name: make_all_reduce(name, alone)
        for name in plan.algorithms
        if plan.computing and not name.startswith(_NOT_COMPUTABLE_ALONE)
    }
    setting = Setting("sockets", group.device.type, group.world_size, num_nodes=1, dtype=plan.dtype)
    for size in plan.sizes:
        bench = _Size(group, plan, size)
        outcomes = {}
        for name, all_reduce in arms.items():
            outcomes[name] = yield from bench.check(name, all_reduce)
        start = time.perf_counter()
        for _ in range(_WARM_UP_ROUNDS):
            bench.round(arms)
        rounds = bench.agree_on_rounds((time.perf_counter() - start) / _WARM_UP_ROUNDS)
        last_sign_s = time.monotonic()
        for _ in range(rounds):
            for name, (seconds, is_same) in bench.round(arms).items():
                outcomes[name].seconds.append(seconds)
                outcomes[name].changed |= not is_same
            if time.monotonic() - last_sign_s > _SIGN_OF_LIFE_S:
                yield None
                last_sign_s = time.monotonic()
        for name, all_reduce in computing.items():
            entry = parse_all_reduce(_chosen(all_reduce, size).name)
            outcomes[name].rounds = entry.work(setting, size, *entry.codecs).rounds if entry.work else 0
        for number in range(_WARM_UP_ROUNDS + _COMPUTING_ROUNDS if computing else 0):
            for name, (seconds, _) in bench.round(computing).items():
                outcomes[name].computing += [seconds] if number >= _WARM_UP_ROUNDS else []
        yield list(outcomes.values())


class _Size:
    """All algorithms at one size of message."""

    def __init__(self, group: Group, plan: MeasurePlan, size: int) -> None:
        self._group, self._plan, self._size = group, plan, size
        dtype: torch.dtype = getattr(torch, plan.dtype)
        self._x = torch.empty(size // dtype.itemsize, dtype=dtype, device=group.device)
        for first, piece in enumerate(self._x.split(_PIECE_ELEMS)):
            piece.copy_(self._numbers(first, len(piece), group.rank))
        self._first: dict[str, bytes] = {}
        # The same on all ranks: they must call the same algorithm at the same time.
        self._order = random.Random(f"{plan.seed}/{size}/order")

    def check(self, name: str, all_reduce: AllReduce) -> Generator[None, None, Outcome]:
        group = self._group
        sent_before = group.bytes_sent
        result = all_reduce(self._x)
        wire_bytes = group.bytes_sent - sent_before
        self._first[name] = _digest(result)
        outcome = Outcome(
            size=self._size,
            algorithm=name,
            digest=self._first[name].hex(),
            wire_bytes=wire_bytes,
            formula_bytes=all_reduce.wire_bytes(self._x.numel(), self._x.element_size()),
        )
        bounded, pieces = _chosen(all_reduce, self._size), result.split(_PIECE_ELEMS)
        for number in range(group.rank, len(pieces), group.world_size):
            self._check_piece(outcome, number, pieces[number], bounded)
            yield
        return outcome

    def _check_piece(self, outcome: Outcome, number: int, result: Tensor, all_reduce: AllReduce) -> None:
        inputs = [self._numbers(number, len(result), rank) for rank in range(self._group.world_size)]
        # A sum in float64 rounds at 2**-53 of it, far below any algorithm's bound.
        exact = sum(inputs[1:], inputs[0].double())
        error = (result.double() - exact).abs()
        outcome.squared_error += float(error.square().sum())
        outcome.squared_exact += float(exact.square().sum())
        outcome.share_of_bound = max(outcome.share_of_bound, _share(error, all_reduce.max_error(inputs)))

    def _numbers(self, piece: int, num_elems: int, rank: int) -> Tensor:
        """Normal numbers of unit variance, which every rank can make for every other."""
        source = torch.Generator().manual_seed(((self._plan.seed * 1_000_003 + self._size) * 64 + rank) * 1024 + piece)
        return torch.randn(num_elems, generator=source).to(self._x.dtype).to(self._group.device)

    def agree_on_rounds(self, seconds_per_round: float) -> int:
        """Rank 0 decides how many rounds fit into the time."""
        fitting = int(self._plan.seconds_per_size / seconds_per_round)
        return int(self._group.gather_numbers([max(_MIN_ROUNDS, min(self._plan.repeats, fitting))])[0][0])

    def round(self, arms: Mapping[str, AllReduce]) -> dict[str, tuple[float, bool]]:
        """One call of each algorithm, in random order: seconds, and True if the bits are those of the first call."""
        names = list(arms)
        self._order.shuffle(names)
        found: dict[str, tuple[float, bool]] = {}
        for name in names:
            self._group.transport.barrier()
            self._synchronize()
            start = time.perf_counter()
            result = arms[name](self._x)
            self._synchronize()
            found[name] = time.perf_counter() - start, _digest(result) == self._first[name]
        return found

    def _synchronize(self) -> None:
        if self._group.device.type == "cuda":
            torch.cuda.synchronize(self._group.device)


def _chosen(all_reduce: AllReduce, size: int) -> AllReduce:
    return all_reduce.choose(size) if isinstance(all_reduce, SizedAllReduce) else all_reduce


def _share(error: Tensor, bound: Tensor) -> float:
    """The largest error over its bound; no error where none is allowed is 0, and NaN is wrong."""
    shares = torch.where(error == 0, 0.0, error / bound)
    return float("inf") if bool(shares.isnan().any()) else float(shares.max())


def _digest(x: Tensor) -> bytes:
    return hashlib.blake2b(x.view(torch.uint8).cpu().numpy().data, digest_size=16).digest()
