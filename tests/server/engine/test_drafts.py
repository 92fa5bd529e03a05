from typing import Any

import pytest

from tightwire.model.sampling.parameters import SamplingParams
from tightwire.server.config.limits import Limits
from tightwire.server.engine.drafts import NgramDrafter
from tightwire.server.engine.request import Request, make_request
from tightwire.server.engine.scheduler import Scheduler
from tightwire.server.ipc.messages import AddRequest

DRAFTER = NgramDrafter(max_tokens=3, longest=3, shortest=2)


def request(tokens: list[int], name: str = "r", max_tokens: int = 20) -> Request:
    return make_request(AddRequest(name, tokens, SamplingParams(max_tokens=max_tokens)), (), 0.0)


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], [4, 5, 6]),
        ([1, 2, 3, 4, 1, 2, 3, 5, 6, 7, 1, 2, 3], [5, 6, 7]),  # the last place of several
        ([9, 2, 3, 4, 5, 8, 2, 3], [4, 5, 8]),  # two tokens, where three do not recur
        ([1, 2, 3, 4, 8, 3], []),  # one token alone is not enough
        ([4, 4, 4, 4], [4]),  # what follows ends with the text
        ([1, 2, 7, 1, 2], [7, 1, 2]),
        ([1], []),
        ([1, 2], []),
        ([1, 2, 3], []),
        ([256, 65536, 1, 5, 0x01000000, 0, 256, 65536, 1], [5, 0x01000000, 0]),
        ([0, 256, 1, 0x00010000, 0x00000001, 0x01000000, 1], []),  # the same bytes, across tokens
    ],
)
def test_drafts_follow_the_longest_recurring_end(tokens: list[int], draft: list[int]) -> None:
    assert DRAFTER.draft(request(tokens), room=10) == draft


def test_a_draft_is_limited_by_room() -> None:
    again = request([1, 2, 3, 4, 5, 6, 1, 2, 3])
    assert DRAFTER.draft(again, room=1) == [4]
    assert DRAFTER.draft(again, room=0) == DRAFTER.draft(again, room=-3) == []


def test_drafts_use_new_tokens() -> None:
    growing = request([1, 2, 3])
    assert DRAFTER.draft(growing, 3) == []
    growing.token_ids += [9, 1, 2]
    assert DRAFTER.draft(growing, 3) == [3, 9, 1]


def test_drafts_shorten_after_failures_and_lengthen_again() -> None:
    again = request([1, 2, 3, 4, 5, 6, 1, 2, 3])
    DRAFTER.learn(again, 0)
    assert DRAFTER.draft(again, 3) == [4]
    DRAFTER.learn(again, 1)
    assert DRAFTER.draft(again, 3) == [4, 5, 6]


def make_scheduler(**changes: Any) -> Scheduler:
    values: dict[str, Any] = {
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "num_blocks": 64,
        "block_size": 4,
    }
    return Scheduler(Limits(**(values | changes)), DRAFTER)


def draft_of(scheduler: Scheduler) -> dict[str, tuple[int, ...]]:
    """Run a step in which every guess is wrong."""
    step = scheduler.schedule(0.0)
    assert step is not None
    for chunk in step.chunks:
        chunk.request.num_computed = chunk.end
        chunk.request.token_ids.append(chunk.request.token_ids[chunk.request.num_output_tokens])
    return {chunk.request.id: tuple(chunk.draft) for chunk in step.chunks}


def test_only_decode_rows_have_drafts() -> None:
    scheduler = make_scheduler()
    scheduler.sequences.add(request([1, 2, 3, 4, 5, 9], "again"))
    assert draft_of(scheduler) == {"again": ()}  # and it gets the prompt's tokens again, one by one
    assert draft_of(scheduler) == {"again": ()}
    assert draft_of(scheduler) == {"again": (3, 4, 5)}


def test_drafts_use_the_rest_of_the_step() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=5, max_num_seqs=3)
    for name in ("a", "b", "c"):
        scheduler.sequences.add(request([7, 7, 7, 7], name))
    drafts = [draft_of(scheduler) for _ in range(8)]
    assert drafts[-1] == {"a": (7,), "b": (7,), "c": ()}


def test_drafts_preempt_nobody() -> None:
    scheduler = make_scheduler()
    scheduler.sequences.add(request([7] * 9, "a"))
    scheduler.sequences.add(request([8] * 3, "b"))
    draft_of(scheduler)
    scheduler.sequences.pool.allocate(scheduler.sequences.pool.num_free)
    assert draft_of(scheduler) == {"a": (7,), "b": ()}  # b's block is full, and no other is free
    assert scheduler.counters.num_preemptions == 0


def test_drafts_end_with_the_answer() -> None:
    scheduler = make_scheduler()
    scheduler.sequences.add(request([7] * 8, max_tokens=3))
    draft_of(scheduler)
    assert draft_of(scheduler) == {"r": (7,)}
    assert draft_of(scheduler) == {"r": ()}


def test_no_drafts_with_many_sequences() -> None:
    scheduler = make_scheduler(max_drafting_seqs=1)
    scheduler.sequences.add(request([7] * 8, "a"))
    draft_of(scheduler)
    assert draft_of(scheduler) == {"a": (7,)}
    scheduler.sequences.add(request([7] * 8, "b"))
    draft_of(scheduler)
    assert draft_of(scheduler) == {"a": (), "b": ()}


class Greedy(NgramDrafter):
    """Guesses as many tokens as there is room for."""

    def draft(self, request: Request, room: int) -> list[int]:
        return [7] * max(0, room)


def test_drafts_leave_room_for_waiting_prompts() -> None:
    scheduler = Scheduler(
        Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=8, num_blocks=64, block_size=4),
        Greedy(max_tokens=64, longest=1, shortest=1),
    )
    scheduler.sequences.add(request([7] * 4, "old", max_tokens=40))
    draft_of(scheduler)
    assert draft_of(scheduler) == {"old": (7,) * 7}
    scheduler.sequences.add(request([5] * 6, "late"))
    assert draft_of(scheduler) == {"old": (7,), "late": ()}


def test_failed_drafts_leave_a_block_for_each_next_token() -> None:
    scheduler = Scheduler(
        Limits(max_model_len=32, max_num_seqs=2, max_num_batched_tokens=64, num_blocks=8, block_size=4),
        Greedy(max_tokens=64, longest=1, shortest=1),
    )
    scheduler.sequences.add(request([7] * 7, "a", max_tokens=20))
    scheduler.sequences.add(request([8] * 3, "b", max_tokens=20))
    for _ in range(4):
        draft_of(scheduler)
    assert scheduler.counters.num_preemptions == 0
