"""Windows bound the cache: groups of layers, the blocks they hold, and answers that are those of an unbounded cache."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.model.family_models import make_family_folder
from helpers.model.transformers_reference import greedy_with_logits
from helpers.server.local_engine import LocalEngine, continue_prompts, local_engine, run_to_end
from helpers.server.mixed_requests import scores_of_mixed_load
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.families import family_named
from tightwire.model.layer_groups import LayerGroups
from tightwire.model.open import open_checkpoint
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.model.weights import WeightPlan
from tightwire.server.engine.drafts import Drafter
from tightwire.server.ipc.messages import AddRequest
from tightwire.server.plan.weight_decision import spread

_FAMILIES = ["Gemma 3", "Gemma 2", "Mistral", "OLMo 3"]
_PROMPT, _NUM_TOKENS, _CONTEXT = 150, 20, 320


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory):
    """The folder of each family's model, with windows of 20 tokens; made once."""
    changes: dict[str, Any] = {"max_position_embeddings": 512}
    return cache(lambda name: make_family_folder(family_named(name), tmp_path_factory.mktemp("windows"), **changes))


def _config(num_layers: int, sliding: tuple[int, ...], max_positions: int = 4096) -> LlamaConfig:
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 8,
        "mlp_size": 8,
        "vocab_size": 8,
    }
    return LlamaConfig(num_layers=num_layers, **sizes, max_positions=max_positions, window=512, sliding=sliding)


def _groups(*model: Any) -> LayerGroups:
    return LayerGroups.of(_config(*model))


def test_a_model_without_windows_has_one_group() -> None:
    whole = LayerGroups(tuple((0, layer) for layer in range(5)))
    assert _groups(5, ()) == whole and whole.num == 1 and whole.num_layers == 5
    assert _groups(5, (1, 3), 512) == whole, "no token is outside of the window"
    assert LayerGroups.of(_config(5, (1, 3)), bounded=False) == whole


def test_groups_have_as_many_layers_as_the_rarer_kind() -> None:
    gemma = _groups(26, tuple(layer for layer in range(26) if layer % 6 != 5))
    assert (gemma.num_full, gemma.num_sliding, gemma.num_layers, gemma.window) == (1, 6, 4, 512)
    assert [gemma.places[layer] for layer in (5, 11, 17, 23)] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert [gemma.places[layer] for layer in (0, 1, 4, 6, 25)] == [(1, 0), (1, 1), (2, 0), (2, 1), (6, 1)]
    assert len(set(gemma.places)) == 26
    every_other = _groups(6, (0, 2, 4))
    assert (every_other.num_full, every_other.num_sliding, every_other.num_layers) == (1, 1, 3)
    everywhere = _groups(6, tuple(range(6)))
    assert (everywhere.num_full, everywhere.num_sliding, everywhere.num_layers) == (0, 1, 6)


@given(
    window=st.integers(1, 200),
    block_size=st.sampled_from([4, 16, 32]),
    steps=st.lists(st.integers(1, 90), min_size=1, max_size=12),
)
def test_every_key_that_a_row_sees_is_held(window: int, block_size: int, steps: list[int]) -> None:
    groups = LayerGroups(((0, 0), (1, 0), (2, 0)), 1, 2, window)
    start = 0
    for step in steps:
        end = start + step
        held_LM = groups.held(np.array([start]), np.array([end]), block_size)[:, 0]
        assert held_LM[0].all() and (held_LM[1] == held_LM[2]).all() and len(held_LM[0]) == -(-end // block_size)
        # Kernels read whole tiles of up to 64 keys.
        first_key = max(0, start + 1 - window) // 64 * 64
        assert held_LM[1, first_key // block_size :].all() and not held_LM[1, : first_key // block_size].any()
        most = groups.most_blocks(end, max(steps), block_size)
        assert held_LM.sum() <= most and groups.most_tokens(most, max(steps), block_size) >= end
        start = end


@pytest.mark.parametrize("step_tokens", [1, 16, 100])
def test_the_most_blocks_are_reached(step_tokens: int) -> None:
    groups = LayerGroups(((0, 0), (1, 0)), 0, 2, 20)
    ends = [(start, start + step_tokens) for start in range(400)]
    counts = [groups.held(np.array([start]), np.array([end]), 16).sum() for start, end in ends]
    assert max(counts) == groups.most_blocks(500, step_tokens, 16)
    assert groups.most_tokens(100, step_tokens, 16) > 1 << 30, "no length needs more"


@cache
def _theirs(folder: Path) -> tuple[list[int], Tensor]:
    """A prompt and transformers' greedy answer, and the log-probabilities at every position."""
    tokens, logits = greedy_with_logits(folder, _PROMPT, _NUM_TOKENS)
    return tokens, logits.log_softmax(-1)


def _poison_free_blocks(local: LocalEngine) -> None:
    """What a freed block holds must not matter."""
    pool = local.engine._replicas._schedulers[0].sequences.pool
    for runner in local.runners:
        for layer in range(6):
            for numbers_NKPE in runner.cache.layer(layer):
                numbers_NKPE[pool._blank] = torch.nan


@pytest.mark.parametrize(
    ("family", "tp"),
    [*((family, 1) for family in _FAMILIES), ("Gemma 3", 3), ("Gemma 2", 2), ("Mistral", 3), ("OLMo 3", 2)],
)
def test_answers_far_beyond_the_window_are_those_of_transformers(family: str, tp: int, folders) -> None:
    tokens, want_SV = _theirs(folders(family))
    params = SamplingParams(max_tokens=_NUM_TOKENS, temperature=0.0, logprobs=5, prompt_logprobs=0, ignore_eos=True)
    with local_engine(
        _opened(folders(family)), tp=tp, max_model_len=_CONTEXT, max_num_batched_tokens=70, prefix_cache="none"
    ) as local:
        local.engine.add(AddRequest(id="a", prompt_token_ids=tokens[:_PROMPT], params=params))
        outputs = []
        while local.engine.has_work():
            outputs += local.engine.step().outputs
            _poison_free_blocks(local)
    scores = [score for output in outputs for score in output.logprobs or []]
    assert [score.token_id for score in scores] == tokens[_PROMPT:]
    bound = 2e-5 * float(want_SV.abs().max())
    for position, score in enumerate(scores, start=_PROMPT - 1):
        assert all(abs(logprob - want_SV[position, token]) < bound for token, logprob in score.top)
    prompt = next(output.prompt_logprobs for output in outputs if output.prompt_logprobs)
    for position, score in enumerate(prompt[1:]):
        assert score is not None and abs(score.logprob - want_SV[position, tokens[position + 1]]) < bound


def _opened(folder: Path):
    return open_checkpoint(str(folder))


def _answers(local: LocalEngine) -> dict[str, list[Any]]:
    rng = random.Random(3)
    stem = [rng.randrange(3, 300) for _ in range(130)]
    beginnings = [stem, stem[:99], [], [4, 5, 6, 4, 5] * 20]
    return scores_of_mixed_load(local.engine, rng, beginnings, range(3, 300), 9)


_STREAMED = WeightPlan(source="stream", origin="host", streamed=spread(6, 3))
_LOADS: dict[str, dict[str, Any]] = {
    "preempted": {"num_blocks": 80, "max_num_seqs": 8, "max_num_batched_tokens": 24},
    "prefix cache all": {"prefix_cache": "all", "max_num_batched_tokens": 64},
    "no prefix cache": {"prefix_cache": "none"},
    "three ranks, preempted": {"num_blocks": 60, "tp": 3, "max_num_batched_tokens": 32, "max_num_seqs": 32},
    "speculation": {"drafter": Drafter(max_tokens=4, longest=3, shortest=1)},
    "8 bits, preempted": {"num_blocks": 90, "max_num_seqs": 8, "max_num_batched_tokens": 24, "kv_dtype": torch.int8},
    "8 bits, two ranks, prefix cache all": {"tp": 2, "kv_dtype": torch.int8, "prefix_cache": "all"},
    "weights stream": {"weight_plan": _STREAMED, "most_rows": 48},
    "weights stream, 8 bits, two ranks, preempted": {
        "num_blocks": 80,
        "tp": 2,
        "weight_plan": _STREAMED,
        "kv_dtype": torch.int8,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 24,
    },
    "halves in turns": {"tp": 2, "overlap": True},
    "parts": {"most_rows": 32},
    "planned ahead, preempted": {"num_blocks": 90, "plan_ahead": True, "max_num_batched_tokens": 24, "max_num_seqs": 8},
    "replicas": {"dp": 2, "max_num_batched_tokens": 64},
}


@cache
def _answers_of_an_unbounded_cache(folder: Path, tp: int, kv_dtype: torch.dtype | None) -> dict[str, list[Any]]:
    """The other options of a load change no bit."""
    options: dict[str, Any] = {"max_model_len": _CONTEXT, "num_blocks": 400, "bounded": False}
    with local_engine(_opened(folder), tp=tp, kv_dtype=kv_dtype, **options) as local:
        return _answers(local)


@pytest.mark.parametrize("name", _LOADS)
def test_answers_are_those_of_an_unbounded_cache(name: str, folders) -> None:
    options: dict[str, Any] = {"max_model_len": _CONTEXT, **_LOADS[name]}
    folder = folders("Gemma 3")
    expected = _answers_of_an_unbounded_cache(folder, options.get("tp", 1), options.get("kv_dtype"))
    with local_engine(_opened(folder), **options) as local:
        assert _answers(local) == expected
        stats = local.engine.stats()
        assert stats.total.num_free_blocks == stats.total.num_blocks
        assert stats.counters.num_preemptions > 0 or "preempted" not in name
        assert stats.counters.num_accepted_draft_tokens > 0 or "speculation" not in name
        assert stats.counters.num_steps_ahead > 0 or "planned ahead" not in name
        assert stats.counters.num_prefix_hit_tokens > 0 or "no prefix" in name


@pytest.mark.parametrize("family", ["Mistral", "Gemma 2"])
def test_12_requests_together_answer_as_each_alone(family: str, folders) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 300) for _ in range(rng.choice([5, 40, 120, 200]))] for _ in range(12)]
    given: dict[str, Any] = {"max_model_len": _CONTEXT, "max_num_batched_tokens": 96, "num_blocks": 75}
    with local_engine(_opened(folders(family)), **given) as local:
        together = continue_prompts(local.engine, prompts, max_tokens=40)
        assert [continue_prompts(local.engine, [prompt], max_tokens=40)[0] for prompt in prompts] == together


@pytest.mark.parametrize("family", ["Mistral", "Gemma 3"])
def test_a_prompt_continues_from_a_prefix_whose_first_blocks_were_freed(family: str, folders) -> None:
    prompt, (question, other) = list(range(3, 203)), ([7, 8, 9], [250] * 30)
    with local_engine(_opened(folders(family)), max_model_len=_CONTEXT, prefix_cache="none") as local:
        expected = continue_prompts(local.engine, [prompt + question, prompt[:140] + other], max_tokens=40)
    with local_engine(_opened(folders(family)), max_model_len=_CONTEXT, max_num_batched_tokens=64) as local:
        continue_prompts(local.engine, [prompt], max_tokens=80)
        assert continue_prompts(local.engine, [prompt + question], max_tokens=40) == expected[:1]
        assert local.engine.stats().counters.num_prefix_hit_tokens == 192
        assert continue_prompts(local.engine, [prompt[:140] + other], max_tokens=40) == expected[1:]
        assert local.engine.stats().counters.num_prefix_hit_tokens == 192 + 128


def test_drawn_answers_to_one_prompt_share_its_blocks_and_are_those_of_an_unbounded_cache(folders) -> None:
    prompt: list[int] = list(range(3, 153))
    given: dict[str, Any] = {"max_model_len": _CONTEXT, "max_num_batched_tokens": 64}
    told = list[Any]()
    for options in ({}, {"num_blocks": 400, "bounded": False}):
        with local_engine(_opened(folders("Gemma 3")), tp=2, **given, **options) as local:
            continue_prompts(local.engine, [prompt], max_tokens=1)
            for index in range(3):  # as a server answers n = 3
                params = SamplingParams(max_tokens=60, temperature=0.8, seed=index, ignore_eos=True, logprobs=2)
                local.engine.add(AddRequest(id=str(index), prompt_token_ids=prompt, params=params))
            outputs = run_to_end(local.engine)
            told.append(
                {name: [score for each in own for score in each.logprobs or []] for name, own in outputs.items()}
            )
            stats = local.engine.stats()
            assert stats.counters.num_prefix_hit_tokens >= 3 * 128
            assert stats.total.num_free_blocks == stats.total.num_blocks
    assert told[0] == told[1]
    assert len({tuple(score.token_id for score in own) for own in told[0].values()}) == 3
