from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tightwire.model.layer_groups import LayerGroups
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.model.step import ints
from tightwire.server.config.chunks import ChunkSizes
from tightwire.server.config.limits import Limits
from tightwire.server.engine.drafts import Drafter
from tightwire.server.engine.request import Request, make_request
from tightwire.server.engine.scheduler import Scheduler
from tightwire.server.engine.step_builder import ScheduledStep
from tightwire.server.ipc.messages import AddRequest


def num_used(scheduler: Scheduler) -> int:
    return scheduler.sequences.pool.num_blocks - scheduler.sequences.pool.num_free


def limits(*, prefix_cache: str = "none", max_step_blocks: int | None = None, **changes: Any) -> Limits:
    """Without a prefix cache, because all prompts of these tests share a prefix."""
    values: dict[str, Any] = {
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "num_blocks": 64,
        "block_size": 4,
    }
    return Limits(**(values | changes), prefix_cache=prefix_cache, max_step_blocks=max_step_blocks)


def request(
    num_tokens: int, name: str = "r", *, max_tokens: int = 8, prompt_logprobs: int | None = None, policy: int = 0
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
    message = AddRequest(name, list(range(1, num_tokens + 1)), params)
    return make_request(message, eos_token_ids=(), arrival_s=0.0, policy=policy)


def run(scheduler: Scheduler) -> ScheduledStep:
    """Run one step as the engine does: compute, and add a token to each sequence that samples."""
    step = scheduler.schedule(0.0)
    assert step is not None
    for chunk in step.chunks:
        chunk.request.num_computed = chunk.end
        if chunk.samples:
            chunk.request.token_ids.append(7)
    return step


def shares(step: ScheduledStep) -> dict[str, tuple[int, int]]:
    return {chunk.request.id: (chunk.start, chunk.end) for chunk in step.chunks}


def test_long_prefill_is_chunked_and_decode_continues() -> None:
    scheduler = Scheduler(limits())
    scheduler.sequences.add(request(3, "short"))
    assert shares(run(scheduler)) == {"short": (0, 3)}
    scheduler.sequences.add(request(40, "long"))
    scheduler.sequences.add(request(20, "late"))
    assert shares(run(scheduler)) == {"short": (3, 4), "long": (0, 15)}
    assert shares(run(scheduler)) == {"short": (4, 5), "long": (15, 30)}
    last_of_prefill = run(scheduler)
    assert shares(last_of_prefill) == {"short": (5, 6), "long": (30, 40), "late": (0, 5)}
    assert [chunk.samples for chunk in last_of_prefill.chunks] == [True, True, False]
    assert shares(run(scheduler)) == {"short": (6, 7), "long": (40, 41), "late": (5, 19)}


def test_short_and_long_prompts_do_not_delay_each_other() -> None:
    scheduler = Scheduler(limits(max_num_seqs=8))
    for name, num_tokens in (("long", 40), ("too long", 9), ("first", 5), ("second", 3), ("no more room", 1)):
        scheduler.sequences.add(request(num_tokens, name, max_tokens=1))
    # Half of the step for those that it finishes, in order of age; the other half and what they leave is the oldest's.
    assert shares(run(scheduler)) == {"long": (0, 8), "first": (0, 5), "second": (0, 3)}
    for done in scheduler.sequences.running[2:4]:
        scheduler.sequences.remove(done)
    scheduler.sequences.add(request(8, "new", max_tokens=1))
    assert shares(run(scheduler)) == {"long": (8, 23), "no more room": (0, 1)}


def test_the_oldest_scored_prompt_always_progresses() -> None:
    scheduler = Scheduler(limits(max_scored_rows=4))
    scheduler.sequences.add(request(30, "old", prompt_logprobs=0))
    scheduler.sequences.add(request(4, "young", prompt_logprobs=0))
    assert shares(run(scheduler)) == {"old": (0, 4)}


def test_plan_is_packed_with_tables_as_wide_as_the_widest() -> None:
    scheduler = Scheduler(limits())
    scheduler.sequences.add(request(3, "a", prompt_logprobs=0))
    scheduler.sequences.add(request(6, "b"))
    plan = run(scheduler).plan
    assert ints(plan.token_ids).tolist() == [1, 2, 3, 1, 2, 3, 4, 5, 6]
    assert ints(plan.query_lens).tolist() == ints(plan.context_lens).tolist() == [3, 6]
    assert ints(plan.block_tables).reshape(2, -1).tolist() == [[0, 0], [1, 2]]
    assert ints(plan.logit_rows).tolist() == [0, 1, 2, 8]  # two rows score the prompt, then both sample
    plan = run(scheduler).plan
    assert ints(plan.token_ids).tolist() == [7, 7]
    assert ints(plan.context_lens).tolist() == [4, 7]
    assert plan.index == 2


def test_no_more_than_max_num_seqs_run() -> None:
    scheduler = Scheduler(limits(max_num_seqs=2))
    for name in "abc":
        scheduler.sequences.add(request(2, name))
    assert list(shares(run(scheduler))) == ["a", "b"]
    scheduler.sequences.remove(scheduler.sequences.running[0])
    assert list(shares(run(scheduler))) == ["b", "c"]


def test_the_youngest_is_preempted_to_the_head_of_the_queue() -> None:
    scheduler = Scheduler(limits(num_blocks=16, max_model_len=64, max_num_batched_tokens=64))
    old, young, late = request(20, "old", max_tokens=44), request(20, "young", max_tokens=44), request(4, "late")
    scheduler.sequences.add(old)
    scheduler.sequences.add(young)
    run(scheduler)
    scheduler.sequences.add(late)
    run(scheduler)
    assert scheduler.sequences.running == [old, young, late]
    while not scheduler.sequences.waiting:
        run(scheduler)
    assert list(scheduler.sequences.waiting) == [late]
    while len(scheduler.sequences.waiting) < 2:
        run(scheduler)
    assert list(scheduler.sequences.waiting) == [young, late] and scheduler.counters.num_preemptions == 2
    assert young.num_computed == 0 and not young.blocks
    assert num_used(scheduler) == len(old.blocks)
    assert scheduler.sequences.num_to_compute == sum(each.num_to_compute for each in (old, young, late))
    scheduler.sequences.remove(young)
    scheduler.sequences.remove(old)
    assert scheduler.sequences.num_to_compute == late.num_to_compute
    run(scheduler)
    assert list(scheduler.sequences.running) == [late] and scheduler.sequences.num_to_compute == late.num_to_compute


def test_a_preempted_sequence_returns_only_with_room_to_grow() -> None:
    scheduler = Scheduler(limits(num_blocks=16, max_num_batched_tokens=64))
    old, young = request(20, "old", max_tokens=44), request(20, "young", max_tokens=44)
    scheduler.sequences.add(old)
    scheduler.sequences.add(young)
    while len(old.token_ids) < 64:
        run(scheduler)
    assert scheduler.counters.num_preemptions == 1
    scheduler.sequences.remove(old)
    assert list(shares(run(scheduler))) == ["young"]


def test_recomputation_does_not_stop_the_oldest() -> None:
    """The oldest is in the middle of its prompt; the younger one has 20 generated tokens to recompute."""
    scheduler = Scheduler(limits(max_num_batched_tokens=4))
    old, young = request(12, "old"), request(2, "young", max_tokens=30)
    young.token_ids += [7] * 20
    scheduler.sequences.add(old)
    scheduler.sequences.add(young)
    scheduler.schedule(0.0)
    scheduler.sequences.running, scheduler.sequences.waiting = [old, young], deque()
    old.num_computed, young.num_computed = 4, 2
    assert shares(run(scheduler)) == {"old": (4, 8)}
    step = run(scheduler)
    assert shares(step) == {"old": (8, 12)}
    step = run(scheduler)
    assert shares(step) == {"old": (12, 13), "young": (2, 5)}
    assert step.plan.num_decode_rows == 4


def test_decode_rows_come_before_prompt_rows() -> None:
    scheduler = Scheduler(limits())
    old, young = request(30, "old"), request(2, "young", max_tokens=30)
    young.token_ids += [7] * 3
    scheduler.sequences.add(old)
    run(scheduler)
    scheduler.sequences.add(young)
    scheduler.schedule(0.0)
    old.num_computed, young.num_computed = 20, 2
    step = run(scheduler)
    assert list(shares(step).items()) == [("young", (2, 5)), ("old", (20, 30))]
    assert step.plan.num_decode_rows == 3


def test_admission_leaves_room_for_running_prompts() -> None:
    scheduler = Scheduler(limits(num_blocks=16, max_num_batched_tokens=30))
    scheduler.sequences.add(request(40, "long"))
    scheduler.sequences.add(request(20, "next"))
    run(scheduler)
    while scheduler.sequences.running[0].num_output_tokens < 8:
        # Once the long one's 40 tokens are in, 6 blocks are free: the next one's 20 tokens and a block to grow would
        # fit, but not the block the long one needs for its own answer.
        assert list(shares(run(scheduler))) == ["long"]
    scheduler.sequences.remove(scheduler.sequences.running[0])
    assert list(shares(run(scheduler))) == ["next"]
    assert scheduler.counters.num_preemptions == 0


def test_a_preempted_sequence_loses_its_share_of_the_step() -> None:
    scheduler = Scheduler(limits(num_blocks=16, max_num_batched_tokens=24, max_num_seqs=2))
    old, young = request(60, "old", max_tokens=4), request(2, "young")
    scheduler.sequences.add(old)
    run(scheduler)
    scheduler.sequences.running.append(
        young
    )  # admission would have kept it waiting: the prompt of the old one has no room
    young.blocks.extend(scheduler.sequences.pool.allocate(9))
    young.token_ids.append(7)
    young.num_computed = 2
    step = run(scheduler)
    assert shares(step) == {"old": (24, 47)} and list(scheduler.sequences.waiting) == [young]
    assert len(ints(step.plan.token_ids)) == 23


def test_cancelled_blocks_are_free_at_once() -> None:
    scheduler = Scheduler(limits())
    one, two = request(9, "one"), request(30, "two")
    scheduler.sequences.add(one)
    scheduler.sequences.add(two)
    run(scheduler)
    scheduler.sequences.remove(two)
    assert num_used(scheduler) == len(one.blocks) == 3
    scheduler.sequences.remove(one)
    assert num_used(scheduler) == 0 and not scheduler.sequences
    assert scheduler.schedule(0.0) is None


def test_scored_rows_are_bounded_per_step() -> None:
    scheduler = Scheduler(limits(max_scored_rows=5))
    scheduler.sequences.add(request(9, "echo", prompt_logprobs=1))
    scheduler.sequences.add(request(9, "other", prompt_logprobs=1))
    first = run(scheduler)
    assert shares(first) == {"echo": (0, 5)}
    echo = scheduler.sequences.running[0]
    assert echo.prompt_logprobs is not None
    echo.prompt_logprobs.extend([None] * 5)
    second = run(scheduler)
    assert [chunk.scored for chunk in second.chunks] == [range(5, 8), range(2)]


def test_impossible_limits_are_an_error() -> None:
    with pytest.raises(
        ValueError, match="holds 15 blocks of 4 = 60 tokens, less than one sequence of max_model_len=64"
    ):
        limits(num_blocks=15)
    with pytest.raises(ValueError, match="below max_num_seqs"):
        limits(max_num_batched_tokens=3)


def test_policies_take_turns_and_never_share_a_step() -> None:
    scheduler = Scheduler(limits())
    for name, policy in (("a", 0), ("b", 2), ("c", 0)):
        scheduler.sequences.add(request(3, name, policy=policy))
    seen = [(step.plan.policy, shares(step)) for step in (run(scheduler) for _ in range(5))]
    # c waits for b, which came first; from then on every other step belongs to either policy.
    assert seen == [
        (0, {"a": (0, 3)}),
        (2, {"b": (0, 3)}),
        (0, {"a": (3, 4), "c": (0, 3)}),
        (2, {"b": (3, 4)}),
        (0, {"a": (4, 5), "c": (3, 4)}),
    ]


def test_a_step_of_one_policy_may_preempt_the_youngest_of_another() -> None:
    scheduler = Scheduler(limits(max_model_len=24, num_blocks=6))
    scheduler.sequences.add(request(4, "old", max_tokens=20))
    scheduler.sequences.add(request(4, "young", max_tokens=20, policy=1))
    step = run(scheduler)
    while not scheduler.counters.num_preemptions:
        step = run(scheduler)
    assert (
        step.plan.policy == 0
        and shares(step) == {"old": (12, 13)}
        and [r.id for r in scheduler.sequences.waiting] == ["young"]
    )
    assert [shares(run(scheduler)) for _ in range(3)] == [{"old": (at, at + 1)} for at in (13, 14, 15)]  # no room yet


def test_a_policy_without_blocks_passes_its_turn() -> None:
    scheduler = Scheduler(limits(max_model_len=16, num_blocks=6))
    scheduler.sequences.add(request(9, "old", max_tokens=7))
    scheduler.sequences.add(request(3, "young", policy=1))
    steps = [run(scheduler) for _ in range(14)]
    # The fourteenth would be young's, for a third block that there is not.
    assert [step.plan.policy for step in steps] == [0, 1] * 6 + [0, 0]
    assert [step.plan.index for step in steps] == list(range(1, 15))
    assert scheduler.counters.num_preemptions == 1 and [r.id for r in scheduler.sequences.waiting] == ["young"]


def test_the_youngest_skip_a_step_with_limited_blocks() -> None:
    scheduler = Scheduler(limits(max_step_blocks=16, max_num_batched_tokens=64))
    for name in ("old", "middle", "young"):
        scheduler.sequences.add(request(16, name, max_tokens=40))
    assert shares(run(scheduler)) == {"old": (0, 16), "middle": (0, 16), "young": (0, 16)}  # 15 blocks, soon
    for _ in range(4):  # six blocks each would be 18
        assert list(shares(run(scheduler))) == ["old", "middle", "young"]
    assert list(shares(run(scheduler))) == ["old", "middle"]


def test_admission_respects_the_blocks_of_a_step() -> None:
    scheduler = Scheduler(limits(max_step_blocks=16, max_num_batched_tokens=64))
    scheduler.sequences.add(request(36, "long"))  # ten blocks with one to come
    scheduler.sequences.add(request(24, "late"))  # seven
    assert list(shares(run(scheduler))) == ["long"]
    scheduler.sequences.remove(scheduler.sequences.running[0])
    assert list(shares(run(scheduler))) == ["late"]


@settings(max_examples=60)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(0, 2)), min_size=1, max_size=12),
    num_blocks=st.integers(15, 40),
    max_num_seqs=st.integers(1, 6),
    extra_budget=st.integers(0, 20),
    step_blocks=st.none() | st.integers(15, 25),
)
def test_nobody_starves(
    lengths: list[tuple[int, int, int]], num_blocks: int, max_num_seqs: int, extra_budget: int, step_blocks: int | None
) -> None:
    """No starvation: running stays older than waiting, and the total number of steps is bounded."""
    scheduler = Scheduler(
        limits(
            max_model_len=60,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            max_step_blocks=step_blocks,
        )
    )
    requests = [
        request(prompt, str(i), max_tokens=out, policy=policy) for i, (prompt, out, policy) in enumerate(lengths)
    ]
    num_policies = len({policy for _, _, policy in lengths})
    for r in requests:
        scheduler.sequences.add(r)
    waited = 0
    # Even one at a time, one token at a time, the oldest finishes within its length and its policy's turns.
    for _ in range(num_policies * sum(prompt + out for prompt, out, _ in lengths)):
        if not scheduler.sequences:
            break
        oldest = scheduler.sequences.running[0] if scheduler.sequences.running else scheduler.sequences.waiting[0]
        step = run(scheduler)
        assert {chunk.request.policy for chunk in step.chunks} == {step.plan.policy}
        waited = 0 if oldest in {chunk.request for chunk in step.chunks} else waited + 1
        assert waited < num_policies
        order = [int(r.id) for r in [*scheduler.sequences.running, *scheduler.sequences.waiting]]
        assert order == sorted(order)
        for r in list(scheduler.sequences.running):
            if r.num_output_tokens >= r.params.max_tokens:
                scheduler.sequences.remove(r)
    assert not scheduler.sequences
    assert num_used(scheduler) == 0


def test_recomputation_separates_prompt_and_decode_rows() -> None:
    scheduler = Scheduler(limits(max_num_batched_tokens=64))
    preempted = request(10, "a")
    preempted.token_ids += [1, 2, 3]  # generated before it was preempted
    scheduler.sequences.add(preempted)
    scheduler.sequences.add(request(7, "b"))

    first, second = run(scheduler), run(scheduler)

    assert shares(first) == {"a": (0, 10), "b": (0, 7)}
    assert [chunk.samples for chunk in first.chunks] == [False, True]
    assert first.plan.num_decode_rows == 0
    assert shares(second) == {"b": (7, 8), "a": (10, 13)}
    assert second.plan.num_decode_rows == 4


def test_layers_with_a_window_hold_no_more_than_it() -> None:
    """One group that keeps all blocks, and two that keep those of the window, of its first key tile, and of the step."""
    groups = LayerGroups(((0, 0), (1, 0), (2, 0)), 1, 2, 30)
    most = groups.most_blocks(400, 48, 4)
    given: dict[str, Any] = {"max_model_len": 400, "max_num_batched_tokens": 48, "num_blocks": most, "max_num_seqs": 1}
    scheduler = Scheduler(Limits(**given, block_size=4, groups=groups))
    sequence = request(200, max_tokens=200)
    scheduler.sequences.add(sequence)
    peak = 0
    while len(sequence.token_ids) < 400:
        start = sequence.num_computed
        step = run(scheduler)
        first = max(0, start + 1 - 30) // 64 * 64 // 4
        last = -(-sequence.num_computed // 4)
        assert num_used(scheduler) == last + 2 * (last - first)
        assert len(ints(step.plan.block_tables)) == last + 2 * (last - first)
        peak = max(peak, last - first)
    assert 30 / 4 <= peak <= -(-(30 + 48 + 62) // 4)
    scheduler.sequences.remove(sequence)
    assert num_used(scheduler) == 0


def test_a_pool_smaller_than_a_longest_sequence_is_refused() -> None:
    groups = LayerGroups(((0, 0), (1, 0), (2, 0)), 1, 2, 30)
    given: dict[str, Any] = {
        "max_model_len": 400,
        "max_num_batched_tokens": 48,
        "max_num_seqs": 1,
        "block_size": 4,
        "groups": groups,
    }
    most = groups.most_blocks(400, 48, 4)
    with pytest.raises(
        ValueError, match=f"holds {most - 1} blocks of 4 = 396 tokens, less than one sequence of max_model_len=400"
    ):
        Limits(**given, num_blocks=most - 1)


class _Noting(Drafter):
    """Drafts two tokens, and notes the rows and sequences that the step has without them."""

    def __init__(self) -> None:
        super().__init__(max_tokens=2, longest=1, shortest=1)
        self.told: list[tuple[int, int]] = []

    def prepare(self, requests: Sequence[Request], num_rows: int, num_seqs: int) -> None:
        self.told.append((num_rows, num_seqs))

    def draft(self, request: Request, room: int, num_rows: int = 1, num_seqs: int = 1) -> list[int]:
        return [7, 7][:room]


class _FourRows(ChunkSizes):
    def choose(self, prompts: Sequence[tuple[int, int]], start: int, num_stages: int) -> int:
        return 4


@pytest.mark.parametrize("pipeline", [False, True])
def test_rows_that_a_short_chunk_leaves_are_no_rows_of_the_step(pipeline: bool) -> None:
    """Drafts may take them, and a drafter is told the rows that are there."""
    drafter = _Noting()
    scheduler = Scheduler(limits(num_stages=2, pipeline=pipeline, chunks=_FourRows()), drafter)
    first, second = request(3, "first"), request(30, "second")
    scheduler.sequences.add(first)
    while first.in_prompt or first.num_to_compute != 1:
        run(scheduler)
    scheduler.sequences.add(second)
    step = run(scheduler)
    while "first" not in shares(step):  # in hybrid it waits until its prompt has passed the stages
        step = run(scheduler)
    assert drafter.told[-1] == (5, 2)
    assert {chunk.request.id: (chunk.num_rows, len(chunk.draft)) for chunk in step.chunks} == {
        "first": (3, 2),
        "second": (4, 0),
    }
