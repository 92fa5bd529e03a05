"""Whole engines with a draft model: the texts are those without it, to the bit, whatever it drafts, and its cache follows."""

import json
import os
import random
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.model.family_models import make_family_folder
from helpers.model.lora import make_adapter
from helpers.model.tiny_gguf import make_tiny_gguf
from helpers.server.draft_engine import SIZES, drafting_engine
from helpers.server.local_engine import LocalEngine, continue_prompts, local_engine, run_to_end
from helpers.server.mixed_requests import mixed_requests, tokens_and_scores
from msgspec.structs import replace
from tiny import make_tiny

from tightwire.kernels.spec.packed import PackedMatrix
from tightwire.model.families import family_named
from tightwire.model.open import Checkpoint, open_checkpoint
from tightwire.model.prepare import PrepareOptions, prepare
from tightwire.model.sampling.grammar import GrammarMasks, make_grammar
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.model.stages import divide_layers
from tightwire.model.step import make_plan
from tightwire.model.weights import WeightPlan
from tightwire.server.ipc.messages import AddRequest, Output

_PROMPTS = [[*range(1, 40)], [5, 6, 7], [9] * 70, [*range(100, 117)]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """A model, and another of its vocabulary."""
    folder = tmp_path_factory.mktemp("draft")
    other: dict[str, Any] = {
        "hidden_size": 48,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "num_hidden_layers": 1,
    }
    return {
        "itself": open_checkpoint(str(make_tiny(folder / "target", num_hidden_layers=3))),
        "another": open_checkpoint(str(make_tiny(folder / "other", seed=5, **other))),
    }


def plain_texts(models: dict[str, Checkpoint], dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    with local_engine(models["itself"], dtype=dtype, max_model_len=256, max_num_seqs=8, **options) as local:
        return run(local)


def run(local: LocalEngine) -> Any:
    greedy = continue_prompts(local.engine, _PROMPTS, max_tokens=24)
    return greedy, continue_prompts(local.engine, _PROMPTS, temperature=1.0, top_p=0.9, seed=7, max_tokens=24)


@pytest.mark.parametrize(
    ("dtype", "draft", "tp"),
    [
        (torch.float32, "itself", 1),
        (torch.bfloat16, "another", 1),
        (torch.float32, "another", 2),
        (torch.bfloat16, "itself", 2),
    ],
)
def test_texts_are_those_without_a_draft_to_the_bit(
    dtype: torch.dtype, draft: str, tp: int, models: dict[str, Checkpoint]
) -> None:
    wanted = plain_texts(models, dtype, tp=tp)
    with drafting_engine(models, draft, dtype, tp=tp) as (local, drafter, _):
        assert run(local) == wanted
        counters = local.engine.stats().counters
        assert counters.num_draft_tokens > 20
        assert counters.num_accepted_draft_tokens < counters.num_draft_tokens  # at least the sampled ones
        drafter.prepare([], 0, 0)
        assert drafter._sequences.pool.num_free == 64, "all have ended"


@pytest.mark.parametrize("kind", ["packed", "windows", "prepared"])
def test_a_draft_of_another_kind_drafts_with_a_part_of_its_head(
    kind: str, models: dict[str, Checkpoint], tmp_path: Path
) -> None:
    """The target in 4 bits; prepared in 8; and a model whose layers have windows, shorter than the texts, which drafts for itself."""
    if kind == "prepared":
        options = PrepareOptions(dtype="float32", quantization="int8")
        prepare(models["itself"], tmp_path / "prepared", options)
        given, num_blocks = models | {"prepared": open_checkpoint(str(tmp_path / "prepared"))}, 64
    elif kind == "packed":
        packed = open_checkpoint(str(make_tiny_gguf(tmp_path / "m.gguf", "Q4_1", num_hidden_layers=3)))
        given, num_blocks = models | {"packed": packed}, 64
    else:
        folder = make_family_folder(family_named("Gemma 3"), tmp_path, max_position_embeddings=512)
        windows = open_checkpoint(str(folder))
        given, num_blocks = {"itself": windows, "windows": windows}, 384  # of six groups
    wanted = plain_texts(given, num_blocks=num_blocks)
    with drafting_engine(given, kind, text=False, num_blocks=num_blocks) as (local, drafter, counting):
        assert isinstance(counting._runner._outer.head, PackedMatrix) == (kind != "windows")
        drafter._head_s_H = np.array([0.2, 0.1, 0.1, 0.1])  # against a step of 1 s
        assert run(local) == wanted
        counters = local.engine.stats().counters
    assert drafter._sizes_H[1] in counting.sizes
    assert counters.num_draft_tokens > 20 and counters.num_accepted_draft_tokens > 0


def test_a_model_that_drafts_for_itself_is_right(models: dict[str, Checkpoint]) -> None:
    with drafting_engine(models, "itself", text=False) as (local, _, counting):
        continue_prompts(local.engine, _PROMPTS[:1], max_tokens=69)
        counters = local.engine.stats().counters
        assert counters.num_accepted_draft_tokens == counters.num_draft_tokens > 50
        assert counters.num_steps < 10, "more tokens each step, the surer they are"
        assert len(counting.rows) == 1 + counters.num_draft_tokens


@pytest.fixture(scope="module")
def alone(models: dict[str, Checkpoint]) -> Callable[[int], dict[str, Any]]:
    """The answer of each of the mixed requests by itself in an engine of so many ranks without drafts, computed once."""

    def compute(tp: int) -> dict[str, Any]:
        answers = {}
        with local_engine(models["itself"], tp=tp, max_model_len=256) as local:
            for request in mixed_requests():
                local.engine.add(request)
                (outputs,) = run_to_end(local.engine).values()
                answers[request.id] = tokens_and_scores(outputs)
        return answers

    return cache(compute)


@pytest.mark.parametrize(
    ("draft", "options"),
    [
        ("another", {"dp": 2, "tp": 2}),
        ("itself", {"num_blocks": 16, "prefix_cache": "none", "text": False}),
        ("itself", {"prefix_cache": "all"}),
        ("another", {"weight_plan": WeightPlan(source="stream", origin="host", streamed=(0, 1, 2))}),
    ],
    ids=["replicas", "preempted", "answers cached", "streamed"],
)
def test_mixed_requests_get_the_text_and_scores_that_each_gets_alone_without_drafts(
    draft: str, options: dict[str, Any], models: dict[str, Checkpoint], alone: Callable[[int], dict[str, Any]]
) -> None:
    """To the bit, in random order, some cancelled."""
    requests, rng = mixed_requests(), random.Random(8)
    with drafting_engine(models, draft, **options) as (local, drafter, _):
        waiting, told, cancelled = list(requests), dict[str, list[Output]](), set[str]()
        while waiting or local.engine.has_work():
            for _ in range(min(len(waiting), rng.randrange(8))):
                local.engine.add(waiting.pop(0))
            for output in local.engine.step().outputs:
                told.setdefault(output.id, []).append(output)
                if output.finish_reason is None and rng.random() < 0.03:
                    local.engine.cancel([output.id])
                    cancelled.add(output.id)
        counters = local.engine.stats().counters
        drafter.prepare([], 0, 0)
        assert drafter._sequences.pool.num_free == drafter._limits.num_blocks, "blocks of ended sequences are free"
    assert counters.num_draft_tokens > 0 and cancelled
    assert counters.num_preemptions > 0 or "num_blocks" not in options
    wanted = alone(options.get("tp", 1))
    for name, outputs in told.items():
        for own, whole in zip(tokens_and_scores(outputs), wanted[name], strict=True):
            assert own == whole[: len(own)], name
            assert name in cancelled or len(own) == len(whole), name


_SCHEMA = {
    "type": "object",
    "properties": {
        "word": {"type": "string", "maxLength": 5},
        "flag": {"type": "boolean"},
        "age": {"type": "integer", "maximum": 99},
    },
    "required": ["word", "flag", "age"],
    "additionalProperties": False,
}


def _constrained_requests() -> list[AddRequest]:
    """A prompt with n = 3, greedy and with seeds, in JSON by a schema and free, with each of two adapters and without."""
    schema, prompt = make_grammar("json", _SCHEMA), list(b"Write about Ida.")
    kinds: dict[str, dict[str, Any]] = {
        "json": {"grammar": schema, "temperature": 0.0, "max_tokens": 60},
        **{
            f"json-{seed}": {"grammar": schema, "temperature": 1.0, "seed": seed, "max_tokens": 60}
            for seed in (1, 2, 3)
        },
        "choice": {
            "grammar": make_grammar("choice", ["abcabc", "abd"]),
            "temperature": 1.0,
            "seed": 3,
            "max_tokens": 9,
        },
        "greedy": {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, "logprobs": 1},
        **{f"n-{seed}": {"temperature": 1.0, "seed": seed, "max_tokens": 20, "ignore_eos": True} for seed in (1, 2, 3)},
    }
    return [
        AddRequest(f"{name}@{adapter}", prompt, SamplingParams(**params), adapter=adapter)
        for adapter in range(3)
        for name, params in kinds.items()
    ]


_LAYOUTS: dict[str, Any] = {
    "tensor": {"tp": 2},
    "pipeline": {"tp": 2, "stages": replace(divide_layers(3, [1, 1]), pipeline=True)},
    "hybrid": {"tp": 4, "stages": replace(divide_layers(3, [1, 1]), ranks_each=2)},
}


@pytest.mark.parametrize(("layout", "draft"), [("tensor", "another"), ("pipeline", "itself"), ("hybrid", "itself")])
def test_grammars_adapters_and_n_have_the_text_without_drafts_in_any_batch(
    layout: str, draft: str, models: dict[str, Checkpoint], tmp_path: Path
) -> None:
    """Together without drafts, a quarter of them alone with drafts, and all together in random order."""
    pytest.importorskip("llguidance")
    adapters = [make_adapter(tmp_path / f"{i}", models["itself"].config, seed=i) for i in (1, 2)]
    requests = _constrained_requests()
    options: dict[str, Any] = {"adapters": adapters, "grammars": _masks(models["itself"]), **_LAYOUTS[layout]}
    with local_engine(models["itself"], **(SIZES | options)) as local:
        wanted = _run_together(local, requests)
    with drafting_engine(models, draft, **options) as (local, drafter, _):
        assert all(_run_together(local, [request])[request.id] == wanted[request.id] for request in requests[::4])
        together = _run_together(local, random.Random(layout).sample(requests, len(requests)))
        counters = local.engine.stats().counters
        drafter.prepare([], 0, 0)
        assert drafter._sequences.pool.num_free == drafter._limits.num_blocks, "blocks of ended sequences are free"
    assert together == wanted
    assert counters.num_draft_tokens > 50
    assert counters.num_accepted_draft_tokens > 5 or draft == "another"
    decode = models["itself"].tokenizer().decode
    whole = [decode(tokens) for name, (tokens, reason) in wanted.items() if "json" in name and reason == "stop"]
    assert whole and all(json.loads(text).keys() == _SCHEMA["properties"].keys() for text in whole)


def _masks(checkpoint: Checkpoint) -> GrammarMasks:
    config = checkpoint.config
    return GrammarMasks(config.vocab_size, config.eos_token_ids, checkpoint.tokenizer().backend.to_str)


def _run_together(local: LocalEngine, requests: list[AddRequest]) -> dict[str, tuple[list[int], str | None]]:
    for request in requests:
        local.engine.add(request)
    return {name: _told(outputs) for name, outputs in run_to_end(local.engine).items()}


def _told(outputs: list[Output]) -> tuple[list[int], str | None]:
    return [token for output in outputs for token in output.token_ids], outputs[-1].finish_reason


@pytest.mark.parametrize("text", [True, False])
def test_drafts_follow_the_grammar(text: bool, models: dict[str, Checkpoint]) -> None:
    pytest.importorskip("llguidance")
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=1, grammar=make_grammar("regex", "[ab]{99}"))
    with drafting_engine(models, "another", text=text, grammars=_masks(models["itself"])) as (local, drafter, _):
        drafter.grammars, draft, drafted = local.engine._sampler.grammars, drafter.draft, list[int]()
        drafter.draft = lambda *given: drafted.extend(found := draft(*given)) or found  # type: ignore[method-assign]
        local.engine.add(AddRequest("ab", list(b"abxabyab"), params))
        run_to_end(local.engine)
    assert len(drafted) > 10 and {*drafted} <= {*b"ab"}


def test_a_model_of_fewer_ids_of_padding_drafts_behind_any_prompt_and_under_a_grammar(
    tmp_path: Path, models: dict[str, Checkpoint]
) -> None:
    wide: Any = {"itself": open_checkpoint(str(make_tiny(tmp_path, vocab_size=320))), "another": models["another"]}
    with drafting_engine(wide, "another", text=False) as (local, drafter, _):
        drafter.measure()
        drafter.grammars = SimpleNamespace(banned=lambda request, draft: [~np.eye(320, dtype=bool)[7]])  # type: ignore[assignment]
        drafter._rates = [1.0] * len(drafter._rates)
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        prepare, draft, drafted = drafter.prepare, drafter.draft, list[int]()

        def as_with_a_grammar(requests: Any, *step: int) -> None:
            for each in requests:
                each.params = replace(params, grammar="x")
            prepare(requests, *step)
            for each in requests:
                each.params = params

        drafter.prepare = as_with_a_grammar  # type: ignore[method-assign]
        drafter.draft = lambda *given: drafted.extend(found := draft(*given)) or found  # type: ignore[method-assign]
        continue_prompts(local.engine, [[5, 319, 6]], max_tokens=9)
    assert drafted and {*drafted} == {7}


def test_prompts_are_caught_up_a_step_at_a_time(models: dict[str, Checkpoint]) -> None:
    with drafting_engine(models, "itself") as (local, _, counting):
        continue_prompts(local.engine, [[7] * 200], max_tokens=40)
        counters = local.engine.stats().counters
        assert max(counting.rows) <= 48
        assert counters.num_accepted_draft_tokens > 10


def test_steps_of_a_pipeline_take_no_less_than_no_time_when_others_are_cancelled(models: dict[str, Checkpoint]) -> None:
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    with drafting_engine(models, "itself", **_LAYOUTS["pipeline"]) as (local, drafter, counting):
        execute = counting.execute
        counting.execute = lambda *given: (time.sleep(0.02), execute(*given))[1]  # type: ignore[method-assign]
        learned, learn = list[float](), drafter.times.learn
        drafter.times.learn = lambda *given: (learned.append(given[1]), learn(*given))[1]  # type: ignore[method-assign]
        for name in range(6):
            local.engine.add(AddRequest(str(name), [5 + name, 6, 7], params))
        others = [str(name) for name in range(1, 6)]
        while local.engine.has_work():
            if not local.engine.step().outputs and others:
                local.engine.cancel([others.pop()])
        assert not others and counting.rows and learned and min(learned) >= 0


def test_no_prompt_waits_for_the_model(models: dict[str, Checkpoint]) -> None:
    """A long prompt beside a sequence that has drafts before it, after it and not meanwhile."""
    params = SamplingParams(max_tokens=56, temperature=0.0, ignore_eos=True)
    short, long = AddRequest("short", [5, 6, 7], params), AddRequest("long", [7 * i % 200 for i in range(200)], params)
    with local_engine(models["itself"], **SIZES) as local:
        wanted = _run_together(local, [short]) | _run_together(local, [long])
    steps = list[tuple[bool, int]]()  # with sequences that may have drafts: beside a prompt, and the model's rows
    with drafting_engine(models, "itself", text=False) as (local, drafter, counting):
        prepare = drafter.prepare

        def recorded(requests: Any, num_rows: int, num_seqs: int) -> None:
            before = len(counting.rows)
            prepare(requests, num_rows, num_seqs)
            if requests:
                steps.append((num_rows > 2 * num_seqs, sum(counting.rows[before:])))

        drafter.prepare = recorded  # type: ignore[method-assign]
        local.engine.add(short)
        early = [output for _ in range(3) for output in local.engine.step().outputs]
        local.engine.add(long)
        told = run_to_end(local.engine)
    told["short"] = early + told["short"]
    assert {name: _told(outputs) for name, outputs in told.items()} == wanted
    beside = [number for number, (is_beside, _) in enumerate(steps) if is_beside]
    assert len(beside) >= 4 and not any(steps[number][1] for number in beside)
    assert any(rows for _, rows in steps[: beside[0]]) and any(rows for _, rows in steps[beside[-1] + 1 :])


def test_a_draft_that_is_never_right_is_seldom_asked(models: dict[str, Checkpoint]) -> None:
    with drafting_engine(models, "another", token_s=0.5, text=False) as (local, _, counting):
        continue_prompts(local.engine, _PROMPTS[1:2], max_tokens=250)
        assert 4 < local.engine.stats().counters.num_draft_tokens < 40
        assert len(counting.rows) < 60, "nor does it follow the text meanwhile"


def test_a_second_answer_finds_the_prompt_in_the_drafts_cache(models: dict[str, Checkpoint]) -> None:
    rows = []
    for salt in ("", "of one's own"):
        with drafting_engine(models, "itself", num_blocks=64) as (local, _, counting):
            for name in ("first", "second"):
                params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
                local.engine.add(AddRequest(name, [3] * 150, params, cache_salt=salt if name == "second" else ""))
                run_to_end(local.engine)
            rows.append(sum(counting.rows))
    assert rows[0] + 100 < rows[1], "another salt shares nothing"


def test_a_pass_chooses_among_the_first_ids_while_tokens_are_there(models: dict[str, Checkpoint]) -> None:
    wanted = plain_texts(models)
    with drafting_engine(models, "itself") as (local, drafter, counting):
        drafter._head_s_H = np.array([0.2, 0.1, 0.1, 0.1])  # against a step of 1 s
        assert run(local) == wanted
        assert drafter._sizes_H[1] in counting.sizes
        beyond = SimpleNamespace(
            token_ids=[counting.num_ids - 1], draft_classes=[], draft_basis=(0, []), draft_rates=[]
        )
        for _ in range(200):
            drafter.learn(beyond, 1, 0, beyond.token_ids)  # pyright: ignore[reportArgumentType]
        drafter.prepare([], 1, 1)
        assert drafter._size == counting.num_ids


def test_the_first_ids_have_their_logits_on_all_cores(models: dict[str, Checkpoint]) -> None:
    rows: dict[str, Any] = {name: [1] for name in ("token_ids", "query_lens", "context_lens")}
    with drafting_engine(models, "itself") as (_, _, counting):
        plan, own = make_plan(**rows, block_tables=[[0]], num_decode_rows=1, logit_rows=[0]), os.sched_getaffinity(0)
        whole = counting._runner.execute(plan)
        counting._runner._cores = {min(own)}
        first = counting._runner.execute(plan, 32)
        assert whole is not None and first is not None and os.sched_getaffinity(0) == own
        torch.testing.assert_close(first, whole[:, :32], rtol=0, atol=1e-5)
