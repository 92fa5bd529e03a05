"""Finds the mix of codecs by layer and site with the least predicted KL for a number of bytes, and makes policy files.

KL grows with the square of a small disturbance. Assuming that disturbances of different places are independent, the KL
of a mix is the sum over places of sensitivity times noise power. A place's sensitivity comes from a pass that quantizes
only that place; one pass measures the noise power of all codecs at all places. Codecs with error feedback correct each
other's errors, which no prediction knows. With ``--search kl=X`` the mix has the fewest bytes within it, and may drop sums
after attention, whose KL is measured layer by layer.

Cost: about 2 x layers + 2 forward passes over the calibration windows, then 3 x layers + 2.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any

from tightwire.bench.quality.measure import Powers, measure_noise, score
from tightwire.bench.quality.ranks import ThreadRanks
from tightwire.bench.quality.setting import (
    LOSSLESS,
    Arm,
    Place,
    Setting,
    bytes_at,
    bytes_per_token,
    exact_arm,
    make_arm,
    one_algorithm_arm,
    places,
)
from tightwire.comm.all_reduce.names import main_preset_names
from tightwire.comm.policy.rules import DROP, FileRule, PolicyFile

CANDIDATES = (*main_preset_names(), LOSSLESS)
_PROBE = "flash-int4"  # a candidate, coarse enough to stand out from the rounding of bfloat16


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """One candidate at one place: bytes a rank sends per token, and the predicted KL."""

    algorithm: str
    num_bytes: float
    kl: float


def find_mix(
    setting: Setting, ranks: ThreadRanks, pool: ThreadPoolExecutor, show: Callable[[str], None]
) -> tuple[PolicyFile, dict[str, Any]]:
    """The best mix on the calibration windows as a policy file, and facts. ValueError: every mix exceeds the bytes."""
    options, config, elem_bytes = setting.options, setting.config, setting.dtype.itemsize
    assert options.search is not None
    show("search: noise of each layer")
    numbers = setting.windows.calibration[: options.batch]
    noise = measure_noise(ranks, setting, numbers, [make_arm(name, config) for name in CANDIDATES])
    sensitivities = _sensitivities(setting, ranks, pool, noise, show)
    budget = options.search_kl
    drop_arms = {
        ("o_proj", layer): one_algorithm_arm(f"no sum, o_proj of layer {layer}", DROP, (layer,), "o_proj")
        for layer in range(0 if budget is None else config.num_layers)
    }
    dropped = _mean_kl(setting, ranks, pool, drop_arms, show)
    sent = {
        name: bytes_at(name, config.hidden_size, ranks.world_size, options.window, elem_bytes) for name in CANDIDATES
    }
    offers = {
        place: [
            Offer(algorithm=name, num_bytes=sent[name], kl=sensitivity * noise[name, *place].noise)
            for name in CANDIDATES
        ]
        for place, sensitivity in sensitivities.items()
    }
    for place, kl in dropped.items():
        offers[place].append(Offer(algorithm=DROP, num_bytes=0.0, kl=kl))
    if budget is None:
        most = bytes_per_token(make_arm(options.search, config), config, ranks.world_size, options.window, elem_bytes)
        mix = choose(offers, most)
    else:
        mix = choose_within(offers, budget)
    predicted_kl = sum(offer.kl for offer in mix.values())
    facts = {
        "bytes_of": options.search,
        "dropped": sum(offer.algorithm == DROP for offer in mix.values()),
        "kl_of_dropped": {f"{site} {layer}": kl for (site, layer), kl in dropped.items()},
        "world_size": ranks.world_size,
        "tokens": len(setting.windows.next_ids(setting.windows.calibration)),
        "predicted_kl": predicted_kl,
        "bytes_per_token": sum(offer.num_bytes for offer in mix.values()),
        "chosen": {f"{site} {layer}": offer.algorithm for (site, layer), offer in mix.items()},
    }
    origin = {"found_with_ranks": ranks.world_size, "bytes_of": options.search, "predicted_kl": predicted_kl}
    return make_policy_file(setting, {place: offer.algorithm for place, offer in mix.items()}, "mix", origin), facts


def num_search_steps(setting: Setting) -> int:
    """The number of calls of ``show`` in ``find_mix``."""
    num_arms = len(places(setting.config)) + (0 if setting.options.search_kl is None else setting.config.num_layers)
    return 1 + num_arms * sum(1 for _ in setting.batches(setting.windows.calibration))


def _sensitivities(
    setting: Setting, ranks: ThreadRanks, pool: ThreadPoolExecutor, noise: Powers, show: Callable[[str], None]
) -> dict[Place, float]:
    """KL per noise power of each place when only that place is quantized, over the calibration windows."""
    where = places(setting.config)
    arms = {(site, n): one_algorithm_arm(f"{site} of layer {n}", _PROBE, (n,), site) for site, n in where}
    kl = _mean_kl(setting, ranks, pool, arms, show)
    powers = {place: noise[_PROBE, *place].noise for place in where}
    return {place: kl[place] / powers[place] if powers[place] else 0.0 for place in where}


def _mean_kl(
    setting: Setting,
    ranks: ThreadRanks,
    pool: ThreadPoolExecutor,
    arms: Mapping[Place, Arm],
    show: Callable[[str], None],
) -> dict[Place, float]:
    """Mean KL of each arm over the calibration windows."""
    windows, totals, num_rows = setting.windows, dict.fromkeys(arms, 0.0), 0
    if not arms:
        return totals
    ranks.set_arms([exact_arm(), *arms.values()])
    for numbers in setting.batches(windows.calibration):
        token_ids_BL = windows.token_ids_NL[list(numbers)]
        exact_TD = windows.scored(ranks.prefill(token_ids_BL, 0))
        num_rows += len(exact_TD)
        for number, (place, arm) in enumerate(arms.items(), start=1):
            show(f"search: {arm.name}")
            states = {arm.name: windows.scored(ranks.prefill(token_ids_BL, number))}
            scores = score(pool, ranks.head_VD, exact_TD, states, windows.next_ids(numbers))
            totals[place] += float(scores[arm.name].kl_T.sum())
    return {place: total / num_rows for place, total in totals.items()}


def choose(offers: Mapping[Place, Sequence[Offer]], max_bytes: float) -> dict[Place, Offer]:
    """Choose the mix of at most ``max_bytes`` with about the least KL; ValueError if the cheapest mix sends more."""
    mix = {place: min(own, key=lambda offer: (offer.num_bytes, offer.kl)) for place, own in offers.items()}
    least = sum(offer.num_bytes for offer in mix.values())
    if least > max_bytes:
        raise ValueError(
            f"no mix sends {max_bytes:,.0f} bytes per token or less: the cheapest sends {least:,.0f}; name an AllReduce in "
            "--search that sends more"
        )
    return _improve(offers, mix, max_bytes - least, price=attrgetter("num_bytes"), loss=attrgetter("kl"))


def choose_within(offers: Mapping[Place, Sequence[Offer]], max_kl: float) -> dict[Place, Offer]:
    """Choose the mix with about the fewest bytes whose predicted KL is at most ``max_kl``."""
    mix = {place: min(own, key=lambda offer: (offer.kl, offer.num_bytes)) for place, own in offers.items()}
    spare = max_kl - sum(offer.kl for offer in mix.values())
    return _improve(offers, mix, spare, price=attrgetter("kl"), loss=attrgetter("num_bytes"))


def _improve(
    offers: Mapping[Place, Sequence[Offer]],
    mix: dict[Place, Offer],
    spare: float,
    *,
    price: Callable[[Offer], float],
    loss: Callable[[Offer], float],
) -> dict[Place, Offer]:
    """Repeat the change of one place that lowers the loss most for its price and costs at most what is left of ``spare``."""

    def gains() -> Iterator[tuple[float, Place, Offer]]:
        for place, own in offers.items():
            now = mix[place]
            for offer in own:
                more = price(offer) - price(now)
                if loss(offer) < loss(now) and more <= spare:
                    yield (loss(now) - loss(offer)) / max(more, 1e-12), place, offer

    while best := max(gains(), key=itemgetter(0), default=None):
        _, place, offer = best
        spare -= price(offer) - price(mix[place])
        mix[place] = offer
    return mix


def arm_policy_file(setting: Setting, arm: Arm, rows: Sequence[Mapping[str, Any]]) -> PolicyFile:
    """Make the policy file of ``arm``, with its worst figures over all world sizes."""
    own = [row for row in rows if row["algorithm"] == arm.name]
    worst = {key: max(row[key] for row in own) for key in ("kl_mean", "perplexity_delta", "bytes_per_token")}
    algorithms = {place: arm.algorithm(*place) for place in places(setting.config)}
    return make_policy_file(setting, algorithms, f"KL {worst['kl_mean']:.2e}", worst)


def make_policy_file(
    setting: Setting, algorithms: Mapping[Place, str], reason: str, origin: Mapping[str, Any]
) -> PolicyFile:
    """Make a policy file for prompt rows, and for all rows where a sum is dropped."""
    layers: dict[tuple[str, str], list[int]] = {}
    for (site, layer), algorithm in algorithms.items():
        layers.setdefault((site, algorithm), []).append(layer)
    rules = tuple(
        FileRule(
            site=site,  # pyright: ignore[reportArgumentType]
            phase=phase,
            algorithm=algorithm,
            layers=None if len(numbers) == setting.config.num_layers else tuple(sorted(numbers)),
            reason=reason,
        )
        for (site, algorithm), numbers in layers.items()
        for phase in (("prefill", "decode") if algorithm == DROP else ("prefill",))
    )
    facts, sizes = setting.facts(), setting.options.world_sizes
    names = ("model", "num_layers", "hidden_size", "dtype", "weights", "text", "tokens")
    sized = {"world_size": sizes[0]} if len(sizes) == 1 else {"world_sizes": list(sizes)}
    return PolicyFile(made_for={**{name: facts[name] for name in names}, **sized, **origin}, rules=rules)
