import math
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tightwire.model.layer_groups import LayerGroups
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.server.config.limits import Limits
from tightwire.server.engine.drafts import DRAFTERS, Drafter
from tightwire.server.engine.request import Request, make_request
from tightwire.server.engine.scheduler import Replicas, Scheduler
from tightwire.server.engine.step_builder import Chunk
from tightwire.server.ipc.engine_stats import EngineCounters
from tightwire.server.ipc.messages import AddRequest

DRAFTER = Drafter(max_tokens=3, longest=3, shortest=2)


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


def test_a_draft_ends_with_a_stop_token() -> None:
    params = SamplingParams(max_tokens=20, stop_token_ids=(4,))
    again = make_request(AddRequest("r", [1, 2, 3, 4, 5, 6, 1, 2], params), (), 0.0)
    assert DRAFTER.draft(again, room=10) == [3, 4]


def test_drafts_use_new_tokens() -> None:
    growing = request([1, 2, 3])
    assert DRAFTER.draft(growing, 3) == []
    growing.token_ids += [9, 1, 2]
    assert DRAFTER.draft(growing, 3) == [3, 9, 1]


SUFFIX = partial(Drafter, max_tokens=6, longest=5, shortest=1, num_places=1000)


def best_by_search(text: list[int]) -> tuple[list[int], float]:
    """What ``SUFFIX`` drafts, without shortcuts: every length, every place, every continuation; and the tokens expected to be right."""
    best, most = list[int](), 0.0
    for length in range(min(5, len(text)), 0, -1):
        places = [p for p in range(length - 1, len(text) - 1) if text[p - length + 1 : p + 1] == text[-length:]]
        draft, share, chance, expected = list[int](), 1.0, 1.0, 0.0
        while len(draft) < 6:
            same = [p for p in places if text[p + 1 : p + 1 + len(draft)] == draft]
            nexts = [text[p + 1 + len(draft)] for p in same if p + 1 + len(draft) < len(text)]
            if not nexts:
                break
            latest = {token: place for place, token in enumerate(nexts)}
            token = max(latest, key=lambda token: (nexts.count(token), latest[token]))
            share *= nexts.count(token) / len(nexts)
            if share < 0.1:
                break
            rate = min(length + len(draft), 5)
            chance *= nexts.count(token) / len(nexts) * rate / (rate + 3)
            expected += chance
            draft.append(token)
        if expected > most + 1e-12:
            best, most = draft, expected
    return best, most


@settings(max_examples=300)
@given(text=st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_suffix_drafts_what_a_search_of_everything_finds(text: list[int]) -> None:
    asked = request(text)
    draft, (found, expected) = SUFFIX().draft(asked, 6), best_by_search(text)
    assert len(draft) == len(found)
    if draft != found:  # two continuations that promise the same, up to rounding
        length, shares = asked.draft_basis
        rates = [min(length + i, 5) / (min(length + i, 5) + 3) for i in range(len(shares))]
        assert sum(
            math.prod(s * r for s, r in zip(shares[:n], rates[:n], strict=True)) for n in range(1, len(shares) + 1)
        ) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3, 4, 9, 1, 2, 3, 7, 8, 1, 2, 3], [4, 9, 1, 2, 3, 7]),  # 4 twice, 7 once
        ([5, 1, 2, 6, 7, 8, 9, 4, 5, 1, 3, 5, 1], [3, 5, 1]),  # of equally frequent ones the latest
        ([1, 2, 3], []),
    ],
)
def test_suffix_drafts_follow_the_most_frequent_continuation(tokens: list[int], draft: list[int]) -> None:
    assert SUFFIX().draft(request(tokens), 6) == draft


def test_a_draft_ends_where_its_places_disagree() -> None:
    once = [token for follower in range(20, 32) for token in (1, follower)]
    assert SUFFIX().draft(request([*once, 1]), 6) == []


SHARED = partial(Drafter, max_tokens=6, longest=5, shortest=1, num_places=8, num_recent=12)


def ended(prompt: list[int], answer: list[int], **others: Any) -> Request:
    own = request(prompt)
    own.token_ids += answer
    for name, value in others.items():
        setattr(own, name, value)
    return own


def test_recent_answers_of_other_requests_are_followed() -> None:
    drafter = SHARED()
    drafter.keep(ended([50, 51, 52], [1, 2, 3, 4, 5]))
    assert drafter.draft(request([9, 1, 2]), 6) == [3, 4, 5], "up to the answer's end"
    assert drafter.draft(request([50, 51]), 6) == [], "prompts are not kept"
    assert drafter.draft(request([9, 5]), 6) == [], "nothing follows an end"
    assert drafter.draft(request([1, 2, 7, 1, 2]), 2) == [7, 1], "the text itself comes last"
    assert SUFFIX().draft(request([9, 1, 2]), 6) == []


def test_answers_with_a_salt_are_not_shared() -> None:
    drafter = SHARED()
    drafter.keep(ended([9], [1, 2, 3], cache_salt="mine"))
    assert drafter.draft(request([9, 1, 2]), 6) == []
    drafter.keep(ended([9], [1, 2, 3]))
    assert drafter.draft(request([9, 1, 2]), 6) == [3]
    assert drafter.draft(ended([9], [1, 2], cache_salt="mine"), 6) == []


def test_the_oldest_answers_are_forgotten() -> None:
    drafter = SHARED()
    for start in (10, 20, 30):
        drafter.keep(ended([9], [*range(start, start + 5)]))
    assert drafter.draft(request([9, 10, 11]), 6) == []
    assert drafter.draft(request([9, 20, 21]), 6) == [22, 23, 24]
    assert drafter.draft(request([9, 30, 31]), 6) == [32, 33, 34]


@settings(max_examples=200)
@given(
    answers=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), max_size=6),
    text=st.lists(st.integers(0, 3), min_size=1, max_size=20),
)
def test_drafts_from_answers_are_tokens_that_followed_there(answers: list[list[int]], text: list[int]) -> None:
    drafter = SHARED()
    for answer in answers:
        drafter.keep(ended([9], answer))
    draft = drafter.draft(request(text), 6)
    places = [*answers, text]
    for start in range(len(draft)):
        pair = [*text, *draft][len(text) + start - 1 : len(text) + start + 1]
        assert any(pair == own[at : at + 2] for own in places for at in range(len(own) - 1))


AGAIN = [1, 2, 3, 4, 5, 6, 1, 2, 3]


def again() -> Request:
    """A request whose drafted tokens were right with 3/4 behind three that recur."""
    known = request(AGAIN)
    known.draft_rates = [0.0, 1 / 2, 2 / 3, 3 / 4]
    return known


def times(drafter: Drafter, **seconds: float) -> None:
    """Record steps of a request with so many rows: ``_3=0.1`` is a step of three."""
    for name, each in seconds.items():
        rows = int(name[1:])
        drafter.time([Chunk(request([1]), 1, 2, range(0), True, [0] * (rows - 1))], each)


def test_as_many_tokens_are_drafted_as_pay() -> None:
    def length(**seconds: float) -> int:
        drafter = Drafter(max_tokens=3, longest=3, shortest=2, paced=True)
        times(drafter, **seconds)
        return len(drafter.draft(again(), 3))

    # Each token is right with 3/4: one makes 1.75 tokens of a step, two 2.31, three 2.73.
    assert length() == length(_1=1.0) == 3, "a row count never measured is tried"
    assert length(_1=1.0, _4=1.4) == 3
    assert length(_1=1.0, _2=1.7, _3=2.4, _4=3.0) == 1
    assert length(_1=1.0, _2=1.8, _4=3.6) == 0
    assert length(_1=1.0, _2=1.2, _3=9.0) == 1


def one_step(drafter: Drafter, num_rows: int = 1, num_seqs: int = 1, each: Request | None = None) -> list[int]:
    """The draft of the only sequence of a step that may have one."""
    drafter.prepare([], num_rows, num_seqs)
    return drafter.draft(each or again(), 3, num_rows, num_seqs)


def test_the_other_sequences_wait_for_a_draft_too() -> None:
    drafter = Drafter(max_tokens=3, longest=3, shortest=2, paced=True)
    times(drafter, _1=1.0, _4=1.6, _7=2.2)
    assert len(one_step(drafter, num_rows=1, num_seqs=1)) == 3
    assert one_step(drafter, num_rows=4, num_seqs=4) == [4, 5]
    times(drafter, **{f"_{rows}": 1.6 + 2 * (rows - 4) for rows in range(5, 9)})
    assert one_step(drafter, num_rows=4, num_seqs=4) == []


def test_what_others_of_the_step_draft_counts_as_tokens_and_rows() -> None:
    """Each token is right with 3/4, and a row takes a quarter of a step of two: two tokens make 3.31 / 1.5, and then one more 4.06 / 1.75."""
    drafter = Drafter(max_tokens=3, longest=3, shortest=2, paced=True)
    times(drafter, _2=1.0, _6=2.0)
    for _ in range(2):  # a new step
        drafter.prepare([], 2, 2)
        first = drafter.draft(again(), 3, num_rows=2, num_seqs=2)
        assert [len(first), len(drafter.draft(again(), 3, num_rows=4, num_seqs=2))] == [2, 1]


def test_wrong_drafts_stop_drafting_until_one_is_tried_again() -> None:
    drafter = Drafter(max_tokens=3, longest=3, shortest=2, paced=True)
    times(drafter, _1=1.0, _2=1.3, _4=1.9)
    wrong = again()
    num_failures = 0
    while (draft := one_step(drafter, each=wrong)) and num_failures < 20:
        drafter.learn(wrong, len(draft), 0, [])
        num_failures += 1
    assert 1 < num_failures < 20
    wrong.token_ids = [*range(100, 123), *AGAIN]
    wrong.token_bytes.clear()
    assert len(wrong.token_ids) == 32 and one_step(drafter, each=wrong) == [4]
    for _ in range(20):
        drafter.learn(wrong, 1, 1, [])
    wrong.token_ids.append(4)
    assert len(one_step(drafter, each=wrong)) == 3, "it was right again"
    assert len(one_step(drafter, each=again())) == 2, "each request is judged alone"


def test_one_slow_step_does_not_end_drafting() -> None:
    drafter = Drafter(max_tokens=3, longest=3, shortest=2, paced=True)
    times(drafter, _1=1.0, _2=1.1, _4=1.2)
    times(drafter, _4=500.0)
    assert len(drafter.draft(again(), 3)) == 3


def test_a_slow_step_is_forgotten_when_none_like_it_was_seen_for_long() -> None:
    drafter = Drafter(max_tokens=3, longest=3, shortest=2, paced=True)
    times(drafter, _1=1.0)
    for _ in range(20):
        times(drafter, _4=9.0)
    assert drafter.draft(again(), 3) == []
    for _ in range(200):
        times(drafter, _1=1.0)
    assert len(drafter.draft(again(), 3)) == 3


def test_steps_with_prompts_are_not_timed() -> None:
    drafter = Drafter(max_tokens=3, longest=3, shortest=2, paced=True)
    drafter.time([Chunk(request([1] * 9), 0, 4, range(0), False)], 9.0)
    times(drafter, _1=1.0, _2=1.7, _3=2.4, _4=3.0)
    assert len(drafter.draft(again(), 3)) == 1


def test_replicas_run_at_the_same_time() -> None:
    drafter = Drafter(max_tokens=3, longest=3, shortest=2, paced=True)
    other = request([1], "other")
    other.replica = 1
    drafter.time([Chunk(each, 1, 2, range(0), True) for each in (request([1]), other)], 1.0)
    for _ in range(20):
        times(drafter, _4=9.0)
    assert drafter.draft(again(), 3) == [], "the step had one row in each replica"


@pytest.mark.parametrize("name", DRAFTERS)
def test_what_the_flag_names_drafts_a_repeated_line(name: str) -> None:
    line = [*range(100, 110)]
    assert DRAFTERS[name]().draft(request([*line, 1, *line[:5]]), 9)[:5] == line[5:]


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


def test_steps_of_few_sequences_are_planned_ahead_while_many_wait() -> None:
    sizes: dict[str, Any] = {"max_num_batched_tokens": 8, "num_blocks": 64, "block_size": 4}
    limits = Limits(max_model_len=64, max_num_seqs=1, max_drafting_seqs=1, **sizes)
    replicas = Replicas(limits, 2, DRAFTER, EngineCounters())
    for name, replica, may_draft in (("a", 0, True), ("b", 0, True), ("c", 1, True), ("d", 1, False)):
        replicas.add(request([7] * 4, name), replica)
        assert replicas.may_draft(1) == may_draft


class Greedy(Drafter):
    """Guesses as many tokens as there is room for."""

    def draft(self, request: Request, room: int, num_rows: int = 1, num_seqs: int = 1) -> list[int]:
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


@pytest.mark.parametrize("groups", [LayerGroups(), LayerGroups(num_full=1, num_sliding=2, window=8)])
def test_failed_drafts_leave_a_block_for_each_next_token(groups: LayerGroups) -> None:
    """In every group of layers; a window is longer here than what it could free."""
    sizes: dict[str, Any] = {"max_model_len": 32, "max_num_batched_tokens": 64, "num_blocks": 8 * groups.num}
    limits = Limits(**sizes, max_num_seqs=3, block_size=4, groups=groups)
    scheduler = Scheduler(limits, Greedy(max_tokens=64, longest=1, shortest=1))
    scheduler.sequences.add(request([7] * 7, "a", max_tokens=20))
    scheduler.sequences.add(request([8] * 3, "b", max_tokens=20))
    scheduler.sequences.add(request([9] * 3, "c", max_tokens=20))
    for _ in range(4):
        draft_of(scheduler)
    assert scheduler.counters.num_preemptions == 0
