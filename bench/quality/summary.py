"""Turns measurements into rows: plain data for JSON, one row for each arm at each world size."""

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

import numpy as np

from tightwire.bench.quality.arms import EXACT, LOSSY_SITES, Arm, bytes_per_token, exact_arm
from tightwire.bench.quality.measure import Floats, Measured
from tightwire.bench.quality.noise import Power, sqnr_db
from tightwire.bench.quality.ranks import NEW_TOKENS
from tightwire.bench.quality.setting import Setting

LEGS = ("total", "reduce", "gather")


def exact_row(measured: Measured) -> dict[str, Any]:
    """The row of the exact model at this world size."""
    nll_T = measured.joined(EXACT, lambda scores: scores.nll_T)
    return {"world_size": measured.world_size, "tokens": len(nll_T), "perplexity": float(np.exp(nll_T.mean()))}


def make_rows(measured: Measured, arms: Sequence[Arm], setting: Setting) -> list[dict[str, Any]]:
    """Rows in the arms' order. Values not yet measured are None; no rows before the first batch of windows."""
    if not measured.scores:
        return []
    config, window, elem_bytes = setting.config, setting.options.window, setting.dtype.itemsize
    exact_bytes = bytes_per_token(exact_arm(), config, measured.world_size, window, elem_bytes)
    exact_nll_T = measured.joined(EXACT, lambda scores: scores.nll_T)
    rows = []
    for arm in arms:
        sent = bytes_per_token(arm, config, measured.world_size, window, elem_bytes)
        row = {
            "world_size": measured.world_size,
            "algorithm": arm.name,
            "bytes_per_token": sent,
            "bytes_share": sent / exact_bytes,
            **_distances(measured, arm.name, exact_nll_T, setting.windows.num_scored),
            "greedy": _greedy(measured.same_tokens.get(arm.name)),
            "sqnr_db": _sqnr(measured, arm, config.num_layers),
        }
        rows.append(row)
    return rows


def window_samples(measured: Measured, name: str, window_rows: int) -> dict[str, list[float]]:
    """Window means as raw samples; samples of every token would be a hundred times larger."""
    return {
        what: window_means(measured, name, field, window_rows)
        for what, field in (("nll", "nll_T"), ("kl", "kl_T"), ("same_top", "same_top_T"))
    }


def window_means(measured: Measured, name: str, field: str, window_rows: int) -> list[float]:
    """Mean of one field of ``Scores`` over each window of ``window_rows`` scored rows."""
    values_T = measured.joined(name, lambda scores: getattr(scores, field))
    return values_T.reshape(-1, window_rows).mean(1).tolist()


def _distances(measured: Measured, name: str, exact_nll_T: Floats, window_rows: int) -> dict[str, Any]:
    def of(what: str) -> Floats:
        return measured.joined(name, lambda scores: getattr(scores, what))

    nll_T, kl_T = of("nll_T"), of("kl_T")
    means, exact_means = (np.array(window_means(measured, arm, "nll_T", window_rows)) for arm in (name, EXACT))
    low, high = _interval(means - exact_means)
    return {
        "tokens": len(nll_T),
        "perplexity": float(np.exp(nll_T.mean())),
        "perplexity_delta": math.expm1(float((nll_T - exact_nll_T).mean())),
        "perplexity_delta_low": None if low is None else math.expm1(low),
        "perplexity_delta_high": None if high is None else math.expm1(high),
        "kl_mean": float(kl_T.mean()),
        "kl_p50": float(np.quantile(kl_T, 0.5)),
        "kl_p99": float(np.quantile(kl_T, 0.99)),
        "kl_max": float(kl_T.max()),
        "top1_agreement": float(of("same_top_T").mean()),
    }


def _interval(differences_N: Floats) -> tuple[float | None, float | None]:
    """Normal 95 % interval of the mean over windows; (None, None) for fewer than two windows."""
    if len(differences_N) < 2:
        return None, None
    mean, reach = float(differences_N.mean()), 1.96 * float(differences_N.std(ddof=1)) / math.sqrt(len(differences_N))
    return mean - reach, mean + reach


def _greedy(same_tokens: Sequence[int] | None) -> dict[str, Any] | None:
    if same_tokens is None:
        return None
    return {
        "prompts": len(same_tokens),
        "tokens": NEW_TOKENS,
        "median_same_tokens": float(median(same_tokens)),
        "never_differs": sum(same == NEW_TOKENS for same in same_tokens) / len(same_tokens),
        "same_tokens": list(same_tokens),
    }


def _sqnr(measured: Measured, arm: Arm, num_layers: int) -> dict[str, Any]:
    """Signal-to-noise by site and leg, over all layers and for each layer; None without noise."""
    result: dict[str, Any] = {}
    for site in LOSSY_SITES:
        powers = [measured.noise[arm.algorithm(site, layer), site, layer] for layer in range(num_layers)]
        result[site] = {leg: _finite(_over_layers(powers, leg)) for leg in LEGS}
        result[site]["layers"] = {
            leg: [_finite(sqnr_db(power.signal, getattr(power, leg))) for power in powers] for leg in LEGS
        }
    return result


def _over_layers(powers: Sequence[Power], leg: str) -> float:
    """Average noise-to-signal ratios, so that a layer with large values does not hide the others."""
    ratios = [getattr(power, leg) / power.signal for power in powers if power.signal > 0]
    return sqnr_db(1.0, fmean(ratios)) if ratios else math.inf


def _finite(db: float) -> float | None:
    """None for infinity, which JSON does not have."""
    return db if math.isfinite(db) else None
