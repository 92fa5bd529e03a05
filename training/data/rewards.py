"""Rewards of the examples. A reward is a function of prompts, answers and the other keys of the data's lines."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def json_facts(completions: Sequence[str], facts: Sequence[Mapping[str, Any]], **_: Any) -> list[float]:
    """0.2 for an answer that begins as an object, 0.3 for one that is JSON alone, and up to 0.5 for its right facts."""
    return [_score(text.strip(), own) for text, own in zip(completions, facts, strict=True)]


def _score(text: str, facts: Mapping[str, Any]) -> float:
    begun = 0.2 if text.startswith("{") else 0.0
    try:
        found = json.loads(text)
    except ValueError:
        return begun
    if not isinstance(found, dict):
        return begun
    right = sum(found.get(key) == value for key, value in facts.items())
    return begun + 0.3 + 0.5 * right / max(len(facts), len(found), 1)
