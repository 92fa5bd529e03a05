"""What a run comes to: the cheapest arm inside a budget, a mix by layer, and the policy file of either."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tightwire.bench.quality.arms import LOSSY_SITES, MIX, Arm, bytes_per_token, file_arm, make_arm
from tightwire.bench.quality.measure import Measured
from tightwire.bench.quality.ranks import PlayedRanks
from tightwire.bench.quality.search import CANDIDATES, Mix, Search, choose
from tightwire.bench.quality.setting import Setting
from tightwire.bench.quality.summary import window_means
from tightwire.bench.report.statistics import compare
from tightwire.comm.policy.policy_file import FileRule, PolicyFile

_AS_MANY = 1.1  # times the mix's bytes: arms that send more are no rivals


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundMix:
    """``file`` holds the mix, ``arm`` is measured like any other, ``facts`` are for the result."""

    file: PolicyFile
    arm: Arm
    facts: dict[str, Any]


def find_mix(setting: Setting, ranks: PlayedRanks, pool: ThreadPoolExecutor, told: Callable[[str], None]) -> FoundMix:
    """Search on the calibration windows with ``ranks``.

    Raises:
        ValueError: not even the cheapest mix is within the bytes.
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
    """The mix's KL over that of each arm that sends about as much, but no less, window by window, with a 95 % interval."""
    own = next((row for row in rows if row["algorithm"] == MIX), None)
    if own is None:
        return []
    mix_kl = window_means(measured, MIX, "kl_T", window_rows)
    found = []
    for row in rows:
        if row["algorithm"] == MIX or not 1 <= row["bytes_per_token"] / own["bytes_per_token"] <= _AS_MANY:
            continue
        other_kl = window_means(measured, row["algorithm"], "kl_T", window_rows)
        if min(*other_kl, *mix_kl) <= 0:  # one that is exact has nothing to be compared with
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
    """The policy file of the arm ``name``, with the worst that it came to at any world size."""
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
    """What a policy file says of where it comes from; ``serve`` compares the sizes with its own."""
    names = ("model", "num_layers", "hidden_size", "dtype", "weights", "text", "tokens")
    facts = {name: setting.facts[name] for name in names}
    sizes = setting.options.world_sizes
    return facts | ({"world_size": sizes[0]} if len(sizes) == 1 else {"world_sizes": list(sizes)})
