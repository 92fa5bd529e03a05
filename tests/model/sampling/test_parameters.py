"""Every sampling parameter declares what it needs, so no shortcut ignores it."""

from typing import Annotated, Any

import msgspec
import pytest
from tiny import banned_ids

from tightwire.model.sampling.draw import candidates_needed
from tightwire.model.sampling.parameters import Needs, SamplingParams, declared_needs

# One value for each field that differs from its default.
SET: dict[str, Any] = {
    "max_tokens": 7,
    "temperature": 0.0,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "seed": 5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {3: 1.0},
    "logprobs": 0,
    "prompt_logprobs": 0,
    "stop_token_ids": (1,),
    "min_tokens": 1,
    "ignore_eos": True,
    "allowed_token_ids": (),
    "bad_words": banned_ids((3, 4)),
    "grammar": "start: /a/",
}


def test_every_parameter_is_classified() -> None:
    """A new field fails here until it declares what it needs; add it to ``SET`` too."""
    needs = declared_needs(SamplingParams)
    assert [name for name, need in needs.items() if need is None] == []
    assert SET.keys() == needs.keys()


@pytest.mark.parametrize("name", SET)
def test_a_parameter_gets_what_it_declares(name: str) -> None:
    need = declared_needs(SamplingParams)[name]
    params = SamplingParams(**({"max_tokens": 1, "temperature": 0.0} | {name: SET[name]}))

    assert params.needs_all_logits == (need is not Needs.BEST_LOGITS)
    assert params.needs_tokens == (need is Needs.TOKENS)
    assert (candidates_needed(params) > 0) == (need is Needs.BEST_LOGITS)


def test_a_field_without_a_declaration_is_found() -> None:
    class More(msgspec.Struct):
        known: Annotated[int, Needs.ALL_LOGITS] = 0
        unknown: int = 0

    assert declared_needs(More) == {"known": Needs.ALL_LOGITS, "unknown": None}
