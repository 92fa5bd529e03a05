import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from helpers.server.fake_runner import FakeRunner, OneRank, greedy_tokens, logits_after
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny import banned_ids
from torch import Tensor

from tightwire.comm.ledger.ledger import Count, Spent
from tightwire.model.sampling.parameters import SamplingParams, TokenScore
from tightwire.model.sampling.sampler import Sampler
from tightwire.model.step import StepPlan
from tightwire.server.config.limits import Limits
from tightwire.server.engine.drafts import Drafter
from tightwire.server.engine.engine import Engine
from tightwire.server.engine.request import Request, RequestRules
from tightwire.server.ipc.engine_stats import RankCounts
from tightwire.server.ipc.messages import AddRequest, FirstToken, Output, PromptProgress

VOCAB = 61
greedy = partial(greedy_tokens, vocab_size=VOCAB)
EOS = 2
ROOMY = Limits(max_model_len=96, max_num_seqs=8, max_num_batched_tokens=64, num_blocks=200, block_size=4)


PLANNING: dict[str, Any] = {}


@pytest.fixture(params=[False, True], ids=["one-by-one", "ahead"], autouse=True)
def plan_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Every test here runs with and without planning ahead."""
    monkeypatch.setitem(PLANNING, "plan_ahead", request.param)
    return request.param


def make_engine(limits: Limits = ROOMY, *, policies: Sequence[str] = ("auto",), **options: Any) -> Engine:
    parts: dict[str, Any] = {"runner": FakeRunner(limits, VOCAB), "sampler": Sampler(VOCAB)} | PLANNING
    rules = RequestRules(
        vocab_size=VOCAB, max_model_len=limits.max_model_len, policies=policies, eos_token_ids=frozenset([EOS])
    )
    return Engine(**(parts | options), limits=limits, rules=rules)


class OddGuesses(Drafter):
    """Guesses (text length modulo four) right tokens, then wrong ones."""

    def draft(self, request: Request, room: int, num_rows: int = 1, num_seqs: int = 1) -> list[int]:
        text = list(request.token_ids)
        right = greedy(text, len(text) % 4)
        return [*right, (len(text) * 7) % VOCAB][: max(0, room)]


ODD_GUESSES = OddGuesses(max_tokens=4, longest=1, shortest=1)
SUFFIX = Drafter(max_tokens=6, longest=8, shortest=1, num_places=8)


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | changes))


@dataclass
class Answer:
    """All outputs of one request, joined."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenScore] = field(default_factory=list)
    prompt_logprobs: list[TokenScore | None] | None = None
    finish_reason: str | None = None
    stop_token_id: int | None = None
    message: str | None = None
    queue_s: float | None = None

    def take(self, output: Output) -> None:
        assert self.finish_reason is None, "an output after the last"
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "prompt logprobs twice"
            self.prompt_logprobs = output.prompt_logprobs
        if output.queue_s is not None:
            assert self.queue_s is None
            self.queue_s = output.queue_s
        self.finish_reason, self.stop_token_id, self.message = (
            output.finish_reason,
            output.stop_token_id,
            output.message,
        )


def drain(engine: Engine, answers: dict[str, Answer], max_steps: int = 3000) -> None:
    for _ in range(max_steps):
        if not engine.has_work():
            return
        for output in engine.step().outputs:
            answers.setdefault(output.id, Answer()).take(output)
    raise AssertionError("the engine does not come to an end")


def alone(message: AddRequest, **options: Any) -> Answer:
    engine, answers = make_engine(**options), {}
    engine.add(message)
    drain(engine, answers)
    return answers[message.id]


def test_greedy_text() -> None:
    answer = alone(AddRequest("a", [5, 6, 7], params(max_tokens=20)))
    assert answer.token_ids == greedy([5, 6, 7], 20)
    assert answer.finish_reason == "length" and answer.queue_s is not None and answer.queue_s >= 0
    assert answer.logprobs == [] and answer.prompt_logprobs is None


def test_chunked_prefill_gives_the_same_text() -> None:
    prompt = [i % VOCAB for i in range(3, 53)]
    limits = Limits(max_model_len=96, max_num_seqs=2, max_num_batched_tokens=7, num_blocks=24, block_size=4)
    engine, answers = make_engine(limits), {}
    engine.add(AddRequest("a", prompt, params()))
    drain(engine, answers)
    assert answers["a"].token_ids == greedy(prompt, 8)
    assert engine.stats().counters.num_steps == 8 + 7


def test_new_request_joins_at_the_next_step_that_is_planned(plan_ahead: bool) -> None:
    engine, answers = make_engine(), {}
    engine.add(AddRequest("a", [5], params(max_tokens=10)))
    engine.step()
    engine.add(AddRequest("b", [9], params(max_tokens=3)))
    if plan_ahead:  # that one is on its way
        assert {output.id for output in engine.step().outputs} == {"a"}
    assert {output.id for output in engine.step().outputs} == {"a", "b"}
    drain(engine, answers)
    assert answers["b"].token_ids == greedy([9], 3)[1:]


def test_stop_tokens() -> None:
    text = greedy([5, 6], 12)
    stop = text[4]
    first = text.index(stop)
    answer = alone(AddRequest("a", [5, 6], params(max_tokens=12, stop_token_ids=(stop,))))
    assert answer.token_ids == text[: first + 1]
    assert (answer.finish_reason, answer.stop_token_id) == ("stop", stop)


def test_eos_stops_unless_ignored() -> None:
    bias = {EOS: 100.0}
    stopped = alone(AddRequest("a", [5, 6], params(logit_bias=bias, ignore_eos=False)))
    assert (stopped.token_ids, stopped.finish_reason, stopped.stop_token_id) == ([EOS], "stop", EOS)
    ignored = alone(AddRequest("a", [5, 6], params(logit_bias=bias)))
    assert (ignored.token_ids, ignored.finish_reason) == ([EOS] * 8, "length")


def test_min_tokens_bans_every_stop() -> None:
    wanted = params(logit_bias={EOS: 100.0, 9: 90.0}, stop_token_ids=(9,), ignore_eos=False, min_tokens=3)
    answer = alone(AddRequest("a", [5, 6], wanted))
    assert len(answer.token_ids) == 4 and not {EOS, 9} & set(answer.token_ids[:3])
    assert (answer.token_ids[3], answer.finish_reason) == (EOS, "stop")


def test_last_token_that_is_a_stop_is_a_stop() -> None:
    answer = alone(AddRequest("a", [5, 6], params(max_tokens=1, logit_bias={EOS: 100.0}, ignore_eos=False)))
    assert (answer.token_ids, answer.finish_reason) == ([EOS], "stop")


def check_prompt_logprobs(prompt: list[int], entries: list[TokenScore | None] | None, top_n: int) -> None:
    assert entries is not None and len(entries) == len(prompt) and entries[0] is None
    for i, entry in enumerate(entries[1:], start=1):
        logits = logits_after(prompt[:i], VOCAB).astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum())
        order = np.argsort(-logprobs, kind="stable").tolist()
        assert entry is not None and entry.token_id == prompt[i]
        assert entry.logprob == pytest.approx(logprobs[prompt[i]], abs=1e-5)
        assert entry.rank == order.index(prompt[i]) + 1
        assert [token_id for token_id, _ in entry.top] == order[:top_n]
        assert [logprob for _, logprob in entry.top] == pytest.approx(logprobs[order[:top_n]].tolist(), abs=1e-5)


@pytest.mark.parametrize("budget", [3, 7, 64])  # with 7 the last step has one row, which scores nothing
@pytest.mark.parametrize("max_tokens", [0, 4])
def test_prompt_logprobs(budget: int, max_tokens: int) -> None:
    prompt = [i * 7 % VOCAB for i in range(1, 30)]
    limits = Limits(max_model_len=96, max_num_seqs=2, max_num_batched_tokens=budget, num_blocks=24, block_size=4)
    engine, answers = make_engine(limits), {}
    engine.add(AddRequest("a", prompt, params(max_tokens=max_tokens, prompt_logprobs=3)))
    drain(engine, answers)
    check_prompt_logprobs(prompt, answers["a"].prompt_logprobs, top_n=3)
    assert answers["a"].token_ids == greedy(prompt, max_tokens)
    assert answers["a"].finish_reason == "length" and answers["a"].queue_s is not None
    assert engine.stats().counters.num_prompt_tokens == 29


def test_echo_of_nothing_to_score_needs_no_step() -> None:
    engine, answers = make_engine(), {}
    engine.add(AddRequest("a", [5], params(max_tokens=0, prompt_logprobs=1)))
    engine.add(AddRequest("b", [5, 6], params(max_tokens=0)))
    drain(engine, answers)
    assert answers["a"].prompt_logprobs == [None] and answers["b"].prompt_logprobs is None
    assert answers["a"].finish_reason == answers["b"].finish_reason == "length"
    assert engine.stats().counters.num_steps == 0


def test_logprobs_of_chosen_tokens_are_of_the_unmodified_distribution() -> None:
    answer = alone(AddRequest("a", [5, 6], params(max_tokens=3, logprobs=2, logit_bias={11: 50.0})))
    assert answer.token_ids == [11, 11, 11]
    check_prompt_logprobs([5, 6, 11, 11, 11], [None, answer_entry(6), *answer.logprobs], top_n=2)


def answer_entry(token_id: int) -> TokenScore:
    scored = alone(AddRequest("a", [5, token_id], params(max_tokens=0, prompt_logprobs=2))).prompt_logprobs
    assert scored is not None and scored[1] is not None
    return scored[1]


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        ([], {}, "the prompt has no tokens"),
        ([5, VOCAB], {}, f"token id {VOCAB} in prompt is outside the vocabulary; ids are 0 to {VOCAB - 1}"),
        ([-1], {}, "token id -1 in prompt"),
        ([5], {"stop_token_ids": (99,)}, "token id 99 in stop_token_ids"),
        ([5], {"logit_bias": {-3: 1.0}}, "token id -3 in logit_bias"),
        ([5] * 90, {}, "90 prompt tokens and max_tokens=8 exceed the context of 96 tokens; ask for at most 6"),
        ([5] * 96, {}, "shorten the prompt"),
        ([5], {"max_tokens": -1}, "max_tokens must be at least 0"),
        ([5], {"prompt_logprobs": -1}, "logprobs must be at least 0"),
    ],
)
def test_invalid_requests_get_an_error_and_affect_nobody(
    prompt: list[int], changes: dict[str, Any], message: str
) -> None:
    engine, answers = make_engine(), {}
    engine.add(AddRequest("good", [5, 6], params()))
    engine.add(AddRequest("bad", prompt, params(**changes)))
    drain(engine, answers)
    assert answers["bad"].finish_reason == "error" and message in (answers["bad"].message or "")
    assert answers["good"].token_ids == greedy([5, 6], 8)


def test_cancel_frees_blocks_at_once_and_has_one_output(plan_ahead: bool) -> None:
    engine, answers = make_engine(), {}
    for token_id, name in enumerate("abc"):
        engine.add(AddRequest(name, [token_id] * 10, params(max_tokens=50)))
    for output in engine.step().outputs:
        answers.setdefault(output.id, Answer()).take(output)
    used = engine.stats().total.num_blocks - engine.stats().total.num_free_blocks
    engine.cancel(["b", "nobody", "b"])
    assert engine.stats().total.num_blocks - engine.stats().total.num_free_blocks == used * 2 // 3
    engine.cancel(["c"])
    engine.cancel(["a"])
    assert engine.stats().total.num_free_blocks == engine.stats().total.num_blocks and engine.has_work()
    drain(engine, answers)
    assert [answers[name].finish_reason for name in "abc"] == ["cancelled"] * 3
    assert engine.stats().counters.num_steps == 1 + plan_ahead


def test_an_id_can_be_reused() -> None:
    engine, first, second = make_engine(), {}, {}
    engine.add(AddRequest("a", [5, 6], params(temperature=1.0, seed=1, logit_bias={3: 9.0}, max_tokens=5)))
    drain(engine, first)
    engine.add(AddRequest("a", [5, 6], params()))
    drain(engine, second)
    assert second["a"].token_ids == greedy([5, 6], 8)


def test_a_second_request_of_a_live_id_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    engine, answers = make_engine(), {}
    engine.add(AddRequest("a", [5, 6], params()))
    engine.add(AddRequest("a", [9], params(max_tokens=2)))
    drain(engine, answers)
    assert answers["a"].token_ids == greedy([5, 6], 8)
    assert "request a is already running" in caplog.text


class _BrokenRows(FakeRunner):
    """Returns a NaN in the last row of its first step."""

    def execute(self, plan: StepPlan, chosen_R: Tensor | None = None) -> Tensor | None:
        logits = super().execute(plan, chosen_R)
        if logits is not None and plan.index == 1:
            logits[-1, 3] = float("nan")
        return logits


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 1.0, "top_p": 0.9},
        {"max_tokens": 0, "prompt_logprobs": 1},
        {"bad_words": banned_ids((5,))},
        {"bad_words": banned_ids((5,)), "temperature": 1.0},
        {"allowed_token_ids": (3, 4, 5), "min_tokens": 1},
    ],
)
def test_nan_logits_end_only_their_own_request(changes: dict[str, Any]) -> None:
    engine, answers = make_engine(runner=_BrokenRows(ROOMY, VOCAB)), {}
    engine.add(AddRequest("good", [5, 6], params()))
    engine.add(AddRequest("bad", [7, 1], params(**changes)))
    drain(engine, answers)
    assert answers["bad"].finish_reason == "error" and "not finite" in (answers["bad"].message or "")
    assert answers["good"].token_ids == greedy([5, 6], 8)
    assert engine.stats().total.num_free_blocks == ROOMY.num_blocks


@pytest.mark.parametrize("changes", [{"bad_words": banned_ids((5,))}, {"min_tokens": 1, "ignore_eos": False}])
def test_requests_that_ban_every_token_are_refused(changes: dict[str, Any]) -> None:
    only = 5 if "bad_words" in changes else EOS
    answer = alone(AddRequest("a", [5, 6], params(allowed_token_ids=(only,), **changes)))
    assert answer.finish_reason == "refused" and "ban fewer tokens" in (answer.message or "")


def test_tokens_before_nan_logits_are_sent() -> None:
    class Broken(FakeRunner):
        def execute(self, plan: StepPlan, chosen_R: Tensor | None = None) -> Tensor | None:
            logits = super().execute(plan, chosen_R)
            if logits is not None and plan.index == 3:
                logits[1, 3] = float("nan")
            return logits

    engine, answers = make_engine(runner=Broken(ROOMY, VOCAB), drafter=ODD_GUESSES), {}
    engine.add(AddRequest("a", [5, 6, 8], params()))
    drain(engine, answers)
    # The third step's first guess is right, and there are no scores behind it.
    assert answers["a"].token_ids == greedy([5, 6, 8], 3)
    assert answers["a"].finish_reason == "error" and "not finite" in (answers["a"].message or "")


def test_runner_exceptions_propagate() -> None:
    class Failing(OneRank):
        def execute(self, plan: StepPlan, chosen_R: Tensor | None = None) -> Tensor | None:
            raise ConnectionError("rank 1 is gone")

    engine = make_engine(runner=Failing())
    engine.add(AddRequest("a", [5], params()))
    with pytest.raises(ConnectionError, match="rank 1 is gone"):
        engine.step()


def test_plans_are_broadcast_before_they_run_and_stats_count() -> None:
    count, seen = Count("all_reduce", "ring", "decode", 1, 2, 2, 0.5, 4), []

    class Watched(FakeRunner):
        def broadcast(self, plans: Sequence[StepPlan]) -> None:
            seen.append((plans[0].index, len(self.plans)))

        def counts(self) -> RankCounts:
            return RankCounts(comm=[count])

    engine = make_engine(runner=Watched(ROOMY, VOCAB))
    engine.add(AddRequest("a", [5, 6, 7], params(max_tokens=4)))
    results = [engine.step() for _ in range(4)]
    assert not engine.has_work()
    stats = results[-1].stats
    assert seen == [(1, 0), (2, 1), (3, 2), (4, 3)]
    assert (stats.counters.num_steps, stats.counters.num_prompt_tokens, stats.counters.num_generation_tokens) == (
        4,
        3,
        4,
    )
    assert stats.comm == [count]
    assert (stats.total.num_running, stats.total.num_waiting) == (0, 0)


def test_penalty_counts_end_with_the_requests() -> None:
    sampler = Sampler(VOCAB)
    engine, answers = make_engine(sampler=sampler), {}
    for i in range(5):
        engine.add(AddRequest(str(i), [5, i], params(presence_penalty=1.0, max_tokens=3 + i)))
    engine.step()
    assert len(sampler._states) == 5
    engine.cancel(["4"])
    drain(engine, answers)
    assert len(sampler._states) == 0


def test_end_tokens_outside_the_vocabulary_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"end tokens \[70\]"):
        RequestRules(vocab_size=VOCAB, max_model_len=96, eos_token_ids=frozenset([70]))


def random_params(rng: random.Random) -> SamplingParams:
    """Any mixture of parameters."""
    return SamplingParams(
        max_tokens=rng.choice([1, 3, 10, 25]),
        temperature=rng.choice([0.0, 0.7, 1.5]),
        top_p=rng.choice([1.0, 0.8]),
        top_k=rng.choice([0, 0, 5]),
        min_p=rng.choice([0.0, 0.0, 0.1]),
        seed=rng.randrange(1 << 62),
        presence_penalty=rng.choice([0.0, 0.0, 0.9]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        logit_bias=rng.choice([{}, {}, {7: 3.0, 8: -100.0}]),
        logprobs=rng.choice([None, None, 0, 3]),
        prompt_logprobs=rng.choice([None, None, 2]),
        stop_token_ids=rng.choice([(), (9, 10)]),
        min_tokens=rng.choice([0, 2]),
        ignore_eos=rng.random() < 0.5,
        allowed_token_ids=rng.choice([None, None, (3, 5, 7, 9, 11)]),
        bad_words=banned_ids(*rng.choice([[], [], [(4,), (3, 5), (5, 7, 9), (7, 7)]])),
    )


@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(16, 40),
    max_num_seqs=st.integers(1, 8),
    extra_budget=st.integers(0, 24),
    block_size=st.sampled_from([3, 4]),
    prefix_cache=st.sampled_from(["none", "prompts", "all"]),
    drafter=st.sampled_from([None, ODD_GUESSES, Drafter(max_tokens=3, longest=2, shortest=1), SUFFIX]),
    step_blocks=st.none() | st.integers(16, 30),
)
# One comes back after a preemption to find all but its last token in the prefix cache.
@example(
    seed=181,
    num_blocks=25,
    max_num_seqs=4,
    extra_budget=11,
    block_size=3,
    prefix_cache="all",
    drafter=None,
    step_blocks=None,
)
def test_mixed_load_gives_each_request_the_answer_it_gets_alone(
    seed: int,
    num_blocks: int,
    max_num_seqs: int,
    extra_budget: int,
    block_size: int,
    prefix_cache: str,
    drafter: Drafter | None,
    step_blocks: int | None,
) -> None:
    """Random arrivals, tiny block pools, steps of few blocks, preemptions, cancellations, common beginnings, guesses.

    And impossible requests.
    """
    rng = random.Random(seed)
    stems = [[rng.randrange(VOCAB) for _ in range(24)] for _ in range(2)]
    limits = Limits(
        max_model_len=48,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + extra_budget,
        num_blocks=num_blocks,
        block_size=block_size,
        max_scored_rows=7,
        prefix_cache=prefix_cache,
        max_step_blocks=step_blocks,
    )
    waiting = [
        AddRequest(
            str(i),
            rng.choice(stems)[: rng.randint(0, 24)] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))],
            random_params(rng),
            cache_salt=rng.choice(["", "", "of one's own"]),
            allreduce=rng.choice([None, None, "ring"]),
        )
        for i in range(14)
    ]
    # With prefix_cache=all a prompt may lie in blocks of generated tokens.
    tells_kinds, policies = prefix_cache == "prompts", ("auto", "ring")

    def answer_alone(message: AddRequest) -> Answer:
        return alone(message, runner=FakeRunner(ROOMY, VOCAB, tells_kinds=tells_kinds), policies=policies)

    possible = [m for m in waiting if len(m.prompt_token_ids) + m.params.max_tokens <= limits.max_model_len]
    wanted = {message.id: answer_alone(message) for message in possible}
    runner = FakeRunner(limits, VOCAB, tells_kinds=tells_kinds)
    engine, answers, cancelled = make_engine(limits, runner=runner, drafter=drafter, policies=policies), {}, set()
    arrivals = list(waiting)
    while arrivals or engine.has_work():
        while arrivals and rng.random() < 0.4:
            engine.add(arrivals.pop(0))
        if rng.random() < 0.04:
            victim = rng.choice(waiting).id
            cancelled.add(victim)
            engine.cancel([victim])
        for output in engine.step().outputs:
            answers.setdefault(output.id, Answer()).take(output)
    for message in waiting:
        answer = answers[message.id]
        if message.id not in wanted:
            assert answer.finish_reason == "error" and "exceed the context" in (answer.message or "")
        elif answer.finish_reason == "cancelled":
            assert message.id in cancelled
            assert answer.token_ids == wanted[message.id].token_ids[: len(answer.token_ids)]
        else:
            answer.queue_s = wanted[message.id].queue_s = None
            assert answer == wanted[message.id]
    stats = engine.stats()
    assert (stats.total.num_free_blocks, stats.total.num_running, stats.total.num_waiting) == (num_blocks, 0, 0)
    assert (stats.counters.num_prefix_queried_tokens > 0) == (prefix_cache != "none")


def test_a_pool_too_small_by_two_thirds_preempts_and_answers_correctly() -> None:
    """The fuzz test above draws its sizes; this one certainly preempts, in prefill and in decode."""
    rng = random.Random(7)
    limits = Limits(max_model_len=48, max_num_seqs=8, max_num_batched_tokens=24, num_blocks=25, block_size=4)
    messages = [
        AddRequest(
            str(i),
            [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))],
            params(max_tokens=30, temperature=rng.choice([0.0, 1.0]), seed=i, frequency_penalty=0.3, prompt_logprobs=1),
        )
        for i in range(14)
    ]
    engine, answers = make_engine(limits), {}
    for message in messages:
        engine.add(message)
    drain(engine, answers)
    assert engine.stats().counters.num_preemptions >= 5
    for message in messages:
        answer, expected = answers[message.id], alone(message)
        answer.queue_s = expected.queue_s = None
        assert answer == expected
    assert engine.stats().total.num_free_blocks == limits.num_blocks


def test_preempted_in_the_middle_of_an_echo() -> None:
    """The older sequence outgrows the pool while the echo is prefilled one token per step; nothing is scored twice."""
    limits = Limits(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=2, num_blocks=16, block_size=4)
    engine, answers = make_engine(limits), {}
    prompt = [i * 5 % VOCAB for i in range(40)]
    engine.add(AddRequest("old", [5] * 4, params(max_tokens=40)))
    engine.add(AddRequest("echo", prompt, params(max_tokens=5, prompt_logprobs=1)))
    drain(engine, answers)
    assert engine.stats().counters.num_preemptions == 1
    check_prompt_logprobs(prompt, answers["echo"].prompt_logprobs, top_n=1)
    assert answers["echo"].token_ids == greedy(prompt, 5)


def test_same_seed_same_text_other_seed_other_text() -> None:
    def text(seed: int) -> list[int]:
        return alone(AddRequest("a", [5], params(temperature=1.0, seed=seed, max_tokens=12))).token_ids

    assert text(3) == text(3)
    assert len({tuple(text(seed)) for seed in range(6)}) == 6


def test_steps_without_rows_of_logits() -> None:
    """A prefill chunk before the last has no logit rows, and the runner returns None."""
    limits = Limits(max_model_len=96, max_num_seqs=1, max_num_batched_tokens=4, num_blocks=24, block_size=4)
    engine = make_engine(limits)
    engine.add(AddRequest("a", [5] * 10, params()))
    assert engine.step().outputs == [] and engine.step().outputs == []
    assert len(engine.step().outputs) == 1
    assert torch.is_inference_mode_enabled() is False


class Timed(OneRank):
    """A runner whose every step takes a second, a quarter of it in collectives."""

    def __init__(self, limits: Limits) -> None:
        self._runner, self.now_s = FakeRunner(limits, VOCAB), 0.0

    def execute(self, plan: StepPlan, chosen_R: Tensor | None = None) -> Tensor | None:
        self.now_s += 1.0
        return self._runner.execute(plan, chosen_R)

    def engine(self, limits: Limits) -> Engine:
        return make_engine(limits, runner=self, clock=lambda: self.now_s)

    def comm_spent(self) -> Spent:
        return Spent(self.now_s / 4, self.now_s / 8)


def test_first_token_times_count_from_the_first_step(plan_ahead: bool) -> None:
    """A prompt of five steps that comes while another sequence generates: the steps were for both.

    Planned ahead, one step more is launched before a token is told; this runner has it done by then.
    """
    limits = Limits(max_model_len=96, max_num_seqs=2, max_num_batched_tokens=5, num_blocks=48, block_size=4)
    timed = Timed(limits)
    engine = timed.engine(limits)
    engine.add(AddRequest("a", [5], params(max_tokens=20)))
    told = {1: engine.step().outputs[0].first_token}
    engine.add(AddRequest("b", [7] * 20, params(max_tokens=3)))
    while engine.has_work():
        told |= {len(told) + 1: output.first_token for output in engine.step().outputs if output.first_token}

    def first(start_s: float, end_s: float) -> FirstToken:
        eighth_s = (end_s - start_s) / 8
        return FirstToken(start_s, end_s, 6 * eighth_s, allreduce_s=eighth_s, codec_s=eighth_s, sampling_s=0.0)

    assert told == (
        {1: first(0.0, 2.0), 2: first(2.0, 8.0)} if plan_ahead else {1: first(0.0, 1.0), 2: first(1.0, 6.0)}
    )


def test_first_token_times_include_a_preemption() -> None:
    limits = Limits(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=2, num_blocks=16, block_size=4)
    timed, told = Timed(limits), []
    engine = timed.engine(limits)
    engine.add(AddRequest("old", [5] * 4, params(max_tokens=40)))
    engine.add(AddRequest("young", [i * 5 % VOCAB for i in range(40)], params(max_tokens=5)))
    while engine.has_work():
        told += [(output.id, output.first_token) for output in engine.step().outputs if output.first_token]

    (_, old), (_, young) = told
    assert engine.stats().counters.num_preemptions == 1 and [name for name, _ in told] == ["old", "young"]
    for first in (old, young):
        seconds = first.sampled_s - first.scheduled_s
        assert (first.compute_s, first.allreduce_s + first.codec_s) == (0.75 * seconds, 0.25 * seconds)
    assert young.sampled_s - young.scheduled_s > 40  # what was computed before it was preempted counts


def progress_of(engine: Engine) -> dict[str, list[PromptProgress]]:
    """Run to the end; the reports by request, which only grow and come before the first token."""
    told: dict[str, list[PromptProgress]] = {}
    answered: set[str] = set()
    while engine.has_work():
        for output in engine.step().outputs:
            if output.progress is None:
                answered.add(output.id)
                continue
            assert output.id not in answered and not output.token_ids and output.finish_reason is None
            told.setdefault(output.id, []).append(output.progress)
    for reports in told.values():
        for earlier, later in pairwise(reports):
            assert later.cached >= earlier.cached and later.computed > earlier.computed
            assert later.seconds >= earlier.seconds and later.prompt_tokens == earlier.prompt_tokens
    return told


def test_progress_of_a_prompt_in_chunks_is_told_to_the_request_that_asks() -> None:
    limits = Limits(max_model_len=96, max_num_seqs=2, max_num_batched_tokens=8, num_blocks=48, block_size=4)
    timed = Timed(limits)
    engine = timed.engine(limits)
    engine.add(AddRequest("asks", [i * 5 % VOCAB for i in range(20)], params(), progress=True))
    engine.add(AddRequest("does not", [i * 3 % VOCAB for i in range(20)], params()))
    told = progress_of(engine)
    assert told.keys() == {"asks"}
    assert [(each.prompt_tokens, each.cached, each.computed) for each in told["asks"]] == [
        (20, 0, 8),
        (20, 0, 16),
        (20, 0, 20),
    ]
    assert told["asks"][0].seconds >= 1


def test_progress_of_equal_prompts_counts_what_the_cache_has() -> None:
    limits = Limits(max_model_len=96, max_num_seqs=4, max_num_batched_tokens=8, num_blocks=96, block_size=4)
    engine = make_engine(limits)
    prompt = [i * 5 % VOCAB for i in range(42)]
    for name in "abc":
        engine.add(AddRequest(name, prompt, params(), progress=True))
    told = progress_of(engine)
    assert (told["a"][-1].cached, told["a"][-1].computed) == (0, 42)
    for name in "bc":
        assert told[name][-1].cached >= 32 and told[name][-1].cached + told[name][-1].computed == 42


def test_progress_waits_until_a_preempted_prompt_is_past_its_last_report() -> None:
    limits = Limits(
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=2,
        num_blocks=16,
        block_size=4,
        prefix_cache="none",
    )
    engine = make_engine(limits)
    engine.add(AddRequest("old", [5] * 4, params(max_tokens=40)))
    engine.add(AddRequest("young", [i * 5 % VOCAB for i in range(40)], params(max_tokens=5), progress=True))
    [reports] = progress_of(engine).values()
    assert engine.stats().counters.num_preemptions == 1
    assert (reports[-1].cached, reports[-1].computed) == (0, 40)


def test_a_cancelled_prompt_tells_no_more_progress() -> None:
    limits = Limits(max_model_len=96, max_num_seqs=2, max_num_batched_tokens=4, num_blocks=48, block_size=4)
    engine = make_engine(limits)
    engine.add(AddRequest("a", [5] * 20, params(), progress=True))
    [output] = engine.step().outputs
    assert output.progress is not None and output.progress.computed == 4
    engine.cancel(["a"])
    [last] = engine.step().outputs
    assert last.finish_reason == "cancelled" and last.progress is None and not engine.has_work()
