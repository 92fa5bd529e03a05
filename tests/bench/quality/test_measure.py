"""Which windows greedy texts begin with."""

from tightwire.bench.quality.measure import spread


def test_prompts_are_different_windows_of_the_whole_text() -> None:
    assert spread([3, 5, 6, 9], 16) == [3, 5, 6, 9]
    assert spread(range(100), 4) == [0, 25, 50, 75]
