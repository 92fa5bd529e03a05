"""A parameter that depends on earlier tokens keeps the next step from being planned ahead."""

from typing import Any

import pytest
from tiny import banned_ids

from tightwire.model.sampling.parameters import SamplingParams

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
NEED_TOKENS = {"presence_penalty", "frequency_penalty", "repetition_penalty", "bad_words", "grammar"}


def test_every_parameter_is_here() -> None:
    """A new field fails here: add it to ``SET``, and to ``NEED_TOKENS`` if its effect depends on earlier tokens."""
    assert tuple(SET) == SamplingParams.__struct_fields__


@pytest.mark.parametrize("name", SET)
def test_what_depends_on_earlier_tokens_needs_them(name: str) -> None:
    params = SamplingParams(**({"max_tokens": 1, "temperature": 0.0} | {name: SET[name]}))
    assert params.needs_tokens == (name in NEED_TOKENS)
    assert params.has_mask == (name in {"allowed_token_ids", "bad_words", "grammar"})
