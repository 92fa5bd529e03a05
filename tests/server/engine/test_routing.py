import pytest

from tightwire.server.engine.routing import choose_replica


@pytest.mark.parametrize(
    ("loads", "num_cached", "chosen"),
    [
        ([0, 0], [0, 0], 0),
        ([5, 3], [0, 0], 1),
        ([3, 3, 2], [0, 0, 0], 2),
        ([0, 0], [0, 16], 1),  # nothing to do anywhere: where the prompt is
        ([8, 6], [32, 0], 0),  # as near as may be
        ([9, 6], [32, 0], 1),
        ([1, 0], [512, 0], 1),  # whoever is idle begins, and has the prompt too from then on
        ([8, 7, 7], [16, 16, 0], 1),  # as much of it cached: where there is less to do
        ([100, 90, 300], [0, 16, 4096], 1),
    ],
)
def test_the_least_loaded_or_of_those_near_it_the_one_with_the_prompt(
    loads: list[int], num_cached: list[int], chosen: int
) -> None:
    assert choose_replica(loads, num_cached) == chosen
