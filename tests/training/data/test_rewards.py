"""The rewards of the examples: what they give for which answer."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tightwire.training.data.rewards import json_facts

_FACTS = {"name": "Ida", "age": 7}


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ('{"name": "Ida", "age": 7}', 1.0),
        (' {"name": "Ida", "age": 8}\n', 0.75),
        ('{"name": "Ida"}', 0.75),
        ('{"name": "Ida", "age": 7, "a": 1, "b": 2}', 0.75),
        ("{}", 0.5),
        ('{"name": "Ida", "age": 7} is it', 0.2),
        ("{", 0.2),
        ("[1, 2]", 0.0),
        ("Ida is 7", 0.0),
        ("", 0.0),
    ],
)
def test_an_object_with_the_right_facts_is_rewarded(answer: str, reward: float) -> None:
    assert json_facts([answer, answer], [_FACTS, {}])[0] == pytest.approx(reward)


def test_tasks_of_the_learning_example_reward_what_they_ask_for() -> None:
    path = Path(__file__).parents[3] / "examples" / "learning.py"
    spec = importlib.util.spec_from_file_location("learning", path)
    assert spec is not None and spec.loader is not None
    learning: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(learning)

    ten = " ".join("word" for _ in range(10))
    assert learning.ten_words([ten, f"{ten} {ten}", "one two", ""]) == pytest.approx([1.0, 0.0, 0.2, 0.0])
    answers = ["blue, green, red", "Blue green red.", "red green blue", "blue, green", "blue, green, red, red", ""]
    asked = [["red", "green", "blue"]] * len(answers)
    assert learning.reversed_words(answers, asked) == pytest.approx([1.0, 1.0, 1 / 3, 2 / 3, 0.75, 0.0])
