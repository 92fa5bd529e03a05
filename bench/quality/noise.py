"""Measures signal and noise of both AllReduces of each layer, separately for the reduce and the gather leg.

One pass of the exact model records every rank's prompt messages. Each algorithm under test also sums them, so all
algorithms get the same inputs; the pass continues with the exact sum.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tightwire.bench.quality.arms import LOSSY_SITES, Arm, exact_arm, places
from tightwire.bench.quality.ranks import ThreadRanks
from tightwire.bench.quality.setting import Setting
from tightwire.comm.all_reduce.registry import make_all_reduce, parse_all_reduce
from tightwire.comm.codec.codec import Codec, parse_codec
from tightwire.comm.codec.slices import sum_encoded
from tightwire.comm.group.group import Group
from tightwire.comm.policy.routes import Routes, make_candidates
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


def noise_of_arms(
    ranks: ThreadRanks, setting: Setting, numbers: Sequence[int], arms: Sequence[Arm]
) -> dict[tuple[str, str, int], Power]:
    """Measure the noise of each algorithm that an arm uses for prompt rows, at every site and layer."""
    names = dict.fromkeys(arm.algorithm(*place) for arm in arms for place in places(setting.config))
    record = NoiseRecord(ranks.world_size, list(names))
    ranks.set_arms([exact_arm()], record.routes)
    ranks.prefill(setting.windows.token_ids_NL[list(numbers)], 0)
    return record.powers


class NoiseRecord:
    """Collects ``powers`` by (algorithm, site, layer); rank 0 fills it while messages pass."""

    def __init__(self, world_size: int, algorithms: Sequence[str]) -> None:
        self.algorithms = tuple(algorithms)
        self.powers: dict[tuple[str, str, int], Power] = {}
        self.inputs = [torch.empty(0)] * world_size  # each rank's latest message

    def routes(self, arms: Sequence[Arm], group: Group) -> Routes:
        """Make one rank's routes for lossless ``arms``; this record observes every prompt message."""
        return _WatchedRoutes(arms, group, self)

    def add(
        self, site: str, layer: int, inputs: Sequence[Tensor], exact: Tensor, results: Mapping[str, Tensor]
    ) -> None:
        """Add one message: the ranks' ``inputs``, their ``exact`` sum and the ``results`` of the algorithms."""
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
    def __init__(self, arms: Sequence[Arm], group: Group, record: NoiseRecord) -> None:
        candidates = make_candidates([arm.policy for arm in arms], group)
        super().__init__([(arm.name, arm.policy) for arm in arms], candidates)
        self.others = {name: make_all_reduce(name, group) for name in record.algorithms}
        self.rank, self.record = group.rank, record

    def all_reduce(self, site: str, layer: int, phase: str, policy: int = 0) -> AllReduce:
        exact = super().all_reduce(site, layer, phase, policy)
        if site not in LOSSY_SITES or phase != "prefill":
            return exact
        return _Watched(exact, self, (site, layer))


class _Watched:
    """Returns the sum of ``exact``, and runs the other algorithms on the same message."""

    def __init__(self, exact: AllReduce, routes: _WatchedRoutes, place: tuple[str, int]) -> None:
        self.name, self.lossless = exact.name, exact.lossless
        self.wire_bytes, self.max_error = exact.wire_bytes, exact.max_error
        self._exact, self._routes, self._place = exact, routes, place

    def __call__(self, x: Tensor, phase: str = "", site: str = "") -> Tensor:
        routes, record = self._routes, self._routes.record
        record.inputs[routes.rank] = x.reshape(-1)
        exact = self._exact(x, phase, site)
        # Other ranks replace their messages only after the next collective, in which this rank takes part.
        inputs = list(record.inputs)
        results = {name: all_reduce(x) for name, all_reduce in routes.others.items()}
        if routes.rank == 0:
            record.add(*self._place, inputs, exact, results)
        return exact
