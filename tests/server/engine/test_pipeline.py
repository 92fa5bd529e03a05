"""Steps planned ahead: the same answers, deferred tokens filled in, unneeded rows dropped."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.comm.collective_bytes import broadcast_bytes
from helpers.server.fake_runner import FakeRunner, greedy_tokens
from helpers.server.local_engine import continue_prompts, local_engine, run_to_end
from tiny import VARIANTS, make_tiny
from torch import Tensor

from tightwire.model.open import Checkpoint, open_checkpoint
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.model.sampling.sampler import Choice, Sampled, Sampler
from tightwire.model.step import StepPlan, ints
from tightwire.server.config.limits import Limits
from tightwire.server.engine.drafts import Drafter
from tightwire.server.engine.engine import Engine
from tightwire.server.engine.pipeline import NewTokens
from tightwire.server.engine.request import RequestRules, make_request
from tightwire.server.engine.step_builder import Chunk
from tightwire.server.ipc.messages import AddRequest, Output

VOCAB = 61
greedy = partial(greedy_tokens, vocab_size=VOCAB)
ROOMY = Limits(max_model_len=96, max_num_seqs=8, max_num_batched_tokens=64, num_blocks=200, block_size=4)


def make_engine(runner: FakeRunner, limits: Limits = ROOMY, **options: Any) -> Engine:
    parts: dict[str, Any] = {"sampler": Sampler(VOCAB), "plan_ahead": True}
    rules = RequestRules(vocab_size=VOCAB, max_model_len=limits.max_model_len)
    return Engine(runner=runner, limits=limits, rules=rules, **(parts | options))


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | changes))


def tokens_of(outputs: Sequence[Output]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def test_what_a_grammar_forces_was_not_drafted() -> None:
    request = make_request(AddRequest("a", [1, 2], params()), (), 0.0)
    new = NewTokens(Chunk(request, 1, 2, range(0), True, [5, 6, 7]), 0)
    for token_id in (5, 9):
        new.add(token_id, None)
    new.add_forced([7, 7])
    assert new.token_ids == [5, 9, 7, 7] and new.chosen == [5, 9] and new.num_right == 1


class _Watched(FakeRunner):
    """Notes in ``seen`` when it runs a step."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__(ROOMY, VOCAB)
        self._seen = seen

    def execute(self, plan: StepPlan, chosen_R: Tensor | None = None) -> Tensor | None:
        self._seen.append(f"run {plan.index}")
        return super().execute(plan, chosen_R)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a ``_Watched`` runner ran, and when a step's tokens were waited for."""
    seen: list[str] = []
    made: list[Choice] = []

    class Watched(Choice):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

        def wait(self) -> Sampled:
            seen.append(f"wait {1 + made.index(self)}")
            return super().wait()

    monkeypatch.setattr("tightwire.server.engine.pipeline.Choice", Watched)
    return seen


@pytest.mark.parametrize("plan_ahead", [False, True])
def test_a_step_is_launched_before_its_predecessor_is_waited_for(plan_ahead: bool, seen: list[str]) -> None:
    engine = make_engine(_Watched(seen), plan_ahead=plan_ahead)
    engine.add(AddRequest("a", [5, 6], params(max_tokens=3)))
    told = []
    while engine.has_work():
        told.append(tokens_of(engine.step().outputs))
        seen.append("tell")
    in_turn = ["run 1", "wait 1", "tell", "run 2", "wait 2", "tell", "run 3", "wait 3", "tell"]
    ahead = ["run 1", "run 2", "wait 1", "tell", "run 3", "wait 2", "tell", "wait 3", "tell"]
    assert seen == (ahead if plan_ahead else in_turn)
    assert told == [[token_id] for token_id in greedy([5, 6], 3)]
    assert engine.stats().counters.num_steps_ahead == (2 if plan_ahead else 0)


def test_deferred_tokens_are_numbered_by_their_row() -> None:
    """A chunked prompt chooses no token for two steps; only rows with a choice are numbered."""
    runner = FakeRunner(ROOMY, VOCAB)
    engine = make_engine(runner, Limits(**{**_values(ROOMY), "max_num_batched_tokens": 8}))
    engine.add(AddRequest("a", [5, 6], params()))
    engine.add(AddRequest("b", [7], params(max_tokens=3)))
    engine.step()
    engine.add(AddRequest("long", [9] * 12, params()))
    run_to_end(engine)
    rows = [ints(plan.token_ids).tolist() for plan in runner.plans]
    assert rows[:6] == [[5, 6, 7], [-1, -2], [-1, -2, *[9] * 6], [-1, *[9] * 6], [-1, -2], [-1, -2]]


def _values(limits: Limits) -> dict[str, Any]:
    return {name: getattr(limits, name) for name in limits.__dataclass_fields__}


def test_a_row_after_a_stop_token_is_dropped() -> None:
    text = greedy([5, 6], 12)
    runner = FakeRunner(ROOMY, VOCAB)
    engine = make_engine(runner)
    engine.add(AddRequest("stops", [5, 6], params(max_tokens=12, stop_token_ids=(text[3],))))
    engine.add(AddRequest("goes on", [8], params(max_tokens=7)))
    outputs = run_to_end(engine)
    assert tokens_of(outputs["stops"]) == text[:4] and outputs["stops"][-1].finish_reason == "stop"
    assert tokens_of(outputs["goes on"]) == greedy([8], 7)
    assert [len(ints(plan.query_lens)) for plan in runner.plans] == [2] * 5 + [1] * 2  # the fifth's for nothing
    stats = engine.stats()
    assert (stats.counters.num_generation_tokens, stats.total.num_free_blocks) == (4 + 7, ROOMY.num_blocks)


def test_a_step_whose_sequences_all_ended_is_not_waited_for(seen: list[str]) -> None:
    engine = make_engine(_Watched(seen))
    text = greedy([5, 6], 2)
    engine.add(AddRequest("a", [5, 6], params(stop_token_ids=(text[1],))))
    outputs = run_to_end(engine)
    assert tokens_of(outputs["a"]) == text
    assert seen == ["run 1", "run 2", "wait 1", "run 3", "wait 2"]
    engine.add(AddRequest("a", [8], params(max_tokens=2)))
    assert tokens_of(run_to_end(engine)["a"]) == greedy([8], 2)
    assert engine.stats().counters.num_steps_ahead == 3  # the first step of the new one was behind nothing


def test_a_reused_id_gets_no_tokens_of_its_predecessor() -> None:
    engine = make_engine(FakeRunner(ROOMY, VOCAB))
    engine.add(AddRequest("a", [5, 6], params(max_tokens=30)))
    engine.add(AddRequest("other", [8], params(max_tokens=9)))
    outputs = [*engine.step().outputs, *engine.step().outputs]
    engine.cancel(["a"])
    engine.add(AddRequest("a", [9], params(max_tokens=3)))
    later = run_to_end(engine)
    assert later["a"][0].finish_reason == "cancelled"
    assert tokens_of(later["a"]) == greedy([9], 3)
    others = [output for output in outputs if output.id == "other"] + later["other"]
    assert tokens_of(others) == greedy([8], 9)


def test_a_row_after_nan_logits_is_dropped() -> None:
    class Broken(FakeRunner):
        def execute(self, plan: StepPlan, chosen_R: Tensor | None = None) -> Tensor | None:
            logits_RV = super().execute(plan, chosen_R)
            if logits_RV is not None and plan.index == 2:
                logits_RV[0] = float("nan")
            return logits_RV

    runner = Broken(ROOMY, VOCAB)
    engine = make_engine(runner)
    engine.add(AddRequest("bad", [5, 6], params(temperature=1.0, top_p=0.9)))
    engine.add(AddRequest("good", [8], params()))
    outputs = run_to_end(engine)
    assert [output.finish_reason for output in outputs["bad"]] == [None, "error"]
    assert tokens_of(outputs["good"]) == greedy([8], 8)
    assert (
        ints(runner.plans[2].token_ids).tolist() == [-1, -2]
        and engine.stats().total.num_free_blocks == ROOMY.num_blocks
    )


@pytest.mark.parametrize("prefix_cache", ["prompts", "all"])
def test_a_block_with_a_deferred_token_is_not_shared(prefix_cache: str) -> None:
    """Generated tokens fill blocks of four; a later request with the same text finds the right ones."""
    limits = Limits(**{**_values(ROOMY), "prefix_cache": prefix_cache})
    runner = FakeRunner(limits, VOCAB)
    engine = make_engine(runner, limits)
    engine.add(AddRequest("a", [5, 6, 7], params(max_tokens=14)))
    text = tokens_of(run_to_end(engine)["a"])
    assert text == greedy([5, 6, 7], 14)
    engine.add(AddRequest("b", [5, 6, 7, *text], params(max_tokens=2)))
    (first, second) = run_to_end(engine)["b"]
    assert first.num_cached_tokens == (16 if prefix_cache == "all" else 0)
    assert tokens_of([first, second]) == greedy([5, 6, 7, *text], 2)


@pytest.mark.parametrize(
    "changes",
    [{"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.5}],
    ids=lambda changes: next(iter(changes)),
)
def test_no_step_ahead_of_penalties(changes: dict[str, float]) -> None:
    answers = []
    for plan_ahead in (False, True):
        engine = make_engine(FakeRunner(ROOMY, VOCAB), plan_ahead=plan_ahead)
        engine.add(AddRequest("a", [5, 6], params(**changes)))
        engine.add(AddRequest("b", [7], params(max_tokens=20)))
        answers.append({name: tokens_of(outputs) for name, outputs in run_to_end(engine).items()})
    assert answers[0] == answers[1]
    assert engine.stats().counters.num_steps_ahead == 20 - 8 - 1  # once it has ended


def test_no_step_ahead_of_scored_prompts() -> None:
    limits = Limits(**{**_values(ROOMY), "max_num_batched_tokens": 8})
    engine = make_engine(FakeRunner(limits, VOCAB), limits)
    engine.add(AddRequest("a", [5] * 20, params(prompt_logprobs=1, max_tokens=4)))
    run_to_end(engine)
    assert (engine.stats().counters.num_steps, engine.stats().counters.num_steps_ahead) == (3 + 3, 2)


def test_no_step_ahead_of_possible_drafts() -> None:
    limits = Limits(**{**_values(ROOMY), "max_drafting_seqs": 1})
    engine = make_engine(FakeRunner(limits, VOCAB), limits, drafter=Drafter(max_tokens=3, longest=2, shortest=1))
    engine.add(AddRequest("alone", [5, 6, 5], params(max_tokens=60)))
    run_to_end(engine)
    assert engine.stats().counters.num_steps_ahead == 0 and engine.stats().counters.num_draft_tokens > 0
    for name in "ab":
        engine.add(AddRequest(name, [5, 6, 5], params()))
    texts = {name: tokens_of(outputs) for name, outputs in run_to_end(engine).items()}
    assert texts == dict.fromkeys("ab", greedy([5, 6, 5], 8))
    assert engine.stats().counters.num_steps_ahead > 0


def test_a_step_ahead_preempts_nobody() -> None:
    """Two sequences fill the pool when the older one is about to end: the step waits for its blocks."""
    limits = Limits(max_model_len=24, max_num_seqs=2, max_num_batched_tokens=24, num_blocks=6, block_size=4)
    engine = make_engine(FakeRunner(limits, VOCAB), limits)
    stop = greedy([5] * 3, 10)[9]
    engine.add(AddRequest("old", [5] * 3, params(max_tokens=21, stop_token_ids=(stop,))))
    engine.add(AddRequest("young", [7] * 3, params(max_tokens=14)))
    outputs = run_to_end(engine)
    assert len(tokens_of(outputs["old"])) == 10 and tokens_of(outputs["young"]) == greedy([7] * 3, 14)
    stats = engine.stats()
    assert stats.counters.num_preemptions == 0 and stats.counters.num_steps == 14
    assert 0 < stats.counters.num_steps_ahead < 13


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(make_tiny(tmp_path_factory.mktemp("ahead"), **VARIANTS["odd-heads"])))


def _answers(
    checkpoint: Checkpoint, tp: int, plan_ahead: bool, **options: Any
) -> tuple[dict[str, tuple[Any, ...]], Engine]:
    """All outputs of requests of all kinds, without times."""
    stem = [72, 101, 108, 108, 111] * 5
    requests = [
        ("greedy", [5, 9, 200], {"temperature": 0.0}),
        ("stops", [3, 17], {"temperature": 0.0, "stop_token_ids": tuple(range(40, 160)), "min_tokens": 4}),
        ("long", list(range(40, 140)), {"temperature": 0.0, "logprobs": 2}),
        *((f"n{index}", stem, {"temperature": 1.0, "seed": index}) for index in range(3)),
        ("top-p", stem, {"temperature": 1.5, "top_p": 0.9, "seed": 3, "logprobs": 0}),
        ("top-k", [8, 8], {"temperature": 1.0, "top_k": 9, "seed": 4, "min_tokens": 5}),
        ("biased", [8, 9], {"temperature": 1.0, "min_p": 0.01, "seed": 4, "logit_bias": {7: 3.0}}),
        ("penalized", [8, 10], {"temperature": 0.7, "seed": 5, "frequency_penalty": 0.8, "max_tokens": 9}),
        ("echo", stem[:9], {"temperature": 0.0, "prompt_logprobs": 1, "max_tokens": 3}),
        ("scored", stem[:7], {"prompt_logprobs": 0, "max_tokens": 0}),
    ]
    with local_engine(
        checkpoint, tp=tp, dtype=torch.bfloat16, max_model_len=256, plan_ahead=plan_ahead, **options
    ) as local:
        for name, prompt, changes in requests:
            message = AddRequest(name, prompt, SamplingParams(**({"max_tokens": 30, "ignore_eos": True} | changes)))
            local.engine.add(message)
        outputs = run_to_end(local.engine)
    told = {
        name: (
            tokens_of(outputs[name]),
            [entry for output in outputs[name] for entry in output.logprobs or []],
            [output.prompt_logprobs for output in outputs[name] if output.prompt_logprobs],
            outputs[name][-1].finish_reason,
            outputs[name][-1].stop_token_id,
            outputs[name][0].num_cached_tokens > 0,
        )
        for name, _, _ in requests
    }
    return told, local.engine


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_answers_of_a_real_model_are_bit_identical(tp: int, checkpoint: Checkpoint) -> None:
    options: dict[str, Any] = {"max_num_batched_tokens": 48, "max_num_seqs": 12}
    (wanted, _), (told, engine) = (_answers(checkpoint, tp, plan_ahead, **options) for plan_ahead in (False, True))
    assert told == wanted
    stats = engine.stats()
    assert (
        stats.counters.num_steps_ahead > stats.counters.num_steps // 2
        and stats.total.num_free_blocks == stats.total.num_blocks
    )
    assert wanted["stops"][3] == "stop" and len(wanted["stops"][0]) > 1


def test_answers_are_the_same_with_preemptions(checkpoint: Checkpoint) -> None:
    options: dict[str, Any] = {"num_blocks": 17, "max_num_seqs": 6, "max_num_batched_tokens": 24}
    (wanted, _), (told, engine) = (_answers(checkpoint, 2, plan_ahead, **options) for plan_ahead in (False, True))
    assert told == wanted
    stats = engine.stats()
    assert (
        stats.counters.num_preemptions > 0
        and stats.counters.num_steps_ahead > 0
        and stats.total.num_free_blocks == stats.total.num_blocks
    )


def test_a_seed_has_one_text_on_any_number_of_ranks(checkpoint: Checkpoint) -> None:
    filters = [
        {},
        {"top_p": 0.9},
        {"min_p": 0.02},
        {"top_k": 20, "top_p": 0.8},
        {"presence_penalty": 0.5, "top_p": 0.9},
    ]
    texts = []
    for tp in (1, 2, 3):
        with local_engine(checkpoint, tp=tp, max_model_len=256) as local:
            settings = [{"temperature": 1.2, "seed": 3, "max_tokens": 16, **changes} for changes in filters]
            texts.append([continue_prompts(local.engine, [[5, 9], [7, 80, 3]], **each) for each in settings])
    assert texts[0] == texts[1] == texts[2]
    assert all(len(set(first)) > 6 for first, _ in texts[0])


def test_rank_0_sends_the_tokens_it_chose_and_they_are_counted(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_tiny(tmp_path)))
    with local_engine(checkpoint, tp=2, max_model_len=256, plan_ahead=True) as local:
        for group in local.groups:
            group.ledger.recording.start()
        continue_prompts(local.engine, [[1, 2, 3], [4]], max_tokens=6)
    for rank, group in enumerate(local.groups):
        events = [event for event in group.ledger.recording.stop() if event.op == "broadcast"]
        assert {(event.site, event.phase, event.message_bytes) for event in events} == {("chosen", "decode", 8)}
        assert len(events) == 5
        assert [event.bytes_sent for event in events] == [broadcast_bytes(rank, 2, 2, 4)] * 5
