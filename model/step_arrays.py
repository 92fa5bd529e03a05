"""One step as arrays: on the host, where it can be cut in parts, and on the device; deferred tokens."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from tightwire.model.step import StepPlan, ints

_CUT_FROM_ROWS = 64  # the messages of fewer rows are all latency
_CUT_MULTIPLE = 16  # rows: whole groups of every codec when rows are multiples of eight numbers


@dataclass(frozen=True, slots=True)
class StepArrays:
    """B sequences, T tokens in all, the first ``num_decode_rows`` of them decode rows; all int32."""

    token_ids_T: np.ndarray
    positions_T: np.ndarray
    slots_T: np.ndarray
    query_start_B1: np.ndarray
    context_lens_B: np.ndarray
    block_tables_BM: np.ndarray
    num_decode_rows: int

    @classmethod
    def from_plan(cls, plan: StepPlan, block_size: int) -> Self:
        query_lens_B, context_lens_B = ints(plan.query_lens), ints(plan.context_lens)
        block_tables_BM = ints(plan.block_tables).reshape(len(query_lens_B), -1)
        query_start_B1 = np.zeros(len(query_lens_B) + 1, dtype=np.int32)
        np.cumsum(query_lens_B, out=query_start_B1[1:])
        sequence_T = np.repeat(np.arange(len(query_lens_B)), query_lens_B)
        first_position_B = context_lens_B - query_lens_B
        positions_T = (
            np.arange(query_start_B1[-1], dtype=np.int32) + (first_position_B - query_start_B1[:-1])[sequence_T]
        )
        block, offset = positions_T // block_size, positions_T % block_size
        slots_T = block_tables_BM[sequence_T, block] * block_size + offset
        return cls(
            token_ids_T=ints(plan.token_ids),
            positions_T=positions_T,
            slots_T=slots_T,
            query_start_B1=query_start_B1,
            context_lens_B=context_lens_B,
            block_tables_BM=block_tables_BM,
            num_decode_rows=plan.num_decode_rows,
        )

    @property
    def has_one_token_each(self) -> bool:
        return len(self.token_ids_T) == len(self.context_lens_B)


def cut_row(num_rows: int, num_decode_rows: int = 0) -> int:
    """The row at which a step is cut so that one half is summed while the other is computed; 0: cutting does not pay."""
    if num_rows < _CUT_FROM_ROWS or num_decode_rows == num_rows:
        return 0
    return num_rows // 2 // _CUT_MULTIPLE * _CUT_MULTIPLE


def cut(step: StepArrays, row: int) -> tuple[StepArrays, StepArrays]:
    """The rows before ``row`` and the rest, neither empty. A sequence with rows in both continues in the second part.

    That part needs the keys and values of the first: in each layer the first part runs first.
    """
    starts = step.query_start_B1
    last = int(np.searchsorted(starts, row, side="left"))  # sequences that begin before ``row``
    first = last - 1 if starts[last] > row else last  # the one that continues, or the next
    context_lens_B = step.context_lens_B[:last].copy()
    context_lens_B[-1] -= starts[last] - row if starts[last] > row else 0
    return (
        StepArrays(
            token_ids_T=step.token_ids_T[:row],
            positions_T=step.positions_T[:row],
            slots_T=step.slots_T[:row],
            query_start_B1=np.minimum(starts[: last + 1], row),
            context_lens_B=context_lens_B,
            block_tables_BM=step.block_tables_BM[:last],
            num_decode_rows=min(step.num_decode_rows, row),
        ),
        StepArrays(
            token_ids_T=step.token_ids_T[row:],
            positions_T=step.positions_T[row:],
            slots_T=step.slots_T[row:],
            query_start_B1=np.maximum(starts[first:], row) - row,
            context_lens_B=step.context_lens_B[first:],
            block_tables_BM=step.block_tables_BM[first:],
            num_decode_rows=max(0, step.num_decode_rows - row),
        ),
    )


def cut_up(step: StepArrays, most_rows: int) -> list[StepArrays]:
    """Parts of at most ``most_rows`` rows, in order; see ``cut``. Decode rows always stay together."""
    parts: list[StepArrays] = []
    while len(step.token_ids_T) > (row := max(most_rows, step.num_decode_rows)):
        part, step = cut(step, row)
        parts.append(part)
    return [*parts, step]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One step on the device: B sequences packed into T rows, index tensors int32."""

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor  # of each row's key and value: block * P + offset
    query_start_B1: Tensor  # the first row of each sequence, then T
    context_lens_B: Tensor
    block_tables_BM: Tensor
    num_decode_rows: int  # these come first; the others are prompt rows
    policy: int = 0  # the number of the set of AllReduces

    @property
    def is_decode(self) -> bool:
        """True when no row belongs to a prompt."""
        return self.num_decode_rows == len(self.token_ids_T)


def num_deferred(token_ids_T: np.ndarray) -> int:
    """How many of the last step's tokens, from the first on, contain all that are deferred; 0: none is."""
    return max(0, -int(token_ids_T.min()))


def resolve_deferred(token_ids_T: Tensor, chosen_R: Tensor) -> Tensor:
    """``token_ids_T`` with the tokens that the last step chose in place of deferred ones (``step.deferred_token``).

    A row for which no token could be chosen (``chosen_R`` is negative) gets token 0; nobody reads its result.
    """
    index_T = (-1 - token_ids_T).clamp_(min=0)
    return torch.where(token_ids_T < 0, chosen_R.clamp(min=0)[index_T], token_ids_T)
