import pytest

from tightwire.bench.comm.crossover import measured_crossover


def test_the_crossover_lies_between_two_links() -> None:
    # Saved time is linear in 1 / rate: -1 at 1 / 10, 1 at 1 / 5, so 0 at 0.15.
    assert measured_crossover([(10.0, -1.0), (5.0, 1.0)]) == (pytest.approx(1 / 0.15), False)


def test_a_crossover_outside_the_links_is_extrapolated() -> None:
    rate, extrapolated = measured_crossover([(10.0, 1.0), (5.0, 2.0)])
    assert rate is None and extrapolated  # the line is zero at 1 / rate = 0
    rate, extrapolated = measured_crossover([(10.0, 0.5), (5.0, 2.5)])
    assert (rate, extrapolated) == (pytest.approx(1 / 0.075), True)


@pytest.mark.parametrize("points", [[(10.0, 1.0)], [(10.0, 2.0), (5.0, 1.0)]])
def test_no_crossover_is_none(points: list[tuple[float, float]]) -> None:
    assert measured_crossover(points) == (None, True)
