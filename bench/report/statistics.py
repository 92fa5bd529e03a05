"""Statistics of raw samples: distributions, and the ratio of two sequences with its interval and verdict.

Medians are not moved by one slow call, and a bootstrap needs no assumption about the distribution. It sees only the noise
within its samples; two runs an hour apart also differ by the machine's drift, so arms are interleaved in rounds (``paired``).
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

TOO_FEW = "too few rounds"
Verdict = Literal["faster", "slower", "no difference", "too few rounds"]

FLOOR = 0.01  # a ratio within 1 +- this is no difference, however certain
MIN_SAMPLES = 3
_WIDE = 4.0  # from low to high, an interval that tells nothing
_MOST_BATCHES = 20  # of one run
_FAMILY = 12  # number of cells whose verdicts are read together
# Student's t of 1 - 0.025 and of 1 - 0.025 / _FAMILY by degrees of freedom: up to 7 samples have too few orders for a
# bootstrap. Its interval of three pairs leaves out the truth in 26 of 100 cases, of four in 11; five lean to one side by
# chance in 1 of 16 cases, eight in 1 of 128.
_T = {2: (4.303, 15.44), 3: (3.182, 7.94), 4: (2.776, 5.89), 5: (2.571, 4.98), 6: (2.447, 4.49)}
_MOST_RESAMPLES, _LEAST_RESAMPLES = 10_000, 2_000
_DRAWS = 4_000_000  # numbers that one bootstrap may draw, as long as enough resamples are left


def neighbour_batch(num_samples: int) -> int:
    """The number of consecutive samples that count as one: neighbours in time share the state of the machine."""
    return max(1, num_samples // _MOST_BATCHES)


def describe(values: Sequence[float]) -> dict[str, float]:
    """The distribution of ``values``: number, mean, standard deviation, percentiles; empty without values."""
    if not values:
        return {}
    std = statistics.stdev(values) if len(values) > 1 else 0.0
    points = {"min": 0, "p50": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100}
    percentiles = dict(zip(points, np.percentile(values, [*points.values()]).tolist(), strict=True))
    return {"n": len(values), "mean": statistics.fmean(values), "std": std, **percentiles}


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """``ratio`` is other / baseline of medians, ``low`` to ``high`` its bootstrap 95 % interval. A sample is a round."""

    ratio: float
    low: float
    high: float
    verdict: Verdict
    n: int  # samples of the shorter side


def compare(
    baseline: Sequence[float], other: Sequence[float], *, paired: bool, seed: int = 0, worse_is_higher: bool = True
) -> Comparison:
    """The ratio of medians, its interval, and a verdict.

    The verdict is ``faster`` or ``slower`` when the whole 95 % interval lies outside 1 +- ``FLOOR`` and the wider interval
    for a dozen cells (Bonferroni: 99.6 %) excludes 1: with 95 % alone every other A/A table of a dozen cells would contain a
    false verdict. It is ``too few rounds`` where only the wider interval contains 1, below ``MIN_SAMPLES``, and for an interval
    wider than a factor of four. Below 8 samples the wider interval is Student's on logarithms, the printed one at least that.

    Args:
        baseline, other: positive, in one unit: seconds, or a rate with ``worse_is_higher=False``. Samples must be
            independent: requests of one batch are not, so give one value for each batch.
        paired: element i of both comes from the same round; they are resampled together, which cancels what both share.
    Raises:
        ValueError: no samples, numbers that are not finite or not above 0, pairs without a partner.
    Source: percentile bootstrap, Efron 1979; not BCa, whose jackknife does not hold for medians. 40 ms for 200 samples.
    """
    base, them = _checked(baseline, "baseline"), _checked(other, "other")
    if paired and len(base) != len(them):
        raise ValueError(f"pairs need a partner each, got {len(base)} and {len(them)} values")
    ratios = _resampled_ratios(base, them, paired=paired, seed=seed)
    low, high, outer_low, outer_high = np.quantile(
        ratios, [0.025, 0.975, 0.025 / _FAMILY, 1 - 0.025 / _FAMILY]
    ).tolist()
    n = min(len(base), len(them))
    if n - 1 in _T:
        middle, error = _log_ratio(np.log(base), np.log(them), paired=paired)
        t, outer_t = _T[n - 1]
        low, high = min(low, math.exp(middle - t * error)), max(high, math.exp(middle + t * error))
        outer_low, outer_high = math.exp(middle - outer_t * error), math.exp(middle + outer_t * error)
    above, below = low > 1 + FLOOR, high < 1 - FLOOR
    verdict: Verdict = "no difference"
    if n < MIN_SAMPLES or high > _WIDE * low or ((above or below) and outer_low <= 1 <= outer_high):
        verdict = TOO_FEW
    elif above or below:
        verdict = "slower" if above == worse_is_higher else "faster"
    ratio = float(np.median(them) / np.median(base))
    return Comparison(ratio=ratio, low=low, high=high, verdict=verdict, n=n)


def _checked(values: Sequence[float], name: str) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if not array.size:
        raise ValueError(f"{name} has no values to compare")
    if not (np.isfinite(array).all() and (array > 0).all()):
        raise ValueError(f"ratios need finite values above 0, but {name} has {array.min():g} to {array.max():g}")
    return array


def _resampled_ratios(
    base: NDArray[np.float64], them: NDArray[np.float64], *, paired: bool, seed: int
) -> NDArray[np.float64]:
    draw = np.random.default_rng(seed)
    longest = max(len(base), len(them))
    count = min(_MOST_RESAMPLES, max(_LEAST_RESAMPLES, _DRAWS // longest))
    per_turn = max(1, _DRAWS // 4 // longest)
    ratios: list[NDArray[np.float64]] = []
    for first in range(0, count, per_turn):
        turns = min(per_turn, count - first)
        of_base = draw.integers(len(base), size=(turns, len(base)))
        of_them = of_base if paired else draw.integers(len(them), size=(turns, len(them)))
        ratios.append(np.median(them[of_them], axis=1) / np.median(base[of_base], axis=1))
    return np.concatenate(ratios)


def _log_ratio(base: NDArray[np.float64], them: NDArray[np.float64], *, paired: bool) -> tuple[float, float]:
    """The logarithm of the ratio of geometric means and its standard error; Welch's where they are no pairs."""
    if paired:
        error = float(np.std(them - base, ddof=1)) / math.sqrt(len(base))
    else:
        error = math.sqrt(np.var(base, ddof=1) / len(base) + np.var(them, ddof=1) / len(them))
    return float(np.mean(them) - np.mean(base)), error
