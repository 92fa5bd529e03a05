import numpy as np
import pytest

from tightwire.bench.report.statistics import Comparison, compare, describe


def noisy(seed: int, count: int, sigma: float = 0.1) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(0.0, sigma, count)


def pairs(a: np.ndarray, b: np.ndarray, *, paired: bool, rate: bool = False) -> Comparison:
    return compare(a.tolist(), b.tolist(), paired=paired, worse_is_higher=not rate)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_a_distribution_agrees_with_numpy(count: int) -> None:
    values = np.random.default_rng(count).exponential(size=count)

    got = describe(values.tolist())

    assert got["n"] == count
    assert (got["min"], got["max"]) == (values.min(), values.max())
    want = np.percentile(values, [50, 90, 95, 99])
    np.testing.assert_allclose([got[name] for name in ("p50", "p90", "p95", "p99")], want, rtol=1e-12)
    spread = values.std(ddof=1) if count > 1 else 0
    np.testing.assert_allclose([got["mean"], got["std"]], [values.mean(), spread], rtol=1e-12)


def test_no_values_have_no_distribution() -> None:
    assert describe([]) == {}


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("count", [3, 5, 8, 20])
def test_equal_distributions_show_no_difference(count: int, paired: bool) -> None:
    verdicts = []
    for seed in range(24):
        drift = noisy(seed + 1000, count, 0.2) if paired else 1.0
        verdicts.append(pairs(noisy(seed, count) * drift, noisy(seed + 500, count) * drift, paired=paired).verdict)

    # Two tables of a dozen; of these, seeds being fixed, at most one word may be false.
    assert verdicts.count("no difference") >= 23


@pytest.mark.parametrize("count", [5, 8, 20])
def test_a_third_more_is_found_despite_noise(count: int) -> None:
    got = pairs(noisy(1, count, 0.05), 1.33 * noisy(2, count, 0.05), paired=False)

    assert got.verdict == "slower"
    assert 1.01 < got.low < got.ratio < got.high
    assert got.n == count
    assert pairs(1.33 * noisy(2, count, 0.05), noisy(1, count, 0.05), paired=False).verdict == "faster"


def test_a_higher_rate_is_faster() -> None:
    assert pairs(noisy(1, 20), 2 * noisy(2, 20), paired=False, rate=True).verdict == "faster"
    assert pairs(2 * noisy(1, 20), noisy(2, 20), paired=False, rate=True).verdict == "slower"


def test_pairs_cancel_what_both_have_in_common() -> None:
    drift = noisy(3, 12, 0.5)
    a, b = drift * noisy(1, 12, 0.01), 1.1 * drift * noisy(2, 12, 0.01)

    together, apart = pairs(a, b, paired=True), pairs(a, b, paired=False)

    assert (together.verdict, apart.verdict) == ("slower", "no difference")
    assert together.high - together.low < (apart.high - apart.low) / 2


def test_less_than_the_floor_is_no_difference() -> None:
    assert pairs(noisy(1, 200, 1e-4), 1.005 * noisy(2, 200, 1e-4), paired=False).verdict == "no difference"
    assert pairs(noisy(1, 200, 1e-4), 1.02 * noisy(2, 200, 1e-4), paired=False).verdict == "slower"


def test_the_interval_covers_the_truth_at_its_stated_rate() -> None:
    inside = 0
    for seed in range(60):
        got = pairs(noisy(seed, 15, 0.2), 1.2 * noisy(seed + 500, 15, 0.2), paired=False)
        inside += got.low <= 1.2 <= got.high

    assert inside / 60 > 0.95 - 3 * (0.05 * 0.95 / 60) ** 0.5


def test_two_samples_are_too_few() -> None:
    assert compare([1.0, 1.0], [9.0, 9.0], paired=False).verdict == "too few rounds"


def test_an_interval_that_excludes_1_is_never_called_no_difference() -> None:
    for count in (4, 6, 12):
        for seed in range(30):
            got = pairs(np.ones(count), 0.87 * noisy(seed, count, 0.1), paired=True)
            if got.high < 0.99:
                assert got.verdict in ("faster", "too few rounds"), got
    assert compare([1.0] * 3, [0.4, 1.0, 3.0], paired=True).verdict == "too few rounds", "an interval of 0.1 to 10"
    certain = pairs(np.ones(6), 0.87 * noisy(0, 6, 0.01), paired=True)
    unsure = compare([1.0] * 6, [0.78, 0.95, 0.86, 1.0, 0.80, 0.84], paired=True)
    assert (certain.verdict, unsure.verdict) == ("faster", "too few rounds") and unsure.high < 0.99


def test_a_seed_repeats_the_interval() -> None:
    a, b = noisy(1, 40).tolist(), noisy(2, 40).tolist()

    assert compare(a, b, paired=False, seed=1) == compare(a, b, paired=False, seed=1)
    assert compare(a, b, paired=False, seed=1) != compare(a, b, paired=False, seed=2)


@pytest.mark.parametrize(
    ("a", "b", "paired", "says"),
    [
        ([], [1.0], False, "baseline has no values"),
        ([1.0], [], False, "other has no values"),
        ([0.0, 1.0], [1.0], False, "above 0, but baseline has 0 to 1"),
        ([1.0], [float("nan")], False, "finite"),
        ([1.0, 2.0], [1.0], True, "pairs need a partner each, got 2 and 1"),
    ],
)
def test_values_without_a_ratio_are_refused(a: list[float], b: list[float], paired: bool, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        compare(a, b, paired=paired)


@pytest.mark.parametrize(("count", "paired"), [(3, True), (4, True), (3, False)])
def test_few_samples_have_a_wide_interval(count: int, paired: bool) -> None:
    inside = 0
    for seed in range(60):
        got = pairs(noisy(seed, count, 0.1), noisy(seed + 500, count, 0.1), paired=paired)
        inside += got.low <= 1.0 <= got.high
        assert got.low <= got.ratio <= got.high

    assert inside / 60 > 0.95 - 3 * (0.05 * 0.95 / 60) ** 0.5
