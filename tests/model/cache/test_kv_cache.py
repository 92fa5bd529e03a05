"""A cache on the host gives the bits of one on the device; its buffers keep their order; failures are reported."""

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.server.local_engine import LocalEngine, continue_prompts, local_engine
from helpers.server.mixed_requests import scores_of_mixed_load
from tiny import make_tiny
from torch import Tensor

from tightwire.bench.stream.order import OrderCheck
from tightwire.buffers import BufferConflictError, BufferEvent, BufferPool, PoolBuffer
from tightwire.model.cache import kv_cache
from tightwire.model.cache.kv_cache import OffloadedCache, gather_blocks, runs_of
from tightwire.model.checkpoint.errors import CacheError
from tightwire.model.open import Checkpoint, open_checkpoint
from tightwire.model.step import StepArrays
from tightwire.model.weights import WeightPlan
from tightwire.server.engine.drafts import Drafter
from tightwire.server.plan.weight_decision import spread

NUM_LAYERS = 3
PROMPTS = [list(range(3, 60)), [7, 8, 9], list(range(100, 190))]
STREAMED = WeightPlan(source="stream", origin="host", streamed=spread(NUM_LAYERS, NUM_LAYERS))


@pytest.fixture(name="checkpoint", scope="module")
def fixture_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    shape: dict[str, Any] = {
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "num_hidden_layers": NUM_LAYERS,
    }
    return open_checkpoint(str(make_tiny(tmp_path_factory.mktemp("m"), **shape)))


def caches_of(local: LocalEngine) -> Iterator[OffloadedCache]:
    for runner in local.runners:
        assert isinstance(runner.cache, OffloadedCache)
        yield runner.cache


def events_of(cache: OffloadedCache) -> list[BufferEvent]:
    """All that happened, once the last layers have been saved."""
    deadline_s = time.monotonic() + 20
    while any(buffer.state != "free" for buffer in cache.pool.buffers):
        assert time.monotonic() < deadline_s, "something is never saved"
        time.sleep(0.001)
    return list(cache.pool.events)


def answers(local: LocalEngine) -> dict[str, list[Any]]:
    rng = random.Random(10)
    stem = [rng.randrange(256) for _ in range(40)]
    beginnings = [stem, stem[:19], [], [4, 5, 6, 4, 5] * 6]
    return scores_of_mixed_load(local.engine, rng, beginnings, range(256), 12)


# What runs beside an offloaded cache, and the most blocks that a step may have (of 8 tokens; 25 are a longest sequence).
LOADS: dict[str, tuple[int, dict[str, Any]]] = {
    "preempted": (30, {"num_blocks": 30, "max_num_seqs": 8, "max_num_batched_tokens": 24}),
    "slots of one sequence": (25, {"max_num_batched_tokens": 64}),
    "prefix cache all": (100, {"prefix_cache": "all", "max_num_batched_tokens": 64}),
    "no prefix cache": (100, {"prefix_cache": "none"}),
    "three ranks, preempted": (28, {"num_blocks": 30, "tp": 3, "max_num_batched_tokens": 64}),
    "speculation": (100, {"drafter": Drafter(max_tokens=4, longest=3, shortest=1)}),
    "speculation in little": (26, {"drafter": Drafter(max_tokens=9, longest=3, shortest=1)}),
    "8 bits, preempted": (
        30,
        {"num_blocks": 30, "max_num_seqs": 8, "max_num_batched_tokens": 24, "kv_dtype": torch.int8},
    ),
    "8 bits on two ranks": (100, {"tp": 2, "kv_dtype": torch.int8, "prefix_cache": "all"}),
    "halves in turns": (100, {"tp": 2, "overlap": True}),
    "parts": (100, {"tp": 2, "most_rows": 32}),
    "planned ahead, preempted": (30, {"num_blocks": 30, "plan_ahead": True, "max_num_batched_tokens": 64}),
    "weights stream too": (100, {"tp": 2, "weight_plan": STREAMED, "most_rows": 48}),
}


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint) -> Callable[..., dict[str, list[Any]]]:
    """The answers of a cache on the device, computed once: the other options of a load change no bit."""

    def compute(tp: int, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> dict[str, list[Any]]:
        sizes: dict[str, Any] = {"num_blocks": 100, "block_size": 8, "max_model_len": 200}
        with local_engine(checkpoint, tp=tp, dtype=dtype, kv_dtype=kv_dtype, **sizes) as local:
            return answers(local)

    return cache(compute)


@pytest.mark.parametrize(("name", "dtype"), list(zip(LOADS, cycle((torch.float32, torch.bfloat16)), strict=False)))
def test_answers_are_those_of_a_cache_on_the_device(
    checkpoint: Checkpoint, name: str, dtype: torch.dtype, expected: Callable[..., dict[str, list[Any]]]
) -> None:
    buffer_blocks, options = LOADS[name]
    options = {"num_blocks": 100, "block_size": 8, "max_model_len": 200, "dtype": dtype} | options
    with local_engine(checkpoint, **options, buffer_blocks=buffer_blocks) as local:
        assert answers(local) == expected(options.get("tp", 1), dtype, options.get("kv_dtype"))
        stats = local.engine.stats()
        assert stats.total.num_free_blocks == stats.total.num_blocks
        assert stats.counters.num_preemptions > 0 or "preempted" not in name
        assert stats.counters.num_accepted_draft_tokens > 0 or "speculation" not in name
        assert stats.counters.num_steps_ahead > 0 or "planned ahead" not in name
        for own in caches_of(local):
            events = events_of(own)
            OrderCheck(saves=True).check(events)
            used = [event.owner for event in events if event.kind == "use"]
            assert used == list(range(NUM_LAYERS)) * stats.counters.num_steps


def test_only_blocks_of_the_step_are_moved(checkpoint: Checkpoint) -> None:
    block_bytes = 2 * 3 * 16 * 8 * 4  # keys and values of 3 heads, 16 tokens, 8 numbers in float32
    with local_engine(checkpoint, num_blocks=40, max_model_len=256, buffer_blocks=40) as local:
        (cache,) = caches_of(local)
        continue_prompts(local.engine, [list(range(40))], max_tokens=1)
        events_of(cache)
        assert cache.flow().num_bytes == NUM_LAYERS * 3 * block_bytes  # written: three blocks; read: none
        before = cache.flow().num_bytes
        # Two blocks are found in the prefix cache, and read by four sequences at once; each reads and writes one of its own.
        continue_prompts(local.engine, [[*range(32), index] for index in range(4)], max_tokens=3)
        events_of(cache)
        prompts, decodes = 2 + 4, 2 * (2 + 4 + 4)
        assert cache.flow().num_bytes - before == NUM_LAYERS * (prompts + decodes) * block_bytes


def jittery(delays: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each move take its time, another one each."""
    copy = kv_cache.copy_runs

    def slow(target_NX: Tensor, source_MX: Tensor, runs_R3: Tensor) -> None:
        delays.append(delays.pop(0))
        time.sleep(delays[-1])
        copy(target_NX, source_MX, runs_R3)

    monkeypatch.setattr(kv_cache, "copy_runs", slow)


@pytest.mark.parametrize("overlap", [False, True])
def test_order_and_tokens_do_not_depend_on_delays(
    checkpoint: Checkpoint, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"tp": 2, "overlap": overlap, "num_blocks": 40, "max_model_len": 256}
    with local_engine(checkpoint, **options) as local:
        expected = continue_prompts(local.engine, PROMPTS, max_tokens=8)
    draw = random.Random(1)
    jittery([draw.choice([0.0, 0.0, 0.001, 0.004]) for _ in range(97)], monkeypatch)
    release = OffloadedCache.release

    def late(self: OffloadedCache, index: int) -> None:
        time.sleep(draw.choice([0.0, 0.0, 0.003]))
        release(self, index)

    monkeypatch.setattr(OffloadedCache, "release", late)
    with local_engine(checkpoint, **options, buffer_blocks=40) as local:
        assert continue_prompts(local.engine, PROMPTS, max_tokens=8) == expected
        for cache in caches_of(local):
            OrderCheck(saves=True).check(events_of(cache))


class _Hasty(BufferPool):
    """Does not wait for what ``skipped`` would wait for."""

    skipped = ""

    def use(self, owner: int, timeout_s: float) -> PoolBuffer:
        return self._grab("use", owner, "used") if self.skipped == "use" else super().use(owner, timeout_s)

    def save(self, owner: int) -> PoolBuffer:
        return self._grab("save", owner, "saving") if self.skipped == "save" else super().save(owner)

    def fill(self, owner: int, number: int | None = None, timeout_s: float = math.inf) -> PoolBuffer:
        return (
            self._grab("fill", owner, "filling") if self.skipped == "fill" else super().fill(owner, number, timeout_s)
        )

    def _grab(self, kind: str, owner: int, state: str) -> PoolBuffer:
        with self._changed:
            self.check_open()
            buffer = self.buffers[owner % 2]
            buffer.owner, buffer.state = owner, state
            self._note(kind, owner, buffer.number)
            return buffer


@pytest.mark.parametrize("skipped", ["use", "save", "fill"])
def test_every_wait_is_necessary(checkpoint: Checkpoint, skipped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them has something to wait for: the mover is slow where it is to be waited for, else the pass is."""
    monkeypatch.setattr(_Hasty, "skipped", skipped)
    monkeypatch.setattr(kv_cache, "BufferPool", _Hasty)
    if skipped == "use":
        jittery([0.005], monkeypatch)
    else:
        release = OffloadedCache.release

        def late(self: OffloadedCache, index: int) -> None:
            time.sleep(0.005)
            release(self, index)

        monkeypatch.setattr(OffloadedCache, "release", late)
    if skipped == "fill":  # what has not been saved would else be waited for just before
        monkeypatch.setattr(OffloadedCache, "_save", lambda self, layer, runs_R3: None)
    with local_engine(checkpoint, num_blocks=40, max_model_len=256, buffer_blocks=40) as local:
        (cache,) = caches_of(local)
        cache._timeout_s = 0.2
        with contextlib.suppress(BufferConflictError, CacheError):  # the pool itself sees most of it
            continue_prompts(local.engine, PROMPTS, max_tokens=1)
        cache.close()
        with pytest.raises(BufferConflictError, match="C2" if skipped == "fill" else "C1"):
            OrderCheck(saves=True).check([*cache.pool.events])


def test_a_step_that_begins_before_the_last_was_saved_is_detected(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = OffloadedCache._save

    def forgetful(self: OffloadedCache, layer: int, runs_R3: Tensor) -> None:
        if layer != NUM_LAYERS - 1:
            save(self, layer, runs_R3)

    monkeypatch.setattr(OffloadedCache, "_save", forgetful)
    with local_engine(checkpoint, num_blocks=40, max_model_len=256, buffer_blocks=40) as local:
        (cache,) = caches_of(local)
        cache._timeout_s = 0.2
        with pytest.raises(CacheError, match="did not arrive from the host: .* is released for 2"):
            continue_prompts(local.engine, PROMPTS, max_tokens=4)


@pytest.mark.parametrize("number", [0, 1, 6, 9, 10, 23])
def test_a_failed_move_ends_the_step_with_its_error(
    checkpoint: Checkpoint, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be it on the way there or back, in the first step or a later one."""
    copy, moves = kv_cache.copy_runs, iter(range(1000))

    def failing(target_NX: Tensor, source_MX: Tensor, runs_R3: Tensor) -> None:
        if next(moves) == number:
            raise OSError("the host's memory is gone")
        copy(target_NX, source_MX, runs_R3)

    monkeypatch.setattr(kv_cache, "copy_runs", failing)
    with (
        local_engine(checkpoint, num_blocks=40, max_model_len=256, buffer_blocks=40) as local,
        pytest.raises(OSError, match="the host's memory is gone"),
    ):
        continue_prompts(local.engine, PROMPTS, max_tokens=10)


def test_a_hanging_move_times_out(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    jittery([0.6], monkeypatch)
    with local_engine(checkpoint, num_blocks=40, max_model_len=256, buffer_blocks=40) as local:
        (cache,) = caches_of(local)
        cache._timeout_s = 0.05
        with pytest.raises(
            CacheError, match=r"keys and values of layer 0 did not arrive .* no bytes arrived for 0\.05 s"
        ):
            continue_prompts(local.engine, PROMPTS, max_tokens=2)


def test_a_step_that_needs_more_than_a_buffer_is_refused(checkpoint: Checkpoint) -> None:
    with local_engine(checkpoint, num_blocks=40, max_model_len=256, buffer_blocks=16) as local:
        (cache,) = caches_of(local)
        cache.num_blocks = 3
        with pytest.raises(ValueError, match="a step needs 4 cache blocks, but only 3 fit"):
            continue_prompts(local.engine, PROMPTS[:1], max_tokens=2)


def test_closing_ends_the_thread_and_later_steps_fail(checkpoint: Checkpoint) -> None:
    with local_engine(checkpoint, num_blocks=40, max_model_len=256, buffer_blocks=40) as local:
        (cache,) = caches_of(local)
        continue_prompts(local.engine, PROMPTS, max_tokens=2)
        cache.close()
        cache.close()
        assert not cache._thread.is_alive()
        with pytest.raises(CacheError, match="closed"):
            continue_prompts(local.engine, PROMPTS, max_tokens=2)


def test_one_layer_and_two(tmp_path: Path) -> None:
    """Fewer layers than slots, and as many."""
    for num_layers in (1, 2):
        checkpoint = open_checkpoint(str(make_tiny(tmp_path / str(num_layers), num_hidden_layers=num_layers)))
        with local_engine(checkpoint, max_model_len=256) as local:
            expected = continue_prompts(local.engine, PROMPTS, max_tokens=6)
        with local_engine(checkpoint, max_model_len=256, buffer_blocks=64) as local:
            assert continue_prompts(local.engine, PROMPTS, max_tokens=6) == expected
            for cache in caches_of(local):
                OrderCheck(saves=True).check(events_of(cache))


P = 4


def step_of(tables: list[list[int]], contexts: list[int], queries: list[int]) -> StepArrays:
    width = max(map(len, tables))
    tables_BM = np.array([table + [0] * (width - len(table)) for table in tables], np.int32)
    positions = [list(range(c - q, c)) for c, q in zip(contexts, queries, strict=True)]
    slots = [table[p // P] * P + p % P for table, places in zip(tables, positions, strict=True) for p in places]
    return StepArrays(
        token_ids_T=np.zeros(sum(queries), np.int32),
        positions_T=np.array(list(chain.from_iterable(positions)), np.int32),
        slots_LT=np.array([slots], np.int32),
        query_start_B1=np.array([0, *np.cumsum(queries)], np.int32),
        context_lens_B=np.array(contexts, np.int32),
        block_tables_LBM=tables_BM[None],
        num_decode_rows=0,
    )


def test_blocks_of_the_step_are_numbered_from_zero_and_shared_ones_come_once() -> None:
    # Two share block 9; the first ends in the middle of block 2, the other begins block 40 anew. Block 77 is spare.
    step = step_of([[9, 2], [9, 30, 40, 77]], contexts=[6, 10], queries=[1, 2])
    renamed, blocks = gather_blocks(step, P)
    assert blocks.blocks_N.tolist() == [2, 9, 30, 40]
    assert blocks.read_I.tolist() == [0, 1, 2]
    assert blocks.written_J.tolist() == [0, 3]
    assert renamed.block_tables_LBM.tolist() == [[[1, 0, 0, 0], [1, 2, 3, 0]]]
    assert renamed.slots_LT.tolist() == [[0 * P + 1, 3 * P, 3 * P + 1]]
    assert renamed.slots_LT.dtype == renamed.block_tables_LBM.dtype == np.int32
    assert renamed.positions_T is step.positions_T


def test_a_new_prompt_fetches_no_blocks() -> None:
    renamed, blocks = gather_blocks(step_of([[5, 3]], contexts=[7], queries=[7]), P)
    assert blocks.read_I.tolist() == []
    assert blocks.written_J.tolist() == [0, 1]
    assert renamed.block_tables_LBM.tolist() == [[[1, 0]]]


@pytest.mark.parametrize("seed", range(20))
def test_renumbering_keeps_every_position(seed: int) -> None:
    rng = np.random.default_rng(seed)
    contexts = rng.integers(1, 30, 5).tolist()
    queries = [int(rng.integers(1, c + 1)) for c in contexts]
    blocks = iter(rng.permutation(60).tolist())
    tables = [[next(blocks) for _ in range(-(-c // P) + int(rng.integers(0, 2)))] for c in contexts]
    step = step_of(tables, contexts, queries)
    renamed, found = gather_blocks(step, P)
    for table, new_table, context, query in zip(tables, renamed.block_tables_LBM[0], contexts, queries, strict=True):
        for position in range(context):
            assert found.blocks_N[new_table[position // P]] == table[position // P]
            if position < context - query:
                assert new_table[position // P] in found.read_I
    assert (found.blocks_N[renamed.slots_LT // P] * P + renamed.slots_LT % P == step.slots_LT).all()
    assert set(found.written_J.tolist()) == set((renamed.slots_LT[0] // P).tolist())
    assert len(found.blocks_N) == sum(-(-c // P) for c in contexts)


def test_runs_continue_while_both_sides_go_up_by_one() -> None:
    runs = runs_of(np.array([3, 4, 5, 9, 10, 12]), np.array([0, 1, 2, 3, 5, 6]))
    assert runs.tolist() == [[3, 0, 3], [9, 3, 1], [10, 5, 1], [12, 6, 1]]
    assert runs_of(np.array([], int), np.array([], int)).shape == (0, 3)
