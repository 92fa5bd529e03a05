import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tightwire.model.step import StepArrays, cut, cut_up, deferred_token, num_deferred, resolve_deferred


def make_step(query_lens: list[int], before: list[int], num_decode_rows: int = 0) -> StepArrays:
    """Sequences with so many tokens in the cache already; every row and block is told apart by its number."""
    num_rows, num_seqs = sum(query_lens), len(query_lens)
    numbers = np.arange(num_rows, dtype=np.int32)
    return StepArrays(
        token_ids_T=numbers,
        positions_T=numbers + 100,
        slots_LT=numbers[None] + 200,
        query_start_B1=np.cumsum([0, *query_lens], dtype=np.int32),
        context_lens_B=np.array(before, np.int32) + np.array(query_lens, np.int32),
        block_tables_LBM=np.arange(2 * num_seqs, dtype=np.int32).reshape(1, num_seqs, 2),
        num_decode_rows=num_decode_rows,
    )


def test_a_sequence_across_the_cut_continues_in_the_second_part() -> None:
    first, second = cut(make_step([1, 5, 2], [7, 3, 0], num_decode_rows=1), 4)
    assert first.query_start_B1.tolist() == [0, 1, 4] and first.context_lens_B.tolist() == [8, 6]
    assert second.query_start_B1.tolist() == [0, 2, 4] and second.context_lens_B.tolist() == [8, 2]
    assert first.block_tables_LBM.tolist() == [[[0, 1], [2, 3]]]
    assert second.block_tables_LBM.tolist() == [[[2, 3], [4, 5]]]
    assert (first.num_decode_rows, second.num_decode_rows) == (1, 0)


def test_a_cut_between_sequences_separates_them() -> None:
    step = make_step([3, 2], [0, 4])
    first, second = cut(step, 3)
    assert first.query_start_B1.tolist() == [0, 3] and first.context_lens_B.tolist() == [3]
    assert second.query_start_B1.tolist() == [0, 2] and second.context_lens_B.tolist() == [6]
    assert step.context_lens_B.tolist() == [3, 6], "the step itself stays as it was"


@pytest.mark.parametrize(("row", "parts"), [(1, (1, 2)), (3, (3, 0))])
def test_decode_rows_stay_first(row: int, parts: tuple[int, int]) -> None:
    first, second = cut(make_step([1, 1, 1, 4], [5, 6, 7, 0], num_decode_rows=3), row)
    assert (first.num_decode_rows, second.num_decode_rows) == parts


@given(
    sequences=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6), where=st.floats(0, 1)
)
def test_every_row_keeps_its_position_and_context(sequences: list[tuple[int, int]], where: float) -> None:
    step = make_step([new for new, _ in sequences], [before for _, before in sequences])
    num_rows = len(step.token_ids_T)
    if num_rows < 2:
        return
    row = 1 + int(where * (num_rows - 2))
    parts = cut(step, row)
    for name in ("token_ids_T", "positions_T", "slots_LT"):
        assert np.concatenate([getattr(part, name) for part in parts], axis=-1).tolist() == getattr(step, name).tolist()
    assert [seen for part in parts for seen in _seen(part)] == _seen(step)


def _seen(step: StepArrays) -> list[tuple[int, list[int]]]:
    """For each row how many tokens it sees, itself included, and its sequence's blocks."""
    assert step.query_start_B1[-1] == len(step.token_ids_T) and (np.diff(step.query_start_B1) > 0).all()
    seen = []
    for seq, (start, end) in enumerate(zip(step.query_start_B1, step.query_start_B1[1:], strict=False)):
        blocks = step.block_tables_LBM[0, seq].tolist()
        seen += [(int(step.context_lens_B[seq]) - (int(end) - 1 - row), blocks) for row in range(start, end)]
    return seen


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 50), st.integers(0, 3))
def test_cut_up_parts_are_small_and_join_to_the_step(query_lens: list[int], most_rows: int, num_decoding: int) -> None:
    query_lens = [1] * num_decoding + query_lens
    step = make_step(query_lens, [2] * len(query_lens), num_decode_rows=num_decoding)
    parts = cut_up(step, most_rows)
    assert np.concatenate([part.token_ids_T for part in parts]).tolist() == step.token_ids_T.tolist()
    assert np.concatenate([part.slots_LT for part in parts], axis=1).tolist() == step.slots_LT.tolist()
    assert sum(part.num_decode_rows for part in parts) == parts[0].num_decode_rows == num_decoding
    assert all(len(part.token_ids_T) <= max(most_rows, num_decoding) for part in parts)
    assert parts[-1].context_lens_B[-1] == step.context_lens_B[-1]


def test_deferred_tokens_are_replaced_and_others_are_not() -> None:
    token_ids = np.array([deferred_token(1), 7, 0, deferred_token(0), deferred_token(1)], np.int32)
    resolved = resolve_deferred(torch.from_numpy(token_ids), torch.tensor([40, 50, 60], dtype=torch.int32))
    assert resolved.tolist() == [50, 7, 0, 40, 50] and resolved.dtype == torch.int32


@pytest.mark.parametrize(
    ("token_ids", "num"), [([5, 0], 0), ([deferred_token(0)], 1), ([3, deferred_token(4), deferred_token(2)], 5)]
)
def test_all_tokens_up_to_the_last_deferred_one_are_sent(token_ids: list[int], num: int) -> None:
    assert num_deferred(np.array(token_ids, np.int32)) == num


def test_a_row_without_a_chosen_token_gets_token_0() -> None:
    token_ids = torch.tensor([deferred_token(0), deferred_token(1)], dtype=torch.int32)
    assert resolve_deferred(token_ids, torch.tensor([-1, -2], dtype=torch.int32)).tolist() == [0, 0]
