"""Whole engines whose rows all pass stages, ranks as threads: answers and scores are those of one rank to the bit."""

import json
import math
import random
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.comm.fixed_policy import fixed_policy
from helpers.fuzz import fuzz_seeds
from helpers.model.family_models import make_family_folder
from helpers.model.lora import make_adapter
from helpers.server.local_engine import continue_prompts, local_engine, run_to_end
from helpers.server.staged_requests import REQUESTS, params, tokens_among_neighbours
from msgspec.structs import replace
from tiny import VARIANTS, make_tiny

from tightwire.comm.codec.codec import parse_codec
from tightwire.model.families import FAMILIES, family_named
from tightwire.model.open import Checkpoint, open_checkpoint
from tightwire.model.sampling.grammar import GrammarMasks, make_grammar
from tightwire.model.stages import divide_layers
from tightwire.server.engine.drafts import Drafter
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


def _pipeline(num_stages: int, checkpoint: Checkpoint, ranks_each: int = 1) -> Any:
    if num_stages == 1:
        return None
    return replace(divide_layers(checkpoint.config.num_layers, [1] * num_stages), pipeline=True, ranks_each=ranks_each)


def _answers(
    checkpoint: Checkpoint, num_stages: int, ranks_each: int = 1, *, names: Iterable[str] = REQUESTS, **options: Any
) -> tuple[dict, EngineStats]:
    options = _OPTIONS | options
    stages = _pipeline(num_stages, checkpoint, ranks_each)
    with local_engine(checkpoint, tp=num_stages * ranks_each, stages=stages, **options) as local:
        for name in names:
            prompt, changes = REQUESTS[name]
            if len(prompt) + 14 > options["max_model_len"]:
                continue
            local.engine.add(AddRequest(name, prompt, params(changes)))
        outputs = run_to_end(local.engine)
        told = {
            name: (
                [token for output in own for token in output.token_ids],
                [score for output in own for score in output.logprobs or ()],
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
        (2, {"drafter": Drafter(max_tokens=4, longest=3, shortest=1)}),
        (3, {"drafter": Drafter(max_tokens=4, longest=3, shortest=1), "block_size": 4, "num_blocks": 64}),
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
    assert (stats.counters.num_accepted_draft_tokens > 0) == ("drafter" in options)


@pytest.mark.parametrize(("tp", "pipeline"), [(3, True), (2, False)])
def test_grammars_hold_where_rows_or_prompts_pass_stages(tp: int, pipeline: bool, checkpoint: Checkpoint) -> None:
    """The ranks of the last stage, or all, get the masks of a step's rows, which in a pipeline entered steps before."""
    pytest.importorskip("llguidance")
    config = checkpoint.config
    grammars = GrammarMasks(config.vocab_size, config.eos_token_ids, lambda: checkpoint.tokenizer().backend.to_str())
    schema = {"type": "array", "items": {"enum": ["a", "bc", 7]}, "minItems": 3, "maxItems": 3}
    sources: Any = [("json", schema), ("choice", ["yes, of course", "no"]), ("regex", "(abc){4}")]
    told, texts = [], list[str]()
    for num in (1, tp):
        stages = divide_layers(4, [1] * num)
        options: Any = _OPTIONS | {
            "grammars": grammars,
            "stages": None if num == 1 else replace(stages, pipeline=pipeline),
        }
        with local_engine(checkpoint, tp=num, **options) as local:
            for number, source in enumerate(sources * 2):
                changes = {"grammar": make_grammar(*source), "seed": number, "max_tokens": 40, "ignore_eos": False}
                local.engine.add(AddRequest(str(number), [3, 4, 5 + number] * 20, params(changes)))
                local.engine.add(AddRequest(f"free {number}", [6, 7], params({"temperature": 0.0})))
            outputs = run_to_end(local.engine)
        told.append({name: [token for each in own for token in each.token_ids] for name, own in outputs.items()})
        texts = [checkpoint.tokenizer().decode(told[-1][str(number)]) for number in range(6)]
        for text, (kind, source) in zip(texts, sources * 2, strict=True):
            if kind == "json":
                assert len(json.loads(text)) == 3, text
            else:
                assert text in (source if kind == "choice" else ["abc" * 4])
    assert told[0] == told[1] or not pipeline, "those of one rank to the bit"


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


@pytest.mark.parametrize("codec", ["none", "int8-g64"])
def test_bytes_are_those_of_the_formulas(codec: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_tiny(tmp_path, hidden_size=128, num_hidden_layers=3)))
    num_tokens, num_new = 100, 5
    how: dict[str, Any] = {"stages": _pipeline(3, checkpoint), "stage_codec": codec, "dtype": torch.bfloat16}
    with local_engine(checkpoint, tp=3, **how) as local:
        local.engine.add(
            AddRequest("0", list(range(1, num_tokens + 1)), params({"max_tokens": num_new, "temperature": 0.0}))
        )
        run_to_end(local.engine)
        passages = [runner.stages for runner in local.runners]
    # After the ranks have ended: the last one counts the last token while rank 0 already has it.
    wires = [wire for each in passages if each is not None for wire in (each.wire, each.beside)]
    counts = [wire.group.ledger.counters.counts() for wire in wires if wire is not None]
    assert {count.algorithm for each in counts for count in each} == {"hidden-state", "token-ids"}
    row = parse_codec(codec).wire_bytes(checkpoint.config.hidden_size, 4)
    assert row == {"none": 512, "int8-g64": 136}[codec]  # a scale and a minimum each 64
    sent = [
        {phase: sum(count.bytes_sent for count in each if count.phase == phase) for phase in ("prefill", "decode")}
        for each in counts
    ]
    hidden = {"prefill": num_tokens * row, "decode": (num_new - 1) * row}  # the last token is not computed
    nothing = {"prefill": 0, "decode": 0}
    assert sent[:5] == [hidden, nothing, hidden, nothing, nothing]
    assert sum(sent[5].values()) == 8 * num_new


_PREEMPTS = {"max_model_len": 256, "block_size": 4, "num_blocks": 64}


@pytest.fixture(scope="module")
def together(checkpoint: Checkpoint) -> Callable[[torch.dtype | None], dict]:
    """The answers of two ranks that compute all layers together."""
    return cache(lambda kv_dtype: _answers(checkpoint, 1, 2, kv_dtype=kv_dtype)[0])


@pytest.mark.parametrize(
    ("num_stages", "options"),
    [(2, {}), (3, {"prefix_cache": "all"} | _PREEMPTS), (2, {"kv_dtype": torch.int8})],
    ids=str,
)
def test_stages_of_two_ranks_answer_as_two_ranks_to_the_bit(
    num_stages: int,
    options: dict[str, Any],
    checkpoint: Checkpoint,
    together: Callable[[torch.dtype | None], dict],
) -> None:
    """Of nine heads one rank of a stage has five."""
    told, stats = _answers(checkpoint, num_stages, 2, **options)
    assert told == together(options.get("kv_dtype"))
    assert stats.total.num_free_blocks == stats.total.num_blocks
    assert stats.counters.num_preemptions > 0 or "num_blocks" not in options


@pytest.mark.parametrize("family", ["OLMo 2", "Gemma 3"])
def test_stages_of_two_ranks_of_a_family_answer_as_two_ranks(family: str, tmp_path: Path) -> None:
    """Norms of whole projections sum over the ranks of a stage too; layers keep their windows."""
    checkpoint = open_checkpoint(str(make_family_folder(family_named(family), tmp_path)))
    together, _ = _answers(checkpoint, 1, 2, names=_FEW, max_model_len=128, bounded=False)
    assert _answers(checkpoint, 2, 2, names=_FEW, max_model_len=128)[0] == together


def test_a_request_chooses_the_sums_of_a_stages_ranks(tmp_path: Path) -> None:
    """Requests of both AllReduces, of which one loses, are under way at once. A row of 64 numbers is whole groups."""
    checkpoint = open_checkpoint(str(make_tiny(tmp_path)))
    sums: Any = {name: fixed_policy(name) for name in ("one-shot", "flash:int4-g32,int4-g32")}
    told = []
    for num_stages in (1, 2):
        options = _OPTIONS | {"tp": 2 * num_stages, "stages": _pipeline(num_stages, checkpoint, 2), "all_reduce": sums}
        with local_engine(checkpoint, **options) as local:
            for name in sums:
                for index in range(2):
                    message = AddRequest(
                        f"{name} {index}", [3, 4 + index], params({"temperature": 0.0}), allreduce=name
                    )
                    local.engine.add(message)
            outputs = run_to_end(local.engine)
        told.append({name: [token for each in own for token in each.token_ids] for name, own in outputs.items()})
    assert told[0] == told[1]
    assert told[0]["one-shot 0"] != told[0]["flash:int4-g32,int4-g32 0"], "the AllReduces change nothing"


@pytest.mark.parametrize("ranks_each", [1, 2])
def test_adapters_of_requests_change_the_layers_of_each_stage(
    ranks_each: int, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folders = [make_adapter(tmp_path / str(seed), checkpoint.config, seed=seed) for seed in range(2)]
    prompts, told = [[3, 4, 5], [3, 4, 5], [3, 4, 5], list(range(1, 60))], []
    for num_stages in (1, 2):
        stages = _pipeline(num_stages, checkpoint, ranks_each)
        options = _OPTIONS | {"tp": num_stages * ranks_each, "stages": stages, "adapters": folders}
        with local_engine(checkpoint, **options) as local:
            told.append(continue_prompts(local.engine, prompts, [0, 1, 2, 1], max_tokens=12))
    assert told[0] == told[1]
    assert len({*map(tuple, told[0][:3])}) == 3, "an adapter changes nothing"


def test_the_first_rank_of_a_stage_of_several_sends_its_rows(checkpoint: Checkpoint) -> None:
    num_tokens, num_new = 100, 5
    with local_engine(checkpoint, tp=4, stages=_pipeline(2, checkpoint, 2), dtype=torch.bfloat16) as local:
        local.engine.add(
            AddRequest("0", list(range(1, num_tokens + 1)), params({"max_tokens": num_new, "temperature": 0.0}))
        )
        run_to_end(local.engine)
        passages = [runner.stages for runner in local.runners]
    wires = [None if each is None else each.wire for each in passages]
    assert [wire is None for wire in wires] == [False, True, False, True]
    assert wires[0] is not None
    row = checkpoint.config.hidden_size * 4
    sent = sum(count.bytes_sent for count in wires[0].group.ledger.counters.counts())
    assert sent == (num_tokens + num_new - 1) * row
    inside = [
        sum(count.bytes_sent for count in group.ledger.counters.counts() if count.op == "broadcast")
        for group in local.groups
    ]
    assert inside == [0, 0, sent, 0]


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
        assert stages is not None and stages.wire is not None
        num_steps = sum(count.calls for count in stages.wire.group.ledger.counters.counts())
    # A step has at most its group's share of the rows, whenever tokens come back. Each prompt is a step, which may have a group's rows too.
    at_least = math.ceil(num_decoded * num_seqs / math.ceil(num_seqs / num_stages))
    assert num_steps >= at_least, "a group holds sequences of the others"
    assert num_steps <= num_seqs + min(num_stages, num_seqs) * 35, "sequences that start or end apart join a group"


@pytest.mark.parametrize("seed", fuzz_seeds(2))
@pytest.mark.parametrize(("num_stages", "ranks_each"), [(3, 1), (2, 2)])
def test_cancelled_neighbours_change_nothing(
    num_stages: int,
    ranks_each: int,
    seed: int,
    checkpoint: Checkpoint,
    alone: Callable[[torch.dtype | None], dict],
    together: Callable[[torch.dtype | None], dict],
) -> None:
    """Blocks of cancelled and preempted sequences are used again while their rows still pass the stages."""
    rng = random.Random(seed)
    options: dict[str, Any] = _OPTIONS | {"block_size": 4, "num_blocks": 64}
    stages = _pipeline(num_stages, checkpoint, ranks_each)
    with local_engine(checkpoint, tp=num_stages * ranks_each, stages=stages, **options) as local:
        told = tokens_among_neighbours(local.engine, rng)
    answers = alone(None) if ranks_each == 1 else together(None)
    assert told == {name: tokens for name, (tokens, *_) in answers.items()}
