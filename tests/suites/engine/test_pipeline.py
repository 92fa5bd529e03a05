"""Whole engines whose rows all pass stages, ranks as threads: answers and scores are those of one rank to the bit."""

import math
import random
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fuzz import fuzz_seeds
from helpers.model.family_models import make_family_folder
from helpers.server.local_engine import local_engine, run_to_end
from helpers.server.staged_requests import REQUESTS, params, tokens_among_neighbours
from msgspec.structs import replace
from tiny import VARIANTS, make_tiny

from tightwire.model.families import FAMILIES, family_named
from tightwire.model.open import Checkpoint, open_checkpoint
from tightwire.model.stages import divide_layers
from tightwire.server.ipc.engine_stats import EngineStats
from tightwire.server.ipc.messages import AddRequest

_FEW = ("greedy", "long", "top-p", "echo", "scored", "n0")  # requests that show what the layers compute
_OPTIONS: dict[str, Any] = {
    "dtype": torch.bfloat16,
    "max_model_len": 256,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 12,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(
        str(make_tiny(tmp_path_factory.mktemp("pipeline"), num_hidden_layers=4, **VARIANTS["odd-heads"]))
    )


def _pipeline(tp: int, checkpoint: Checkpoint) -> Any:
    if tp == 1:
        return None
    return replace(divide_layers(checkpoint.config.num_layers, [1] * tp), pipeline=True)


def _answers(
    checkpoint: Checkpoint, tp: int, *, names: Iterable[str] = REQUESTS, **options: Any
) -> tuple[dict, EngineStats]:
    options = _OPTIONS | options
    with local_engine(checkpoint, tp=tp, stages=_pipeline(tp, checkpoint), **options) as local:
        for name in names:
            prompt, changes = REQUESTS[name]
            if len(prompt) + 20 > options["max_model_len"]:
                continue
            local.engine.add(AddRequest(name, prompt, params(changes)))
        outputs = run_to_end(local.engine)
        told = {
            name: (
                [token for output in own for token in output.token_ids],
                [output.logprobs for output in own],
                [output.prompt_logprobs for output in own if output.prompt_logprobs],
                own[-1].finish_reason,
            )
            for name, own in outputs.items()
        }
        return told, local.engine.stats()


@pytest.fixture(scope="module")
def alone(checkpoint: Checkpoint) -> Callable[[torch.dtype | None], dict]:
    """One rank's answers, with the cache in this type; computed once."""
    return cache(lambda kv_dtype: _answers(checkpoint, 1, kv_dtype=kv_dtype)[0])


@pytest.mark.parametrize(
    ("tp", "options"),
    [
        (2, {}),
        (3, {}),
        (2, {"max_num_batched_tokens": 500}),
        (3, {"prefix_cache": "none"}),
        (2, {"prefix_cache": "all"}),
        *((tp, {"max_model_len": 256, "block_size": 4, "num_blocks": 64}) for tp in (2, 3)),  # preempts
        (3, {"kv_dtype": torch.int8}),
    ],
    ids=str,
)
def test_answers_are_those_of_one_rank_to_the_bit(
    tp: int, options: dict[str, Any], checkpoint: Checkpoint, alone: Callable[[torch.dtype | None], dict]
) -> None:
    told, stats = _answers(checkpoint, tp, **options)
    assert told == alone(options.get("kv_dtype"))
    assert stats.total.num_free_blocks == stats.total.num_blocks
    assert stats.counters.num_preemptions > 0 or "num_blocks" not in options


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("tied", {}),
        ("tied", {"quantization": "int8"}),
        ("one-kv-head", {"kv_dtype": torch.int8}),
        ("multi-head", {}),
        ("mlp-bias", {"quantization": "int8"}),
    ],
    ids=str,
)
def test_every_part_of_a_layer_has_the_bits_of_one_rank(variant: str, options: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_tiny(tmp_path, num_hidden_layers=3, **VARIANTS[variant])))
    alone, _ = _answers(checkpoint, 1, names=_FEW, **options)
    assert _answers(checkpoint, 3, names=_FEW, **options)[0] == alone


@pytest.mark.parametrize("family", [family.names.name for family in FAMILIES if family.names.name != "Llama"])
def test_families_whose_layers_differ_have_the_bits_of_one_rank(family: str, tmp_path: Path) -> None:
    """Windows and layers without rotation keep their numbers; an update's norm belongs to the stage that made the update."""
    checkpoint = open_checkpoint(str(make_family_folder(family_named(family), tmp_path)))
    alone, _ = _answers(checkpoint, 1, names=_FEW, max_model_len=128, bounded=False)
    assert _answers(checkpoint, 3, names=_FEW, max_model_len=128)[0] == alone


def test_bytes_are_those_of_the_formulas(checkpoint: Checkpoint) -> None:
    num_tokens, num_new = 100, 5
    with local_engine(checkpoint, tp=3, stages=_pipeline(3, checkpoint), dtype=torch.bfloat16) as local:
        local.engine.add(
            AddRequest("0", list(range(1, num_tokens + 1)), params({"max_tokens": num_new, "temperature": 0.0}))
        )
        run_to_end(local.engine)
        passages = [runner.stages for runner in local.runners]
    # After the ranks have ended: the last one counts the last token while rank 0 already has it.
    groups = [group for each in passages if each is not None for group in (each.wire.group, each.wire.beside)]
    counts = [each.ledger.counters.counts() for each in groups]
    assert {count.algorithm for each in counts for count in each} == {"hidden-state", "token-ids"}
    row = checkpoint.config.hidden_size * 4
    sent = [
        {phase: sum(count.bytes_sent for count in each if count.phase == phase) for phase in ("prefill", "decode")}
        for each in counts
    ]
    hidden = {"prefill": num_tokens * row, "decode": (num_new - 1) * row}  # the last token is not computed
    nothing = {"prefill": 0, "decode": 0}
    assert sent[:5] == [hidden, nothing, hidden, nothing, nothing]
    assert sum(sent[5].values()) == 8 * num_new


@pytest.mark.parametrize("num_seqs", [1, 2, 3, 7])
def test_sequences_form_as_many_groups_as_there_are_stages(num_seqs: int, checkpoint: Checkpoint) -> None:
    num_stages, num_decoded = 2, 29
    with local_engine(
        checkpoint, tp=num_stages, stages=_pipeline(num_stages, checkpoint), dtype=torch.bfloat16
    ) as local:
        for index in range(num_seqs):
            message = AddRequest(
                str(index), [3, 4 + index], params({"max_tokens": num_decoded + 1, "temperature": 0.0})
            )
            local.engine.add(message)
        run_to_end(local.engine)
        stages = local.runners[0].stages
        assert stages is not None
        num_steps = sum(count.calls for count in stages.wire.group.ledger.counters.counts())
    # A step has at most its group's share of the rows, whenever tokens come back. Each prompt is a step, which may have a group's rows too.
    at_least = math.ceil(num_decoded * num_seqs / math.ceil(num_seqs / num_stages))
    assert num_steps >= at_least, "a group holds sequences of the others"
    assert num_steps <= num_seqs + min(num_stages, num_seqs) * 35, "sequences that start or end apart join a group"


@pytest.mark.parametrize("seed", fuzz_seeds(2))
def test_cancelled_neighbours_change_nothing(
    seed: int, checkpoint: Checkpoint, alone: Callable[[torch.dtype | None], dict]
) -> None:
    """Blocks of cancelled and preempted sequences are used again while their rows still pass the stages."""
    rng = random.Random(seed)
    options: dict[str, Any] = _OPTIONS | {"block_size": 4, "num_blocks": 64}
    with local_engine(checkpoint, tp=3, stages=_pipeline(3, checkpoint), **options) as local:
        told = tokens_among_neighbours(local.engine, rng)
    assert told == {name: tokens for name, (tokens, *_) in alone(None).items()}
