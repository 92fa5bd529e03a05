"""Finds the mix of codecs by layer and site with the least predicted KL for a number of bytes, and makes policy files.

KL grows with the square of a small disturbance. Assuming that disturbances of different places are independent, the KL
of a mix is the sum over places of sensitivity times noise power. A place's sensitivity comes from a pass that quantizes
only that place; one pass measures the noise power of all codecs at all places. The chosen mix is then measured like any
other arm, on other windows.

Cost: about 2 x layers + 2 forward passes over the calibration windows.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tightwire.bench.quality.arms import (
    LOSSLESS,
    LOSSY_SITES,
    MIX,
    Arm,
    bytes_at,
    bytes_per_token,
    exact_arm,
    file_arm,
    make_arm,
)
from tightwire.bench.quality.measure import Measured, Scorer, batches, noise_of_arms
from tightwire.bench.quality.noise import Power
from tightwire.bench.quality.ranks import PlayedRanks
from tightwire.bench.quality.setting import Setting, Windows
from tightwire.bench.quality.summary import window_means
from tightwire.bench.report.statistics import compare
from tightwire.comm.policy.policy_file import FileRule, PolicyFile
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
    """One candidate at one place: bytes a rank sends per token, and the predicted KL."""

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
        """The mix as rules of a policy file, for prompt rows only."""
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
        """The number of calls of ``told``."""
        num_batches = -(-len(self.windows.calibration) // self.batch)
        return 2 + num_batches * len(self.places)

    @property
    def places(self) -> list[Place]:
        return [(site, layer) for site in LOSSY_SITES for layer in range(self.config.num_layers)]

    def sensitivities(self) -> dict[Place, float]:
        """KL per noise power of each place when only that place is quantized, over the calibration windows."""
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
        """Bytes and predicted KL of each candidate at each place."""
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
    """Choose the mix of at most ``max_bytes`` with about the least KL.

    A greedy algorithm: start with the cheapest offer at every place; repeat the step along a place's convex hull that
    lowers KL most per byte. It is optimal except for bytes that remain unused.

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
    """Decrease of KL per added byte."""
    return (hull[at].kl - hull[at + 1].kl) / (hull[at + 1].num_bytes - hull[at].num_bytes)


def _hull(offers: Sequence[Offer]) -> list[Offer]:
    """The lower convex hull: rising bytes, falling KL, falling gain."""
    hull: list[Offer] = []
    for offer in sorted(offers, key=lambda offer: (offer.num_bytes, offer.kl)):
        if hull and offer.kl >= hull[-1].kl:
            continue
        while len(hull) > 1 and _gain([hull[-1], offer], 0) >= _gain(hull, len(hull) - 2):
            hull.pop()
        hull.append(offer)
    return hull


_AS_MANY = 1.1  # times the mix's bytes: the most that an arm may send to be compared with it


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundMix:
    """The result of the search: the mix as a policy file and as an arm, and facts for the result."""

    file: PolicyFile
    arm: Arm
    facts: dict[str, Any]


def find_mix(setting: Setting, ranks: PlayedRanks, pool: ThreadPoolExecutor, told: Callable[[str], None]) -> FoundMix:
    """Search on the calibration windows with ``ranks``.

    Raises:
        ValueError: even the cheapest mix exceeds the bytes.
    """
    options, config = setting.options, setting.config
    assert options.search is not None
    elem_bytes = setting.dtype.itemsize
    search = Search(
        ranks=ranks,
        windows=setting.windows,
        config=config,
        batch=options.batch,
        elem_bytes=elem_bytes,
        pool=pool,
        told=told,
    )
    sensitivities = search.sensitivities()
    limit = make_arm(options.search, config)
    mix = choose(
        search.offers(sensitivities, CANDIDATES),
        bytes_per_token(limit, config, ranks.world_size, options.window, elem_bytes),
    )
    facts = {
        "bytes_of": options.search,
        "world_size": ranks.world_size,
        "tokens": len(setting.windows.next_ids(setting.windows.calibration)),
        "candidates": list(CANDIDATES),
        "predicted_kl": mix.predicted_kl,
        "bytes_per_token": mix.num_bytes,
        "chosen": _chosen(mix, sensitivities),
    }
    made_for = {**made_for_facts(setting), "found_with_ranks": ranks.world_size, "bytes_of": options.search}
    file = PolicyFile(made_for={**made_for, "predicted_kl": mix.predicted_kl}, rules=mix.rules())
    return FoundMix(file=file, arm=file_arm(MIX, file, config), facts=facts)


def _chosen(mix: Mix, sensitivities: Mapping[tuple[str, int], float]) -> list[dict[str, Any]]:
    return [
        {
            "site": site,
            "layer": layer,
            "algorithm": offer.algorithm,
            "predicted_kl": offer.kl,
            "kl_per_noise_power": sensitivities[site, layer],
        }
        for (site, layer), offer in mix.chosen.items()
    ]


def mix_against(measured: Measured, rows: Sequence[Mapping[str, Any]], window_rows: int) -> list[dict[str, Any]]:
    """Ratio of the mix's KL to that of each arm with equal or slightly more bytes, with a 95 % interval."""
    own = next((row for row in rows if row["algorithm"] == MIX), None)
    if own is None:
        return []
    mix_kl = window_means(measured, MIX, "kl_T", window_rows)
    found = []
    for row in rows:
        if row["algorithm"] == MIX or not 1 <= row["bytes_per_token"] / own["bytes_per_token"] <= _AS_MANY:
            continue
        other_kl = window_means(measured, row["algorithm"], "kl_T", window_rows)
        if min(*other_kl, *mix_kl) <= 0:  # an exact arm has no ratio
            continue
        comparison = compare(other_kl, mix_kl, paired=True)
        found.append(
            {
                "world_size": measured.world_size,
                "algorithm": row["algorithm"],
                "bytes_ratio": own["bytes_per_token"] / row["bytes_per_token"],
                "kl_ratio": comparison.ratio,
                "kl_ratio_low": comparison.low,
                "kl_ratio_high": comparison.high,
            }
        )
    return found


def budget_policy(setting: Setting, name: str, rows: Sequence[Mapping[str, Any]]) -> PolicyFile:
    """Make the policy file of the arm ``name``, with its worst figures over all world sizes."""
    arm = next(arm for arm in setting.arms if arm.name == name)
    own = [row for row in rows if row["algorithm"] == name]
    worst = {key: max(row[key] for row in own) for key in ("kl_mean", "perplexity_delta", "bytes_per_token")}
    layers: dict[tuple[str, str], list[int]] = {}
    for site in LOSSY_SITES:
        for layer in range(setting.config.num_layers):
            layers.setdefault((site, arm.algorithm(site, layer)), []).append(layer)
    rules = tuple(
        FileRule(
            site=site,  # pyright: ignore[reportArgumentType]
            phase="prefill",
            algorithm=algorithm,
            layers=None if len(numbers) == setting.config.num_layers else tuple(numbers),
            reason=f"KL {worst['kl_mean']:.2e}",
        )
        for (site, algorithm), numbers in layers.items()
    )
    return PolicyFile(made_for={**made_for_facts(setting), **worst}, rules=rules)


def made_for_facts(setting: Setting) -> dict[str, Any]:
    """The origin of a policy file; ``serve`` compares the sizes with its own model."""
    names = ("model", "num_layers", "hidden_size", "dtype", "weights", "text", "tokens")
    facts = {name: setting.facts[name] for name in names}
    sizes = setting.options.world_sizes
    return facts | ({"world_size": sizes[0]} if len(sizes) == 1 else {"world_sizes": list(sizes)})
