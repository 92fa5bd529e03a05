"""The embedded model against transformers on the same weights: tokens in float32, close company in bfloat16."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from helpers.model.transformers_reference import logits, reference_of
from helpers.server.local_engine import continue_prompts, local_engine, prompt_logits, run_to_end
from helpers.server.parity_prompts import SHORT, long_text

from tightwire.model.open import Checkpoint, open_checkpoint
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.server.ipc.messages import AddRequest

_NUM_TOKENS = 8
_NUM_BFLOAT16_TOKENS = 12
_LONG = 528  # tokens: two steps of at most 512

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def checkpoint(smollm2_path: Path) -> Checkpoint:
    return open_checkpoint(str(smollm2_path))


@pytest.fixture(scope="module")
def prompts(checkpoint: Checkpoint) -> list[list[int]]:
    tokenizer = checkpoint.tokenizer()
    encoded = [tokenizer.encode(text) for text in SHORT]
    assert any(len(ids) == 1 for ids in encoded)
    long = tokenizer.encode(long_text())[:_LONG]
    assert len(long) == _LONG
    return [*encoded, long]


@pytest.fixture(scope="module")
def float32_answers(checkpoint: Checkpoint, prompts: list[list[int]]) -> list[list[int]]:
    """One rank's."""
    with local_engine(checkpoint) as local:
        return continue_prompts(local.engine, prompts, max_tokens=_NUM_TOKENS)


def test_float32_tokens_are_those_of_transformers_and_logits_within_a_thousandth(
    checkpoint: Checkpoint, prompts: list[list[int]], float32_answers: list[list[int]]
) -> None:
    """What transformers would continue a prompt with is the best token at each place after those before it."""
    model = reference_of(checkpoint)

    with local_engine(checkpoint) as local:
        for prompt, answer in zip(prompts, float32_answers, strict=True):
            theirs = logits(model, prompt + answer)
            assert theirs[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
            assert (prompt_logits(local.runners[0], prompt + answer) - theirs).abs().max() <= 1e-3


# Every number of ranks; test_tiny.py has all pairs with every algorithm, on heads that split as unevenly.
@pytest.mark.parametrize(("tp", "algorithm"), [(2, "one-shot"), (3, "ring"), (4, "two-shot")])
def test_float32_tokens_do_not_depend_on_the_split(
    tp: int, algorithm: str, checkpoint: Checkpoint, prompts: list[list[int]], float32_answers: list[list[int]]
) -> None:
    own = slice(tp - 2, None, 3)  # a third of the prompts each
    with local_engine(checkpoint, tp=tp, all_reduce=algorithm) as local:
        answers = continue_prompts(local.engine, prompts[own], max_tokens=_NUM_TOKENS)
    assert answers == float32_answers[own]


class Answer(NamedTuple):
    tokens: list[int]
    top5: list[list[int]]  # best first, at each generated place


def test_bfloat16_parts_only_between_near_equals(checkpoint: Checkpoint, prompts: list[list[int]]) -> None:
    """At every place, after the same tokens, each side's choice is among the other's five best; one rank and two."""
    few = prompts[:7:2]  # bfloat16 is slow in transformers where a CPU has no products of it
    model = reference_of(checkpoint, torch.bfloat16)
    reference = cache(lambda tokens: logits(model, tokens))  # both may answer alike

    for tp in (1, 2):
        for prompt, answer in zip(few, _answers_with_top5(checkpoint, few, tp), strict=True):
            theirs_T5 = reference((*prompt, *answer.tokens))[len(prompt) - 1 : -1].topk(5).indices
            places = zip(answer.tokens, answer.top5, theirs_T5.tolist(), strict=True)
            for ours, our_best, their_best in places:
                assert ours in their_best and their_best[0] in our_best, f"tp={tp}, {prompt}"


def _answers_with_top5(checkpoint: Checkpoint, prompts: list[list[int]], tp: int) -> list[Answer]:
    params = SamplingParams(temperature=0.0, max_tokens=_NUM_BFLOAT16_TOKENS, ignore_eos=True, logprobs=5)
    with local_engine(checkpoint, tp=tp, dtype=torch.bfloat16) as local:
        for index, prompt in enumerate(prompts):
            local.engine.add(AddRequest(id=str(index), prompt_token_ids=prompt, params=params))
        outputs = run_to_end(local.engine)
    answers = []
    for index in range(len(prompts)):
        entries = [entry for output in outputs[str(index)] for entry in output.logprobs or ()]
        answers.append(Answer([e.token_id for e in entries], [[t for t, _ in e.top] for e in entries]))
    return answers
