"""Measures signal and noise of both AllReduces of each layer.

In one pass of the exact model each algorithm under test also sums the messages, so all algorithms get the same inputs; the
pass continues with the exact sum.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from tightwire.bench.quality.arms import LOSSY_SITES, Arm, exact_arm, places
from tightwire.bench.quality.ranks import ThreadRanks
from tightwire.bench.quality.setting import Setting
from tightwire.comm.all_reduce.registry import make_all_reduce
from tightwire.comm.group.group import Group
from tightwire.comm.policy.routes import Routes, make_candidates
from tightwire.comm.protocols import AllReduce


@dataclass(slots=True)
class Power:
    """Sums of squares over the elements of one layer's messages of one site: of the lossless sum, of an algorithm's error."""

    signal: float = 0.0
    noise: float = 0.0


Powers = dict[tuple[str, str, int], Power]  # by (algorithm, site, layer)


def sqnr_db(signal: float, noise: float) -> float:
    """Signal to quantization noise in decibels; infinite without noise."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def measure_noise(ranks: ThreadRanks, setting: Setting, numbers: Sequence[int], arms: Sequence[Arm]) -> Powers:
    """Measure the noise of each algorithm that an arm uses for prompt rows, at every site and layer."""
    names = dict.fromkeys(arm.algorithm(*place) for arm in arms for place in places(setting.config))
    powers: Powers = {}
    ranks.set_arms([exact_arm()], lambda exact, group: NoiseRoutes(exact, group, list(names), powers))
    ranks.prefill(setting.windows.token_ids_NL[list(numbers)], 0)
    return powers


class NoiseRoutes(Routes):
    """One rank's routes for lossless ``arms``; ``algorithms`` also sum each prompt message. Rank 0 fills ``powers``."""

    def __init__(self, arms: Sequence[Arm], group: Group, algorithms: Sequence[str], powers: Powers) -> None:
        candidates = make_candidates([arm.policy for arm in arms], group)
        super().__init__([(arm.name, arm.policy) for arm in arms], candidates)
        self.others = {name: make_all_reduce(name, group) for name in algorithms}
        self._rank, self._powers = group.rank, powers

    def all_reduce(self, site: str, layer: int, phase: str, policy: int = 0) -> AllReduce:
        exact = super().all_reduce(site, layer, phase, policy)
        if site not in LOSSY_SITES or phase != "prefill":
            return exact
        return _Watched(exact, self, (site, layer))

    def add(self, site: str, layer: int, exact: Tensor, results: Mapping[str, Tensor]) -> None:
        """Add one message's lossless sum and the algorithms' sums."""
        if self._rank == 0:
            for name, result in results.items():
                power = self._powers.setdefault((name, site, layer), Power())
                power.signal += _square(exact)
                power.noise += _square(result.double() - exact.double())


def _square(x: Tensor) -> float:
    return float(x.double().square().sum())


class _Watched:
    """Returns the sum of ``exact``, and runs the other algorithms on the same message."""

    def __init__(self, exact: AllReduce, routes: NoiseRoutes, place: tuple[str, int]) -> None:
        self.name, self.lossless = exact.name, exact.lossless
        self.wire_bytes, self.max_error = exact.wire_bytes, exact.max_error
        self._exact, self._routes, self._place = exact, routes, place

    def __call__(self, x: Tensor, phase: str = "", site: str = "") -> Tensor:
        exact = self._exact(x, phase, site)
        self._routes.add(*self._place, exact, {name: other(x) for name, other in self._routes.others.items()})
        return exact
