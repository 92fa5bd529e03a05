"""Whole engines whose prompts pass stages, ranks as threads: scores of prompts to the bit those of one rank."""

import random
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fuzz import fuzz_seeds
from helpers.server.local_engine import local_engine, run_to_end
from helpers.server.staged_requests import REQUESTS, params, tokens_among_neighbours
from tiny import VARIANTS, make_tiny

from tightwire.model.open import Checkpoint, open_checkpoint
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.model.stages import divide_layers
from tightwire.server.engine.drafts import Drafter
from tightwire.server.ipc.engine_stats import EngineStats
from tightwire.server.ipc.messages import AddRequest


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(
        str(make_tiny(tmp_path_factory.mktemp("hybrid"), num_hidden_layers=4, **VARIANTS["odd-heads"]))
    )


def _answers(
    checkpoint: Checkpoint, tp: int, *, hybrid: bool = True, names: Iterable[str] = REQUESTS, **options: Any
) -> tuple[dict, EngineStats]:
    settings = {"dtype": torch.bfloat16, "max_model_len": 256, "max_num_batched_tokens": 48, "max_num_seqs": 12}
    stages = divide_layers(checkpoint.config.num_layers, [1] * tp) if hybrid else None
    with local_engine(checkpoint, tp=tp, stages=stages, **(settings | options)) as local:
        for name in names:
            prompt, changes = REQUESTS[name]
            local.engine.add(AddRequest(name, prompt, params(changes)))
        outputs = run_to_end(local.engine)
        told = {
            name: (
                [token for output in own for token in output.token_ids],
                [output.prompt_logprobs for output in own if output.prompt_logprobs],
                own[-1].finish_reason,
            )
            for name, own in outputs.items()
        }
        return told, local.engine.stats()


@pytest.fixture(scope="module")
def answers(checkpoint: Checkpoint) -> Callable[[int], dict]:
    """Those of so many ranks without other options, computed once."""
    return cache(lambda tp: _answers(checkpoint, tp)[0])


def test_prompts_are_scored_as_by_one_rank_to_the_bit(checkpoint: Checkpoint) -> None:
    alone, _ = _answers(checkpoint, 1, hybrid=False)
    for tp in (2, 3):
        told, stats = _answers(checkpoint, tp)
        for name in ("echo", "scored"):
            assert told[name][1] == alone[name][1], f"{name} on {tp} ranks"
        for name, (tokens, *_) in alone.items():
            assert len(told[name][0]) == len(tokens), f"{name} on {tp} ranks"
        assert stats.total.num_free_blocks == stats.total.num_blocks


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 500},
        {"prefix_cache": "none"},
        {"max_model_len": 256, "block_size": 4, "num_blocks": 64},  # preempts
        {"drafter": Drafter(max_tokens=4, longest=3, shortest=1)},
    ],
)
def test_answers_are_the_same_in_any_batch(
    options: dict[str, Any], checkpoint: Checkpoint, answers: Callable[[int], dict]
) -> None:
    told, stats = _answers(checkpoint, 2, **options)
    assert told == answers(2)
    assert stats.counters.num_preemptions > 0 or "num_blocks" not in options


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("tied", {"quantization": "int8"}),
        ("one-kv-head", {"kv_dtype": torch.int8}),
        ("multi-head", {}),
        ("mlp-bias", {"quantization": "int8"}),
    ],
    ids=str,
)
def test_every_part_of_a_layer_has_the_bits_of_one_rank(variant: str, options: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_tiny(tmp_path, num_hidden_layers=3, **VARIANTS[variant])))
    options = options | {"names": ("greedy", "long", "echo", "scored")}
    alone, _ = _answers(checkpoint, 1, hybrid=False, **options)
    told, _ = _answers(checkpoint, 2, **options)
    assert [told[name][1] for name in ("echo", "scored")] == [alone[name][1] for name in ("echo", "scored")]


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
def test_bytes_are_those_of_the_formulas(kv_dtype: torch.dtype, checkpoint: Checkpoint) -> None:
    config, num_tokens, plan = checkpoint.config, 100, divide_layers(4, (3, 1, 2))
    with local_engine(checkpoint, tp=3, stages=plan, dtype=torch.bfloat16, kv_dtype=kv_dtype) as local:
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        local.engine.add(AddRequest("0", list(range(1, num_tokens + 1)), params))
        run_to_end(local.engine)
        wires = [each.stages.wire for each in local.runners if each.stages is not None and each.stages.wire is not None]
        counts = [
            {
                count.algorithm: count.bytes_sent
                for each in (wire.group, wire.beside)
                for count in each.ledger.counters.counts()
            }
            for wire in wires
        ]
    hidden = num_tokens * config.hidden_size * 4
    head_bytes = config.head_dim + 2 if kv_dtype == torch.int8 else 2 * config.head_dim
    # Of three KV heads each rank has one: the nine query heads are cut between groups.
    heads = [num_tokens * len(plan.of(stage)) * 2 * head_bytes * 2 for stage in range(3)]
    wanted = zip((hidden, hidden, 0), heads, strict=True)
    assert counts == [{"hidden-state": sent, "kv-heads": kv} for sent, kv in wanted]


@pytest.mark.parametrize("seed", fuzz_seeds(2))
def test_cancelled_neighbours_change_nothing(seed: int, checkpoint: Checkpoint, answers: Callable[[int], dict]) -> None:
    """Blocks of cancelled and preempted prompts are used again while their chunks still pass the stages."""
    rng = random.Random(seed)
    options: dict[str, Any] = {"max_num_batched_tokens": 48, "max_num_seqs": 12, "block_size": 4, "num_blocks": 64}
    stages = divide_layers(4, (1, 1, 1))
    with local_engine(checkpoint, tp=3, stages=stages, dtype=torch.bfloat16, max_model_len=256, **options) as local:
        told = tokens_among_neighbours(local.engine, rng)
    assert told == {name: tokens for name, (tokens, *_) in answers(3).items()}


def test_a_request_may_have_its_prompt_computed_by_all_ranks_together(checkpoint: Checkpoint) -> None:
    own, prompt = params({"max_tokens": 12, "temperature": 0.0, "prompt_logprobs": 0}), list(range(40, 160))
    told = []
    for stages in (None, divide_layers(4, (1, 1))):
        with local_engine(checkpoint, tp=2, stages=stages, dtype=torch.bfloat16, max_model_len=256) as local:
            policies = ["fixed"] if stages is None else ["fixed", "fixed/tensor"]
            for name in policies:
                local.engine.add(AddRequest(name, prompt, own, allreduce=name))
            outputs = run_to_end(local.engine)[policies[-1]]
            told.append([(output.token_ids, output.prompt_logprobs) for output in outputs])
            way = local.runners[0].stages
            wire = None if way is None or way.wire is None else way.wire.group.ledger.counters
    assert told[0] == told[1], "that of --layout tensor to the bit, beside a prompt in stages"
    assert wire is not None and wire.counts()[0].bytes_sent == len(prompt) * checkpoint.config.hidden_size * 4
