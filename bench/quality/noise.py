"""Measures signal and noise of both AllReduces of each layer, separately for the reduce and the gather leg.

One pass of the exact model records every rank's prompt messages. Each algorithm under test also sums them, so all
algorithms get the same inputs; the pass continues with the exact sum.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tightwire.bench.quality.arms import LOSSY_SITES, Arm
from tightwire.comm.all_reduce.registry import make_all_reduce, parse_all_reduce
from tightwire.comm.codec.codec import Codec, parse_codec
from tightwire.comm.codec.slices import sum_encoded
from tightwire.comm.group.group import Group
from tightwire.comm.policy.routes import Routes, make_candidates
from tightwire.comm.policy.rules import Policy
from tightwire.comm.protocols import AllReduce

_NONE = parse_codec("none")


@dataclass(slots=True)
class Power:
    """Sums of squares over the elements of one layer's messages of one site."""

    signal: float = 0.0  # the lossless sum
    total: float = 0.0  # error of the AllReduce's result
    reduce: float = 0.0  # error of the sum before the gather leg
    gather: float = 0.0  # error that the gather leg adds


def sqnr_db(signal: float, noise: float) -> float:
    """Signal to quantization noise in decibels; infinite without noise."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


class NoiseRecord:
    """Collects ``powers`` by (algorithm, site, layer); rank 0 fills it while messages pass."""

    def __init__(self, world_size: int, algorithms: Sequence[str]) -> None:
        self.algorithms = tuple(algorithms)
        self.powers: dict[tuple[str, str, int], Power] = {}
        self._inputs: list[Tensor | None] = [None] * world_size

    def routes(self, arms: Sequence[Arm], group: Group) -> Routes:
        """Make one rank's routes for the single lossless arm in ``arms``; this record observes every prompt message."""
        policies = [(arm.name, arm.policy) for arm in arms]
        candidates = make_candidates([policy for _, policy in policies], group)
        others = {name: make_all_reduce(name, group) for name in self.algorithms}
        return _WatchedRoutes(policies, candidates, others, group.rank, self)

    def bring(self, rank: int, x: Tensor) -> None:
        """Store the message that ``rank`` is about to sum. The caller must not change it."""
        self._inputs[rank] = x.reshape(-1)

    def brought(self) -> list[Tensor]:
        """Every rank's message. Call between a collective after ``bring`` and the next collective."""
        inputs = [x for x in self._inputs if x is not None]
        assert len(inputs) == len(self._inputs), "a rank has brought nothing"
        return inputs

    def add(
        self, site: str, layer: int, inputs: Sequence[Tensor], exact: Tensor, results: Mapping[str, Tensor]
    ) -> None:
        lossless_N = sum_encoded([_NONE.encode(x) for x in inputs], inputs[0].numel(), _NONE, inputs[0].dtype)
        signal = _square(exact)
        for name, result in results.items():
            power = self.powers.setdefault((name, site, layer), Power())
            power.signal += signal
            power.total += _square(result.double() - exact.double())
            codecs = parse_all_reduce(name).codecs
            if codecs:
                reduce, gather = _leg_noise(inputs, lossless_N, codecs[0], codecs[-1])
                power.reduce += reduce
                power.gather += gather


def _leg_noise(inputs: Sequence[Tensor], lossless_N: Tensor, reduce: Codec, gather: Codec) -> tuple[float, float]:
    """Squared errors of one AllReduce: of the ranks' codecs in the sum, then of the gather codec on that sum.

    Slices begin at quantization groups, so encoding the whole message gives the same codes.
    """
    num_elems, dtype = lossless_N.numel(), inputs[0].dtype
    sum_N = sum_encoded([reduce.encode(x) for x in inputs], num_elems, reduce, dtype)
    gathered_N = sum_N if gather.exact else gather.decode(gather.encode(sum_N), num_elems, torch.float32)
    return _square(sum_N.double() - lossless_N.double()), _square(gathered_N.double() - sum_N.double())


def _square(x: Tensor) -> float:
    return float(x.double().square().sum())


class _WatchedRoutes(Routes):
    def __init__(
        self,
        arms: Sequence[tuple[str, Policy]],
        candidates: Mapping[str, AllReduce],
        others: Mapping[str, AllReduce],
        rank: int,
        record: NoiseRecord,
    ) -> None:
        super().__init__(arms, candidates)
        self._others, self._rank, self._record = others, rank, record

    def all_reduce(self, site: str, layer: int, phase: str, arm: int = 0) -> AllReduce:
        exact = super().all_reduce(site, layer, phase, arm)
        if site not in LOSSY_SITES or phase != "prefill":
            return exact
        return _Watched(exact, self._others, self._rank, self._record, (site, layer))


class _Watched:
    """Returns the sum of ``exact``, and runs ``others`` on the same message."""

    def __init__(
        self,
        exact: AllReduce,
        others: Mapping[str, AllReduce],
        rank: int,
        record: NoiseRecord,
        place: tuple[str, int],
    ) -> None:
        self.name, self.lossless = exact.name, exact.lossless
        self.wire_bytes, self.max_error = exact.wire_bytes, exact.max_error
        self._exact, self._others, self._rank, self._record, self._place = exact, others, rank, record, place

    def __call__(self, x: Tensor) -> Tensor:
        self._record.bring(self._rank, x)
        exact = self._exact(x)
        inputs = self._record.brought() if self._rank == 0 else []
        results = {name: all_reduce(x) for name, all_reduce in self._others.items()}
        if self._rank == 0:
            self._record.add(*self._place, inputs, exact, results)
        return exact
