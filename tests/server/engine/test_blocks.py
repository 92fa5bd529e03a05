"""Blocks: the pool's allocation and holders, and prefixes shared between sequences."""

import random
from typing import Any

import pytest

from tightwire.model.layer_groups import LayerGroups
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.server.config.limits import Limits
from tightwire.server.engine.blocks import BlockPool, PrefixCache
from tightwire.server.engine.request import Request, make_request
from tightwire.server.engine.scheduler import Scheduler
from tightwire.server.engine.step_builder import ScheduledStep
from tightwire.server.ipc.messages import AddRequest


def _num_used(pool: BlockPool) -> int:
    return pool.num_blocks - pool.num_free


def test_every_block_is_allocated_once() -> None:
    pool = BlockPool(5)
    taken = pool.allocate(3) + pool.allocate(2)
    assert sorted(taken) == [0, 1, 2, 3, 4]
    assert (pool.num_free, _num_used(pool)) == (0, 5)
    pool.free(taken[1:4])
    assert sorted(pool.allocate(3)) == sorted(taken[1:4])


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(ValueError, match="asked for 3 blocks, 2 of 4 are free"):
        pool.allocate(3)
    assert pool.num_free == 2
    assert pool.allocate(0) == [] and pool.num_free == 2
    with pytest.raises(ValueError):
        pool.allocate(-1)


def test_double_free_is_an_error() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.free([block])
    with pytest.raises(ValueError, match=f"block {block} is freed but has no holder"):
        pool.free([block])
    with pytest.raises(ValueError, match="block 4 is freed"):
        pool.free([4])
    with pytest.raises(ValueError, match="block -1 is freed"):
        pool.free([-1])
    assert pool.num_free == 4


def test_kept_blocks_are_allocated_last_in_lru_order() -> None:
    pool = BlockPool(4)
    taken = pool.allocate(3)
    for block in taken[:2]:
        pool.keep(block)
    pool.free([taken[1], taken[0], taken[2]])
    assert pool.num_free == 4 and pool.is_kept(taken[0]) and not pool.is_kept(taken[2])
    assert set(pool.allocate(2)).isdisjoint(taken[:2])
    assert pool.allocate(2) == [taken[1], taken[0]]
    assert not pool.is_kept(taken[0])


def test_a_shared_block_is_free_after_its_last_holder() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.keep(block)
    pool.share([block])
    pool.free([block])
    assert _num_used(pool) == 1
    pool.free([block])
    assert _num_used(pool) == 0
    pool.share([block])  # from among the free
    assert _num_used(pool) == 1 and pool.allocate(1) != [block]
    with pytest.raises(ValueError, match="0 of 2 are free"):
        pool.allocate(1)


def test_needs_a_block() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(0)


def test_random_owners_never_share() -> None:
    rng, pool, owners = random.Random(1), BlockPool(17), [[] for _ in range(6)]
    for _ in range(500):
        owner = rng.choice(owners)
        if owner and rng.random() < 0.5:
            pool.free(owner)
            owner.clear()
        else:
            owner += pool.allocate(rng.randint(0, pool.num_free))
        held = [block for blocks in owners for block in blocks]
        assert len(set(held)) == len(held) == _num_used(pool)


BLOCK = 4


def make_scheduler(prefix_cache: str = "prompts", **changes: Any) -> Scheduler:
    values: dict[str, Any] = {
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "num_blocks": 64,
        "block_size": BLOCK,
    }
    return Scheduler(Limits(**(values | changes), prefix_cache=prefix_cache))


def request(
    tokens: list[int], name: str = "r", *, salt: str = "", policy: int = 0, prompt_logprobs: int | None = None
) -> Request:
    params = SamplingParams(max_tokens=30, prompt_logprobs=prompt_logprobs)
    return make_request(AddRequest(name, tokens, params, cache_salt=salt), (), 0.0, policy)


def run(scheduler: Scheduler, token: int = 7) -> ScheduledStep:
    step = scheduler.schedule(0.0)
    assert step is not None
    for chunk in step.chunks:
        chunk.request.num_computed = chunk.end
        if chunk.samples:
            chunk.request.token_ids.append(token)
    return step


def finish(scheduler: Scheduler, sequence: Request, num_tokens: int = 1) -> None:
    """Run ``sequence`` alone to its end."""
    scheduler.sequences.add(sequence)
    for _ in range(num_tokens):
        run(scheduler)
    scheduler.sequences.remove(sequence)


def shares(step: ScheduledStep) -> dict[str, tuple[int, int]]:
    return {chunk.request.id: (chunk.start, chunk.end) for chunk in step.chunks}


def prefixes(scheduler: Scheduler) -> PrefixCache:
    assert scheduler.sequences.prefixes is not None
    return scheduler.sequences.prefixes


def test_a_second_sequence_starts_after_the_shared_prefix() -> None:
    scheduler = make_scheduler()
    finish(scheduler, request(list(range(10))))
    second = request([*range(9), 50, 51])
    scheduler.sequences.add(second)

    assert shares(run(scheduler)) == {"r": (8, 11)}
    assert second.num_cached_tokens == 8
    assert (scheduler.counters.num_prefix_queried_tokens, scheduler.counters.num_prefix_hit_tokens) == (21, 8)


def test_the_last_token_is_always_computed() -> None:
    scheduler = make_scheduler()
    finish(scheduler, request(list(range(8))))
    scheduler.sequences.add(request(list(range(8))))
    assert shares(run(scheduler)) == {"r": (4, 8)}


def test_sequences_of_one_step_share() -> None:
    scheduler = make_scheduler()
    first, second = request(list(range(10)), "first"), request(list(range(10)), "second")
    scheduler.sequences.add(first)
    scheduler.sequences.add(second)
    assert shares(run(scheduler)) == {"first": (0, 10), "second": (8, 10)}
    assert first.blocks[:2] == second.blocks[:2] and first.blocks[2] != second.blocks[2]
    assert _num_used(scheduler.sequences.pool) == 4


def test_a_shared_prefix_is_computed_by_one_sequence() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    tokens = list(range(30))
    for name in ("first", "second"):
        scheduler.sequences.add(request(tokens, name))
    scheduler.sequences.add(request([*tokens[:20], 99], "third"))
    assert shares(run(scheduler)) == {"first": (0, 16)}
    # What the others have alone comes beside its end.
    assert shares(run(scheduler)) == {"first": (16, 30), "second": (28, 29), "third": (20, 21)}
    assert shares(run(scheduler)) == {"first": (30, 31), "second": (29, 30), "third": (21, 22)}
    assert [r.num_cached_tokens for r in scheduler.sequences.running] == [0, 28, 20]
    assert (scheduler.counters.num_prefix_queried_tokens, scheduler.counters.num_prefix_hit_tokens) == (81, 48)


def test_copies_of_a_long_prompt_cost_one_prompt_and_their_ends() -> None:
    scheduler = make_scheduler(max_model_len=1024, num_blocks=400, max_num_seqs=8, max_num_batched_tokens=128)
    for number in range(8):
        scheduler.sequences.add(request(list(range(999)), str(number)))
    rows = 0
    while any(sequence.in_prompt for sequence in [*scheduler.sequences.waiting, *scheduler.sequences.running]):
        rows += sum(end - start for start, end in shares(run(scheduler)).values() if start < 999)
    assert rows == 999 + 7 * (999 - 996)


def test_a_started_block_is_replaced_by_a_cached_one() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6, max_num_seqs=3)
    scheduler.sequences.add(request(list(range(20)), "scored", prompt_logprobs=0))
    scheduler.sequences.add(request(list(range(20)), "plain"))
    steps = [shares(run(scheduler)) for _ in range(4)]
    assert sum(end - start for share in steps for name, (start, end) in share.items() if name == "plain") < 20
    first, second = scheduler.sequences.running
    assert list(first.blocks[:4]) == list(second.blocks[:4])
    for sequence in (first, second):
        scheduler.sequences.remove(sequence)
    assert _num_used(scheduler.sequences.pool) == 0


def test_the_computing_sequence_can_be_cancelled() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    first, second = request(list(range(30)), "first"), request(list(range(30)), "second")
    for sequence in (first, second):
        scheduler.sequences.add(sequence)
    assert shares(run(scheduler)) == {"first": (0, 8)}
    scheduler.sequences.remove(first)
    assert shares(run(scheduler)) == {"second": (8, 16)}


def test_equal_blocks_after_different_prefixes_are_not_shared() -> None:
    scheduler = make_scheduler()
    finish(scheduler, request([1, 1, 1, 1, 5, 6, 7, 8, 9]))
    scheduler.sequences.add(request([2, 2, 2, 2, 5, 6, 7, 8, 9]))
    assert shares(run(scheduler)) == {"r": (0, 9)}


@pytest.mark.parametrize(("other", "start"), [({}, 8), ({"salt": "mine"}, 0), ({"policy": 1}, 0)])
def test_salts_and_policies_share_nothing(other: dict[str, Any], start: int) -> None:
    scheduler = make_scheduler()
    finish(scheduler, request(list(range(10))))
    scheduler.sequences.add(request(list(range(10)), **other))
    assert shares(run(scheduler)) == {"r": (start, 10)}


def test_equal_salts_share() -> None:
    scheduler = make_scheduler()
    finish(scheduler, request(list(range(10)), salt="mine"))
    scheduler.sequences.add(request(list(range(10)), salt="mine"))
    assert shares(run(scheduler)) == {"r": (8, 10)}


def test_an_echo_computes_every_token_and_shares_them() -> None:
    scheduler = make_scheduler()
    finish(scheduler, request(list(range(10))))
    echo = request(list(range(10)), prompt_logprobs=0)
    scheduler.sequences.add(echo)
    assert shares(run(scheduler)) == {"r": (0, 10)}
    assert scheduler.counters.num_prefix_queried_tokens == 10  # nothing was looked for


@pytest.mark.parametrize(("prefix_cache", "start"), [("prompts", 4), ("all", 8), ("none", 0)])
def test_answers_are_cached_with_prefix_cache_all(prefix_cache: str, start: int) -> None:
    scheduler = make_scheduler(prefix_cache)
    finish(scheduler, request([1, 2, 3, 4, 5]), num_tokens=6)  # its sixth token is not in the cache
    scheduler.sequences.add(request([1, 2, 3, 4, 5, *[7] * 6]))
    assert shares(run(scheduler)) == {"r": (start, 11)}


def test_ends_of_prompts_are_evicted_first() -> None:
    scheduler = make_scheduler(num_blocks=16)
    finish(scheduler, request(list(range(41))))
    finish(scheduler, request(list(range(100, 125))))  # 7 blocks: six blank ones, and the last that was kept
    scheduler.sequences.add(request(list(range(41))))
    assert shares(run(scheduler)) == {"r": (36, 41)}


def test_spoiled_blocks_are_not_shared() -> None:
    scheduler = make_scheduler()
    broken = request(list(range(10)))
    scheduler.sequences.add(broken)
    run(scheduler)
    scheduler.sequences.remove(broken, spoiled=True)
    scheduler.sequences.add(request(list(range(10))))
    assert shares(run(scheduler)) == {"r": (0, 10)}


def test_a_preempted_sequence_returns_after_its_cached_prompt() -> None:
    scheduler = make_scheduler(num_blocks=16, max_num_seqs=2)
    old, young = request(list(range(20)), "old"), request(list(range(50, 70)), "young")
    scheduler.sequences.add(old)
    scheduler.sequences.add(young)
    while not scheduler.counters.num_preemptions:
        run(scheduler)
    scheduler.sequences.remove(old)
    assert shares(run(scheduler))["young"][0] > 0
    assert young.num_cached_tokens == 0  # of its first start
    assert (scheduler.counters.num_prefix_queried_tokens, scheduler.counters.num_prefix_hit_tokens) == (40, 0)


def test_a_sequence_that_is_not_admitted_holds_no_blocks() -> None:
    scheduler = make_scheduler(max_model_len=32, num_blocks=8, max_num_seqs=2)
    finish(scheduler, request(list(range(9))))
    scheduler.sequences.add(request(list(range(20, 44)), "big"))
    scheduler.sequences.add(request(list(range(9)), "next"))
    assert shares(run(scheduler)) == {"big": (0, 24)}
    assert scheduler.sequences.waiting[0].num_computed == 0 and not scheduler.sequences.waiting[0].blocks
    assert _num_used(scheduler.sequences.pool) == 6


def test_at_most_one_entry_per_block() -> None:
    scheduler = make_scheduler("all", num_blocks=16)
    for first in range(0, 3000, 30):
        finish(scheduler, request(list(range(first, first + 30))), num_tokens=5)
    assert len(prefixes(scheduler)._block_of) <= 16
    assert _num_used(scheduler.sequences.pool) == 0


def test_a_preempted_sequence_does_not_take_its_answer_from_a_prompt() -> None:
    scheduler = make_scheduler()
    first = request([1, 2, 3, 4, 5, 6], "first")
    scheduler.sequences.add(first)
    for _ in range(11):
        run(scheduler)
    scheduler.sequences.add(request([*first.token_ids, 9], "chat"))  # its prompt holds what first generated
    run(scheduler)
    scheduler.sequences.preempt(first)  # as a step does that is short of blocks
    starts = [shares(run(scheduler))["first"][0] for _ in range(2)]
    assert starts == [4, 6]  # the rest of its prompt, then its answer by the kernels of generated tokens


# One group of layers without a window, and one with a window of 8 tokens.
WINDOWED = LayerGroups(((0, 0), (1, 0)), 1, 1, 8)
LONG: dict[str, Any] = {"max_model_len": 400, "max_num_batched_tokens": 48, "num_blocks": 300}


def test_a_prefix_needs_the_last_window_of_blocks_only() -> None:
    scheduler = make_scheduler(groups=WINDOWED, **LONG)
    first = request(list(range(200)))
    finish(scheduler, first, num_tokens=9)
    second = request([*range(200), 500])
    scheduler.sequences.add(second)
    assert shares(run(scheduler)) == {"r": (200, 201)}
    # Keys are read in tiles of 64, so from position 192 on.
    assert [block < 0 for block in second.blocks[1::2]] == [True] * 48 + [False] * 3
    assert _num_used(scheduler.sequences.pool) == 51 + 3


def test_a_prefix_without_its_window_is_shorter() -> None:
    scheduler = make_scheduler(groups=WINDOWED, **LONG)
    finish(scheduler, request(list(range(200))), num_tokens=6)
    prefixes = scheduler.sequences.prefixes
    asked = request([*range(200), 500])
    assert prefixes.num_cached(asked) == 200
    for block, gone in ((48, 192), (40, 160), (32, 128), (47, 128), (31, 124)):
        del prefixes._block_of[prefixes._key(asked, block), 1]
        assert prefixes.num_cached(asked) == gone
    del prefixes._block_of[prefixes._key(asked, 30), 0]
    assert prefixes.num_cached(asked) == 120
    scheduler.sequences.add(asked)
    assert shares(run(scheduler)) == {"r": (120, 168)}


def test_a_model_of_windows_only_finds_a_prefix_whose_beginning_is_gone() -> None:
    few: dict[str, Any] = LONG | {"num_blocks": 50}
    scheduler = make_scheduler(groups=LayerGroups(((0, 0),), 0, 1, 8), **few)
    finish(scheduler, request(list(range(190))), num_tokens=5)
    finish(scheduler, request(list(range(500, 530))))
    asked = request([*range(190), 7])
    assert scheduler.sequences.prefixes._find((scheduler.sequences.prefixes._key(asked, 0), 0)) is None
    scheduler.sequences.add(asked)
    assert shares(run(scheduler)) == {"r": (188, 191)}


def test_what_a_broken_sequence_freed_is_not_shared_either() -> None:
    scheduler = make_scheduler(groups=LayerGroups(((0, 0),), 0, 1, 8), **LONG)
    broken = request(list(range(200)))
    scheduler.sequences.add(broken)
    for _ in range(5):
        run(scheduler)
    scheduler.sequences.remove(broken, spoiled=True)
    assert scheduler.sequences.prefixes.num_cached(request([*range(200), 7])) == 0
