"""From bodies to sequences: seeds, defaults that depend on the model, tokenizing off the event loop."""

import json
import threading
from dataclasses import replace
from typing import Any

import pytest
from helpers.server.fake_engine import INFO, byte_tokenizer, planned
from tokenizers import Tokenizer as Backend

from tightwire.model.stages import StagePlan
from tightwire.model.text.tokenizer import Tokenizer, byte_backend
from tightwire.server.api.errors import ApiError
from tightwire.server.api.generation import Prompt
from tightwire.server.api.prompts import check_options, make_sequences, run_off_loop
from tightwire.server.api.request_bodies import CompletionBody
from tightwire.server.api.serving import ModelHolder, ModelInfo, ServedModel
from tightwire.server.http.check_body import check_fields


def _model(info: ModelInfo = INFO) -> ServedModel:
    holder = ModelHolder()
    holder.fill(info=info, tokenizer=byte_tokenizer())
    assert holder.model is not None
    return holder.model


def _body(**fields: Any) -> CompletionBody:
    return check_fields({"prompt": "a", **fields}, CompletionBody)


def _seeds(body: CompletionBody, info: ModelInfo = INFO) -> list[int]:
    check_options(body, info, 9)
    sequences = make_sequences(body, _model(info), [Prompt([1])])
    return [sequence.params.seed for sequence in sequences]


async def test_long_texts_are_tokenized_in_a_thread() -> None:
    assert await run_off_loop(threading.get_ident, 100_000) != threading.get_ident()
    assert await run_off_loop(threading.get_ident, 10) == threading.get_ident()


def test_seeds() -> None:
    assert _seeds(_body(n=3, seed=5)) == [5, 6, 7]
    largest = 2**63 - 1
    assert _seeds(_body(n=2, seed=largest)) == [largest, -(2**63)]
    fresh = [_seeds(_body())[0] for _ in range(3)]
    assert len(set(fresh)) == 3
    info = replace(INFO, default_seed=9)
    assert _seeds(_body(n=2), info) == [9, 10]


def test_default_max_tokens_shrinks_to_what_fits() -> None:
    body, model = _body(), _model()
    for length, expected in ((10, 16), (250, 6), (255, 1)):
        [sequence] = make_sequences(body, model, [Prompt([1] * length)])
        assert sequence.params.max_tokens == expected


def test_an_unknown_allreduce_is_400() -> None:
    two, alone = planned(policies=("auto", "flash-int8")), planned(replace(INFO, tp=1), policies=("auto",))
    for info, wrong, message in (
        (two, "ring", "this server has auto, flash-int8: start it with --allreduce-extra to add others"),
        (alone, "flash-int8", "this server has auto: it has one rank, which sums nothing"),
    ):
        assert len(_seeds(_body(tightwire={"allreduce": "auto"}), info)) == 1
        with pytest.raises(ApiError, match=message) as raised:
            _seeds(_body(tightwire={"allreduce": wrong}), info)
        assert (raised.value.status, raised.value.param) == (400, "tightwire.allreduce")


def test_a_prompt_of_a_hybrid_server_may_be_computed_by_all_ranks() -> None:
    info = planned(policies=("auto", "ring"), stages=StagePlan(((0, 1), (1, 2))))
    for asked, policy in (
        ({}, None),
        ({"prefill": "stages"}, None),
        ({"prefill": "tensor"}, "auto/tensor"),
        ({"prefill": "tensor", "allreduce": "ring"}, "ring/tensor"),
    ):
        body = _body(tightwire=asked)
        assert len(_seeds(body, info)) == 1 and info.policy(body.tightwire) == policy
    for stages, how in ((None, "is computed by all ranks"), (StagePlan(((0, 1), (1, 2)), True), "passes stages here")):
        with pytest.raises(ApiError, match=f"{how}.*start the server with --layout hybrid") as raised:
            _seeds(_body(tightwire={"prefill": "tensor"}), planned(info, stages=stages))
        assert (raised.value.status, raised.value.param) == (400, "tightwire.prefill")


def test_options_behind_the_policy_are_in_every_fingerprint() -> None:
    info = planned(policies=("flash-int8", "two-shot"), allreduce="flash-int8+decode=ring")
    assert (
        info.fingerprint()
        == info.fingerprint("flash-int8")
        == "tightwire-tp2-flash-int8+decode=ring-bfloat16-bfloat16-sums"
    )
    assert info.fingerprint("two-shot") == "tightwire-tp2-two-shot+decode=ring-bfloat16-bfloat16-sums"
    packed = replace(info, weights="Q4_1+Q8_0")
    assert packed.fingerprint("two-shot") == "tightwire-tp2-two-shot+decode=ring-bfloat16-bfloat16-sums-Q4_1+Q8_0"
    uneven = replace(info, tp_split=(1.0, 2.5))
    assert uneven.fingerprint("ring") == "tightwire-tp2-split1:2.5-ring+decode=ring-bfloat16-bfloat16-sums"
    coded = planned(packed, kv_dtype="int8")
    assert coded.fingerprint() == "tightwire-tp2-flash-int8+decode=ring-bfloat16-int8-cache-bfloat16-sums-Q4_1+Q8_0"
    rounded = planned(replace(packed, kernels="v3"), activations="int8")
    assert (
        rounded.fingerprint()
        == "tightwire-tp2-flash-int8+decode=ring-bfloat16-bfloat16-sums-Q4_1+Q8_0-int8-activations-v3"
    )


def test_a_token_outside_the_vocabulary_is_400() -> None:
    info = replace(INFO, vocab_size=200)
    with pytest.raises(ApiError, match="prompt has the token id 200; the vocabulary of 'tiny' is 0 to 199") as raised:
        make_sequences(_body(), _model(info), [Prompt([1, 200])])
    assert raised.value.status == 400


def test_a_bad_word_is_banned_in_every_spelling() -> None:
    """With and without a space before it, and from any tokens that have its bytes."""
    backend = byte_backend(304)
    state = json.loads(backend.to_str())
    state["model"]["vocab"] |= {"\u0120a": 304, "ab": 305}
    state["model"]["merges"] = [["\u0120", "a"], ["a", "b"]]
    tokenizer = Tokenizer(
        Backend.from_str(json.dumps(state)),
        chat_template=None,
        special_tokens={},
        bos_token_id=None,
        eos_token_ids=(),
    )
    holder = ModelHolder()
    holder.fill(info=replace(INFO, vocab_size=306), tokenizer=tokenizer)
    assert holder.model is not None
    [sequence] = make_sequences(_body(bad_words=["a", " ab"]), holder.model, [Prompt([1])])
    short, long = sequence.params.bad_words
    assert set(short.whole) == {97, 304} and set(long.whole) == {305}
    for before in ([97], [304], [32, 97], [7, 97]):
        assert long.ends_after(before) == [98]
    assert long.ends_after([32]) == [305] and long.ends_after([7]) == [] and long.ends_after([97, 7]) == []

    holder.fill(info=replace(INFO, vocab_size=305), tokenizer=tokenizer)
    [sequence] = make_sequences(_body(bad_words=["ab"]), holder.model, [Prompt([1])])
    assert sequence.params.bad_words[0].whole == []  # the model has no such token


@pytest.mark.parametrize("form", [{"regex": "[ab]+"}, {"choice": ["a", "b"]}])
def test_allowed_tokens_beside_a_form_have_a_token_that_ends_it(form: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    body = _body(structured_outputs=form, allowed_token_ids=[97, 98])
    with pytest.raises(ApiError, match=r"needs an end token beside a form: one of \(259,\)") as caught:
        make_sequences(body, _model(), [Prompt([1])])
    assert caught.value.param == "allowed_token_ids"
    body = _body(structured_outputs=form, allowed_token_ids=[97, 98, 259])
    assert len(make_sequences(body, _model(), [Prompt([1])])) == 1


def test_many_characters_of_bad_words_are_refused() -> None:
    with pytest.raises(ApiError, match="bad_words has 16640 characters; at most 16384 are possible"):
        make_sequences(_body(bad_words=["a" * 256] * 65), _model(INFO), [Prompt([1])])
