"""Whole engines whose prompts pass stages, ranks as threads: scores of prompts to the bit those of a stage's ranks alone."""

import random
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fuzz import fuzz_seeds
from helpers.model.family_models import make_family_folder
from helpers.model.lora import make_adapter
from helpers.server.local_engine import continue_prompts, local_engine, run_to_end
from helpers.server.staged_requests import REQUESTS, params, tokens_among_neighbours
from msgspec.structs import replace
from tiny import VARIANTS, make_tiny

from tightwire.model.cache.kv_cache import CacheSource
from tightwire.model.families import family_named
from tightwire.model.layout import make_layout
from tightwire.model.open import Checkpoint, open_checkpoint
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.model.stages import StagePlan, divide_layers
from tightwire.server.engine.drafts import Drafter
from tightwire.server.ipc.engine_stats import EngineStats
from tightwire.server.ipc.messages import AddRequest


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(
        str(make_tiny(tmp_path_factory.mktemp("hybrid"), num_hidden_layers=4, **VARIANTS["odd-heads"]))
    )


def _answers(
    checkpoint: Checkpoint,
    tp: int,
    *,
    hybrid: bool = True,
    ranks_each: int = 1,
    names: Iterable[str] = REQUESTS,
    **options: Any,
) -> tuple[dict, EngineStats]:
    settings = {"dtype": torch.bfloat16, "max_model_len": 256, "max_num_batched_tokens": 48, "max_num_seqs": 12}
    stages = _stages(checkpoint, tp // ranks_each, ranks_each) if hybrid else None
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


def _stages(checkpoint: Checkpoint, num_stages: int, ranks_each: int = 1) -> StagePlan:
    return replace(divide_layers(checkpoint.config.num_layers, [1] * num_stages), ranks_each=ranks_each)


@pytest.fixture(scope="module")
def answers(checkpoint: Checkpoint) -> Callable[..., dict]:
    """Those of so many ranks, and so many in each stage, without other options, computed once."""
    return cache(lambda tp, ranks_each=1: _answers(checkpoint, tp, ranks_each=ranks_each)[0])


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
    counts, _ = _sent(checkpoint, plan, num_tokens, kv_dtype)
    hidden = num_tokens * config.hidden_size * 4
    head_bytes = config.head_dim + 2 if kv_dtype == torch.int8 else 2 * config.head_dim
    # Of three KV heads each rank has one: the nine query heads are cut between groups.
    heads = [num_tokens * len(plan.of(stage)) * 2 * head_bytes * 2 for stage in range(3)]
    wanted = zip((hidden, hidden, 0), heads, strict=True)
    assert counts == [{"hidden-state": sent, "kv-heads": kv} for sent, kv in wanted]


def _sent(
    checkpoint: Checkpoint, plan: StagePlan, num_tokens: int, kv_dtype: torch.dtype
) -> tuple[list[dict[str, int]], list[int]]:
    """The bytes that each rank sends for a prompt and a token: between stages by kind, and in sums of prompts' rows."""
    tp = plan.num_stages * plan.ranks_each
    with local_engine(checkpoint, tp=tp, stages=plan, dtype=torch.bfloat16, kv_dtype=kv_dtype) as local:
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        local.engine.add(AddRequest("0", list(range(1, num_tokens + 1)), params))
        run_to_end(local.engine)
        passages = [runner.stages for runner in local.runners]
    wires = [[wire for wire in (each.wire, each.beside) if wire] for each in passages if each is not None]
    ledgers = [[wire.group.ledger for wire in own] for own in wires]
    between = [{c.algorithm: c.bytes_sent for each in own for c in each.counters.counts()} for own in ledgers]
    sums = [
        sum(c.bytes_sent for c in group.ledger.counters.counts() if c.op == "all_reduce" and c.phase == "prefill")
        for group in local.groups
    ]
    return between, sums


@pytest.fixture(scope="module")
def together(checkpoint: Checkpoint) -> Callable[[torch.dtype | None], dict]:
    """Those of two ranks that compute all rows together, with the cache in this type; computed once."""
    return cache(lambda kv_dtype: _answers(checkpoint, 2, hybrid=False, kv_dtype=kv_dtype)[0])


@pytest.mark.parametrize(
    ("num_stages", "options"),
    [(2, {}), (3, {"block_size": 4, "num_blocks": 64}), (2, {"kv_dtype": torch.int8})],
    ids=str,
)
def test_stages_of_two_ranks_score_prompts_as_two_ranks_to_the_bit(
    num_stages: int,
    options: dict[str, Any],
    checkpoint: Checkpoint,
    together: Callable[[torch.dtype | None], dict],
) -> None:
    """Of nine query heads, cuts for two ranks are not cuts for four or six."""
    told, stats = _answers(checkpoint, 2 * num_stages, ranks_each=2, **options)
    for name in ("echo", "scored"):
        assert told[name][1] == together(options.get("kv_dtype"))[name][1], name
    assert stats.total.num_free_blocks == stats.total.num_blocks
    assert stats.counters.num_preemptions > 0 or "num_blocks" not in options


@pytest.mark.parametrize(
    ("variant", "kv_dtype"),
    [("tied", None), ("one-kv-head", torch.int8), ("multi-head", None), ("mlp-bias", None), ("odd-heads", torch.int8)],
    ids=str,
)
def test_four_ranks_in_two_stages_generate_with_the_keys_and_values_of_two(
    variant: str, kv_dtype: torch.dtype | None, tmp_path: Path
) -> None:
    """Every head of every layer to the bit, and with the others in float32 the tokens of one rank."""
    checkpoint = open_checkpoint(str(make_tiny(tmp_path, num_hidden_layers=3, **VARIANTS[variant])))
    config, prompt, caches = checkpoint.config, list(range(40, 160)), list[list[CacheSource]]()
    for tp, stages in ((2, None), (4, _stages(checkpoint, 2, 2))):
        options: dict[str, Any] = {"dtype": torch.bfloat16, "kv_dtype": kv_dtype, "max_model_len": 256}
        with local_engine(checkpoint, tp=tp, stages=stages, **options) as local:
            continue_prompts(local.engine, [prompt], max_tokens=2)
            caches.append([runner.cache for runner in local.runners])
    of_two, of_four = (make_layout(config, tp).shards for tp in (2, 4))
    for shard, own in zip(of_four, caches[1], strict=True):
        for head in shard.kv_heads:
            place = next(other for other in of_two if head in other.kv_heads)
            for layer in range(config.num_layers):
                for got, wanted in zip(own.layer(layer), caches[0][place.rank].layer(layer), strict=True):
                    theirs = wanted[: len(prompt) // 16, head - place.kv_heads.start]
                    assert torch.equal(got[: len(prompt) // 16, head - shard.kv_heads.start], theirs), (layer, head)
    few: dict[str, Any] = {"names": ("greedy", "long", "n0", "penalized"), "dtype": torch.float32}
    alone, _ = _answers(checkpoint, 1, hybrid=False, **few)
    told, _ = _answers(checkpoint, 4, ranks_each=2, **few)
    assert {name: tokens for name, (tokens, *_) in told.items()} == {n: tokens for n, (tokens, *_) in alone.items()}


@pytest.mark.parametrize("family", ["OLMo 2", "Gemma 3"])
def test_stages_of_two_ranks_of_a_family_score_prompts_as_two_ranks(family: str, tmp_path: Path) -> None:
    """Norms of whole projections sum over the ranks of a stage too; embeddings are scaled on each."""
    checkpoint = open_checkpoint(str(make_family_folder(family_named(family), tmp_path)))
    options: dict[str, Any] = {"names": ("greedy", "echo", "scored"), "max_model_len": 256, "bounded": False}
    together, _ = _answers(checkpoint, 2, hybrid=False, **options)
    told, _ = _answers(checkpoint, 4, ranks_each=2, **options)
    assert [told[name][1] for name in ("echo", "scored")] == [together[name][1] for name in ("echo", "scored")]


def test_bytes_of_stages_of_two_ranks_are_those_of_the_formulas(checkpoint: Checkpoint) -> None:
    config, num_tokens, plan = checkpoint.config, 100, _stages(checkpoint, 2, 2)
    between, sums = _sent(checkpoint, plan, num_tokens, torch.bfloat16)
    row, parts, shards = (
        num_tokens * config.hidden_size * 4,
        make_layout(config, 2).shards,
        make_layout(config, 4).shards,
    )
    wanted = []
    for rank in range(4):
        place = rank % 2
        given = set(parts[place].kv_heads) - set(parts[0].kv_heads if place else ())
        num_heads = sum(len(given & {*shard.kv_heads}) for shard in shards if shard.rank != rank)
        own = {"kv-heads": num_tokens * len(plan.of(rank // 2)) * 2 * 2 * config.head_dim * num_heads}
        wanted.append(own if place else {"hidden-state": row if rank == 0 else 0} | own)
    assert between == wanted
    assert sums == [2 * len(plan.of(rank // 2)) * row for rank in range(4)], "inside the stages, in memory"


@pytest.mark.parametrize(("tp", "ranks_each"), [(2, 1), (4, 2)])
def test_adapters_change_prompts_and_tokens(tp: int, ranks_each: int, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Scores of prompts are those of a stage's ranks alone with the same adapters."""
    folders = [make_adapter(tmp_path / str(seed), checkpoint.config, seed=seed) for seed in range(2)]
    told, tokens = [], []
    for num, stages in ((ranks_each, None), (tp, _stages(checkpoint, tp // ranks_each, ranks_each))):
        options: dict[str, Any] = {"tp": num, "stages": stages, "adapters": folders, "max_model_len": 256}
        with local_engine(checkpoint, dtype=torch.float32, **options) as local:
            for adapter in range(3):
                own = params({"temperature": 0.0, "prompt_logprobs": 0})
                local.engine.add(AddRequest(str(adapter), list(range(40, 140)), own, adapter=adapter))
            outputs = run_to_end(local.engine)
        told.append(
            {name: [each.prompt_logprobs for each in own if each.prompt_logprobs] for name, own in outputs.items()}
        )
        tokens.append({name: [token for each in own for token in each.token_ids] for name, own in outputs.items()})
    assert told[0] == told[1], "to the bit"
    assert tokens[0] == tokens[1]
    assert len({str(scores) for scores in told[0].values()}) == 3, "an adapter changes nothing"


@pytest.mark.parametrize("seed", fuzz_seeds(2))
@pytest.mark.parametrize(("tp", "ranks_each"), [(3, 1), (4, 2)])
def test_cancelled_neighbours_change_nothing(
    tp: int, ranks_each: int, seed: int, checkpoint: Checkpoint, answers: Callable[..., dict]
) -> None:
    """Blocks of cancelled and preempted prompts are used again while their chunks still pass the stages."""
    rng = random.Random(seed)
    options: dict[str, Any] = {"max_num_batched_tokens": 48, "max_num_seqs": 12, "block_size": 4, "num_blocks": 64}
    options |= {"stages": _stages(checkpoint, tp // ranks_each, ranks_each), "dtype": torch.bfloat16}
    with local_engine(checkpoint, tp=tp, max_model_len=256, **options) as local:
        told = tokens_among_neighbours(local.engine, rng)
    assert told == {name: tokens for name, (tokens, *_) in answers(tp, ranks_each).items()}


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
