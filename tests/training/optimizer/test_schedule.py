"""The learning rate: up in a straight line, then what the schedule is called, down to its share."""

import pytest

from tightwire.training.config.tree import ScheduleConfig
from tightwire.training.optimizer.schedule import learning_rate


def _rates(**values: object) -> list[float]:
    schedule = ScheduleConfig.model_validate(values)
    return [learning_rate(schedule, 2.0, step) for step in range(schedule.steps)]


def test_warm_up_rises_to_the_height() -> None:
    assert _rates(steps=5, warmup_steps=4, kind="constant") == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_linear_ends_at_its_share() -> None:
    assert _rates(steps=5, kind="linear", final_share=0.5) == pytest.approx([2.0, 1.75, 1.5, 1.25, 1.0])


def test_cosine_is_half_way_in_the_middle() -> None:
    rates = _rates(steps=7, warmup_steps=2, kind="cosine", final_share=0.0)
    assert rates[2:] == pytest.approx([2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5, 0.0])


def test_a_run_of_warm_up_alone_reaches_the_height() -> None:
    assert _rates(steps=2, warmup_steps=2) == [1.0, 2.0]
