"""The chunks of prompts that pass stages: equal times, the shortest sum of times, and what is learned from steps."""

import random

import pytest

from tightwire.server.config.chunks import ChunkSizes, ChunkTimes

TIMES = ChunkTimes(chunk_s=4e-3, row_s=1e-3, pair_s=1e-6)


def _chunks(times: ChunkTimes, num_tokens: int, num_stages: int) -> list[tuple[int, int]]:
    part_s, found, start = times.part_s([(0, num_tokens)], num_stages), [], 0
    while start < num_tokens:
        end = min(num_tokens, start + times.num_rows(start, part_s))
        found.append((start, end))
        start = end
    return found


def _staged_s(times: ChunkTimes, chunks: list[tuple[int, int]], num_stages: int) -> float:
    done_s = [0.0] * num_stages
    for chunk in chunks:
        for stage in range(num_stages):
            before_s = done_s[stage - 1] if stage else 0.0
            done_s[stage] = max(done_s[stage], before_s) + times.chunk_s + times.rows_s(*chunk)
    return done_s[-1]


@pytest.mark.parametrize(("num_tokens", "num_stages"), [(128, 2), (512, 2), (4096, 2), (512, 4), (4096, 4)])
def test_chunks_take_equal_time_and_end_sooner_than_chunks_of_equal_rows(num_tokens: int, num_stages: int) -> None:
    chunks = _chunks(TIMES, num_tokens, num_stages)
    each_s = [TIMES.rows_s(*chunk) for chunk in chunks]
    row_s = TIMES.row_s + TIMES.pair_s * num_tokens
    assert max(each_s) - min(each_s[:-1], default=max(each_s)) < row_s
    ours_s = _staged_s(TIMES, chunks, num_stages)
    for rows in (16, 32, 48, 64, 96, 128, 256, 512):
        equal = [(start, min(start + rows, num_tokens)) for start in range(0, num_tokens, rows)]
        assert ours_s < 1.02 * _staged_s(TIMES, equal, num_stages), rows


def test_a_slow_wire_makes_smaller_chunks_and_so_the_last_one_comes_sooner() -> None:
    fast = TIMES.part_s([(0, 512)], 2)
    assert TIMES.part_s([(0, 512)], 2, moving_s=3 * TIMES.row_s) == pytest.approx(fast * 13 / 23)
    sizes = ChunkSizes(TIMES, num_learned=99, moving_s=3 * TIMES.row_s)
    assert sizes.choose([(0, 512)], 0, 2) < 0.6 * ChunkSizes(TIMES, num_learned=99).choose([(0, 512)], 0, 2)


def test_a_short_prompt_passes_in_one_chunk_and_so_does_every_one_where_chunks_are_costly() -> None:
    assert len(_chunks(TIMES, 6, 2)) == 1
    assert len(_chunks(ChunkTimes(10.0, 1e-3, 1e-6), 512, 2)) == 1


def test_times_are_learned_from_steps_and_follow_a_host_that_gets_slower() -> None:
    sizes, rng = ChunkSizes(), random.Random(1)

    def compute(times: ChunkTimes, num_tokens: int) -> None:
        start = 0
        while start < num_tokens:
            end = min(num_tokens, start + sizes.choose([(0, num_tokens)], start, 2))
            noise = rng.uniform(0.95, 1.05) * (10 if rng.random() < 0.05 else 1)
            sizes.learn([(start, end)], noise * (times.chunk_s + times.rows_s(start, end)))
            start = end

    compute(TIMES, 320)
    assert sizes.times.row_s == pytest.approx(TIMES.row_s, rel=0.3)
    for factor in (1, 3):
        slower = ChunkTimes(factor * TIMES.chunk_s, factor * TIMES.row_s, factor * TIMES.pair_s)
        for _ in range(8):
            for num_tokens in (100, 512, 2048):
                compute(slower, num_tokens)
        for chunk in ((0, 64), (448, 512), (1900, 2048)):
            wanted_s = slower.chunk_s + slower.rows_s(*chunk)
            assert sizes.times.chunk_s + sizes.times.rows_s(*chunk) == pytest.approx(wanted_s, rel=0.15)


def test_steps_without_time_or_with_few_rows_teach_nothing() -> None:
    sizes = ChunkSizes()
    sizes.learn([(0, 64)], 0.0)
    sizes.learn([(0, 3)], 1.0)
    assert sizes.num_learned == 0
