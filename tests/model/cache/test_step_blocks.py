"""A step keeps its meaning when its blocks are numbered anew, and just what it needs travels."""

from itertools import chain

import numpy as np
import pytest

from tightwire.model.cache.step_blocks import gather_blocks, runs_of
from tightwire.model.step_arrays import StepArrays

P = 4


def step_of(tables: list[list[int]], contexts: list[int], queries: list[int]) -> StepArrays:
    width = max(map(len, tables))
    tables_BM = np.array([table + [0] * (width - len(table)) for table in tables], np.int32)
    positions = [list(range(c - q, c)) for c, q in zip(contexts, queries, strict=True)]
    slots = [table[p // P] * P + p % P for table, places in zip(tables, positions, strict=True) for p in places]
    return StepArrays(
        token_ids_T=np.zeros(sum(queries), np.int32),
        positions_T=np.array(list(chain.from_iterable(positions)), np.int32),
        slots_T=np.array(slots, np.int32),
        query_start_B1=np.array([0, *np.cumsum(queries)], np.int32),
        context_lens_B=np.array(contexts, np.int32),
        block_tables_BM=tables_BM,
        num_decode_rows=0,
    )


def test_blocks_of_the_step_are_numbered_from_zero_and_shared_ones_come_once() -> None:
    # Two share block 9; the first ends in the middle of block 2, the other begins block 40 anew. Block 77 is spare.
    step = step_of([[9, 2], [9, 30, 40, 77]], contexts=[6, 10], queries=[1, 2])
    renamed, blocks = gather_blocks(step, P)
    assert blocks.blocks_N.tolist() == [2, 9, 30, 40]
    assert blocks.read_I.tolist() == [0, 1, 2]
    assert blocks.written_J.tolist() == [0, 3]
    assert renamed.block_tables_BM.tolist() == [[1, 0, 0, 0], [1, 2, 3, 0]]
    assert renamed.slots_T.tolist() == [0 * P + 1, 3 * P, 3 * P + 1]
    assert renamed.slots_T.dtype == renamed.block_tables_BM.dtype == np.int32
    assert renamed.positions_T is step.positions_T


def test_a_prompt_that_begins_brings_nothing() -> None:
    renamed, blocks = gather_blocks(step_of([[5, 3]], contexts=[7], queries=[7]), P)
    assert blocks.read_I.tolist() == []
    assert blocks.written_J.tolist() == [0, 1]
    assert renamed.block_tables_BM.tolist() == [[1, 0]]


@pytest.mark.parametrize("seed", range(20))
def test_every_position_is_found_where_the_old_table_had_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    contexts = rng.integers(1, 30, 5).tolist()
    queries = [int(rng.integers(1, c + 1)) for c in contexts]
    blocks = iter(rng.permutation(60).tolist())
    tables = [[next(blocks) for _ in range(-(-c // P) + int(rng.integers(0, 2)))] for c in contexts]
    step = step_of(tables, contexts, queries)
    renamed, found = gather_blocks(step, P)
    for table, new_table, context, query in zip(tables, renamed.block_tables_BM, contexts, queries, strict=True):
        for position in range(context):
            assert found.blocks_N[new_table[position // P]] == table[position // P]
            if position < context - query:
                assert new_table[position // P] in found.read_I
    assert (found.blocks_N[renamed.slots_T // P] * P + renamed.slots_T % P == step.slots_T).all()
    assert set(found.written_J.tolist()) == set((renamed.slots_T // P).tolist())
    assert len(found.blocks_N) == sum(-(-c // P) for c in contexts)


def test_runs_are_as_long_as_both_sides_go_up_by_one() -> None:
    runs = runs_of(np.array([3, 4, 5, 9, 10, 12]), np.array([0, 1, 2, 3, 5, 6]))
    assert runs.tolist() == [[3, 0, 3], [9, 3, 1], [10, 5, 1], [12, 6, 1]]
    assert runs_of(np.array([], int), np.array([], int)).shape == (0, 3)
