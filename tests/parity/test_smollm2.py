"""The embedded model against transformers on the same weights: tokens in float32, close company in bfloat16."""

from itertools import cycle
from pathlib import Path

import pytest
import torch
from local_engine import continue_prompts, local_engine, prompt_logits, run_to_end
from parity_prompts import SHORT, long_text
from transformers import LlamaForCausalLM
from transformers_reference import Greedy, greedy, logits, save_as_folder

from tightwire.comm.registry import ALL_REDUCE
from tightwire.model.checkpoint import Checkpoint, open_checkpoint
from tightwire.model.sampling_params import SamplingParams
from tightwire.server.messages import AddRequest

_NUM_TOKENS = 64
_NUM_BFLOAT16_TOKENS = 24
_LONG = 1100  # tokens: three steps of at most 512

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def checkpoint(smollm2_path: Path) -> Checkpoint:
    return open_checkpoint(str(smollm2_path))


@pytest.fixture(scope="module")
def prompts(checkpoint: Checkpoint) -> list[list[int]]:
    tokenizer = checkpoint.tokenizer()
    encoded = [tokenizer.encode(text) for text in SHORT]
    assert any(len(ids) == 1 for ids in encoded)
    return [*encoded, tokenizer.encode(long_text())[:_LONG]]


@pytest.fixture(scope="module")
def folder(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_as_folder(checkpoint, tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def float32_model(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def float32_answers(float32_model: LlamaForCausalLM, prompts: list[list[int]]) -> list[list[int]]:
    return [greedy(float32_model, prompt, _NUM_TOKENS).tokens for prompt in prompts]


def test_float32_logits_within_a_thousandth(
    checkpoint: Checkpoint, float32_model: LlamaForCausalLM, prompts: list[list[int]]
) -> None:
    with local_engine(checkpoint) as local:
        for prompt in prompts:
            ours, theirs = prompt_logits(local.runners[0], prompt), logits(float32_model, prompt)
            assert (ours - theirs).abs().max() <= 1e-3


# Every algorithm and every number of ranks; test_tiny.py has all pairs of them, on heads that split as unevenly.
@pytest.mark.parametrize(("tp", "algorithm"), [(1, "native"), *zip(cycle((2, 3, 4)), sorted(ALL_REDUCE))])
def test_float32_tokens_equal(
    tp: int, algorithm: str, checkpoint: Checkpoint, prompts: list[list[int]], float32_answers: list[list[int]]
) -> None:
    with local_engine(checkpoint, tp=tp, all_reduce=algorithm) as local:
        assert continue_prompts(local.engine, prompts, max_tokens=_NUM_TOKENS) == float32_answers


@pytest.fixture(scope="module")
def bfloat16_answers(folder: Path, prompts: list[list[int]]) -> list[Greedy]:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    return [greedy(model, prompt, _NUM_BFLOAT16_TOKENS) for prompt in _shortened(prompts)]


def _shortened(prompts: list[list[int]]) -> list[list[int]]:
    """transformers is slow in bfloat16 where the CPU has no products of that type."""
    return [prompt[:100] for prompt in prompts]


@pytest.mark.parametrize("tp", [1, 2])
def test_bfloat16_parts_only_between_near_equals(
    tp: int, checkpoint: Checkpoint, prompts: list[list[int]], bfloat16_answers: list[Greedy]
) -> None:
    """At the first token that differs, each side's choice is among the other's five best."""
    ours = _answers_with_top5(checkpoint, _shortened(prompts), tp)

    for mine, their in zip(ours, bfloat16_answers, strict=True):
        parted = next((i for i in range(_NUM_BFLOAT16_TOKENS) if mine.tokens[i] != their.tokens[i]), None)
        if parted is not None:
            assert mine.tokens[parted] in their.top5[parted]
            assert their.tokens[parted] in mine.top5[parted]


def _answers_with_top5(checkpoint: Checkpoint, prompts: list[list[int]], tp: int) -> list[Greedy]:
    params = SamplingParams(temperature=0.0, max_tokens=_NUM_BFLOAT16_TOKENS, ignore_eos=True, logprobs=5)
    with local_engine(checkpoint, tp=tp, dtype=torch.bfloat16) as local:
        for index, prompt in enumerate(prompts):
            local.engine.add(AddRequest(id=str(index), prompt_token_ids=prompt, params=params))
        outputs = run_to_end(local.engine)
    answers = []
    for index in range(len(prompts)):
        entries = [entry for output in outputs[str(index)] for entry in output.logprobs or ()]
        answers.append(Greedy([e.token_id for e in entries], [[t for t, _ in e.top] for e in entries]))
    return answers
