"""A mix of codecs by layer and site: for a given number of bytes, the one whose predicted KL is least.

KL grows with the square of a small disturbance, and the disturbances of different places are independent, so the KL of
a mix is taken to be the sum over places of sensitivity times noise power. A place's sensitivity comes from a pass in
which it alone is quantized; the noise power of every codec there from one pass that all codecs watch. The prediction is
measured like any other arm afterwards, on windows that none of this has seen.

Cost: 2 x layers + 2 forward passes over the calibration windows.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tightwire.bench.quality.arms import LOSSLESS, LOSSY_SITES, Arm, bytes_at, exact_arm, make_arm
from tightwire.bench.quality.measure import batches, noise_of_arms
from tightwire.bench.quality.noise import Power
from tightwire.bench.quality.ranks import PlayedRanks
from tightwire.bench.quality.score import Scorer
from tightwire.bench.quality.windows import Windows
from tightwire.comm.policy.policy_file import FileRule
from tightwire.comm.policy.rules import Choice, Policy, Rule
from tightwire.model.checkpoint.config import LlamaConfig

Place = tuple[str, int]  # site and layer

CANDIDATES = (
    *("flash-int8", "flash:int8-had,int8-had", "flash-int6-uniform", "flash:int6-had,int6-had"),
    *("flash-int5", "flash:int5-had,int5-had", "flash-int4", "flash:int4-had,int4-had", "flash:int4-sr,int4-sr"),
    *("flash:int3-had,int3-had", LOSSLESS),
)
_PROBE = "flash-int4"  # coarse enough to stand out from the rounding of bfloat16


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """One candidate at one place: bytes of a token that a rank sends, and the KL it is predicted to add."""

    algorithm: str
    num_bytes: float
    kl: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    chosen: Mapping[Place, Offer]

    @property
    def predicted_kl(self) -> float:
        return sum(offer.kl for offer in self.chosen.values())

    @property
    def num_bytes(self) -> float:
        return sum(offer.num_bytes for offer in self.chosen.values())

    def rules(self) -> tuple[FileRule, ...]:
        """For a policy file: prompt rows alone."""
        layers: dict[tuple[str, str], list[int]] = {}
        for (site, layer), offer in self.chosen.items():
            layers.setdefault((site, offer.algorithm), []).append(layer)
        return tuple(
            FileRule(site=site, phase="prefill", algorithm=algorithm, layers=tuple(sorted(numbers)), reason="mix")  # pyright: ignore[reportArgumentType]
            for (site, algorithm), numbers in sorted(layers.items(), reverse=True)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    ranks: PlayedRanks
    windows: Windows
    config: LlamaConfig
    batch: int
    elem_bytes: int
    pool: ThreadPoolExecutor
    told: Callable[[str], None]

    @property
    def num_steps(self) -> int:
        """How often ``told`` will be called."""
        num_batches = -(-len(self.windows.calibration) // self.batch)
        return 2 + num_batches * len(self.places)

    @property
    def places(self) -> list[Place]:
        return [(site, layer) for site in LOSSY_SITES for layer in range(self.config.num_layers)]

    def sensitivities(self) -> dict[Place, float]:
        """KL by noise power: what quantizing that place alone does, over the calibration windows."""
        arms = [self._alone(place) for place in self.places]
        noise = self._noise([make_arm(_PROBE, self.config)])
        self.ranks.give_arms([exact_arm(), *arms])
        totals = dict.fromkeys(self.places, 0.0)
        num_rows = 0
        scorer = Scorer(self.ranks.head_VD, self.pool)
        for numbers in batches(self.windows.calibration, self.batch):
            token_ids_BL = self.windows.token_ids_NL[list(numbers)]
            exact_TD = self.windows.scored(self.ranks.prefill(token_ids_BL, 0))
            num_rows += len(exact_TD)
            for number, (place, arm) in enumerate(zip(self.places, arms, strict=True), start=1):
                self.told(f"search: {arm.name}")
                states = {arm.name: self.windows.scored(self.ranks.prefill(token_ids_BL, number))}
                _, scores = scorer.score(exact_TD, states, self.windows.next_ids(numbers))
                totals[place] += float(scores[arm.name].kl_T.sum())
        powers = {place: noise[_PROBE, *place].total for place in self.places}
        return {place: totals[place] / num_rows / powers[place] if powers[place] else 0.0 for place in self.places}

    def offers(self, sensitivities: Mapping[Place, float], candidates: Sequence[str]) -> dict[Place, list[Offer]]:
        """What each candidate would cost and do at each place."""
        rows = self.windows.token_ids_NL.shape[1]
        noise = self._noise([make_arm(name, self.config) for name in candidates])
        sent = {
            name: bytes_at(name, self.config.hidden_size, self.ranks.world_size, rows, self.elem_bytes)
            for name in candidates
        }
        return {
            place: [
                Offer(algorithm=name, num_bytes=sent[name], kl=sensitivity * noise[name, *place].total)
                for name in candidates
            ]
            for place, sensitivity in sensitivities.items()
        }

    def _noise(self, arms: Sequence[Arm]) -> dict[tuple[str, str, int], Power]:
        self.told("search: noise of each layer")
        return noise_of_arms(self.ranks, self.windows, self.windows.calibration[: self.batch], arms)

    def _alone(self, place: Place) -> Arm:
        site, layer = place
        choices = (Choice(up_to_bytes=None, algorithms=(_PROBE,), reason="alone"),)
        rules = (Rule(site, "prefill", choices, (layer,)), *exact_arm().policy.rules)
        return Arm(name=f"{site} of layer {layer}", policy=Policy(rules))


def choose(offers: Mapping[Place, Sequence[Offer]], max_bytes: float) -> Mix:
    """The mix of at most ``max_bytes`` with the least KL, but for what is left over at the end.

    From the cheapest offer everywhere, one step after the other up the convex hull of some place, the one that gains
    most KL for its bytes first.

    Raises:
        ValueError: the cheapest mix already sends more.
    """
    hulls = {place: _hull(own) for place, own in offers.items()}
    level = dict.fromkeys(hulls, 0)
    spent = sum(hull[0].num_bytes for hull in hulls.values())
    if spent > max_bytes:
        raise ValueError(
            f"no mix sends {max_bytes:,.0f} bytes a token or less: the cheapest sends {spent:,.0f}; search with more"
        )
    steps = [(-_gain(hull, 0), place) for place, hull in hulls.items() if len(hull) > 1]
    heapq.heapify(steps)
    while steps:
        _, place = heapq.heappop(steps)
        hull, at = hulls[place], level[place]
        more = hull[at + 1].num_bytes - hull[at].num_bytes
        if spent + more > max_bytes:
            continue
        level[place], spent = at + 1, spent + more
        if at + 2 < len(hull):
            heapq.heappush(steps, (-_gain(hull, at + 1), place))
    return Mix(chosen={place: hull[level[place]] for place, hull in hulls.items()})


def _gain(hull: Sequence[Offer], at: int) -> float:
    """KL less for each byte more."""
    return (hull[at].kl - hull[at + 1].kl) / (hull[at + 1].num_bytes - hull[at].num_bytes)


def _hull(offers: Sequence[Offer]) -> list[Offer]:
    """Rising bytes, falling KL, falling gain: what no line between two others beats."""
    hull: list[Offer] = []
    for offer in sorted(offers, key=lambda offer: (offer.num_bytes, offer.kl)):
        if hull and offer.kl >= hull[-1].kl:
            continue
        while len(hull) > 1 and _gain([hull[-1], offer], 0) >= _gain(hull, len(hull) - 2):
            hull.pop()
        hull.append(offer)
    return hull
