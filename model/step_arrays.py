"""One step as arrays: on the host, where it can be cut in parts, and on the device; deferred tokens."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_CUT_FROM_ROWS = 64  # the messages of fewer are all latency
_CUT_AT = 16  # rows or a multiple: whole groups of every codec, in rows of whole eights


@dataclass(frozen=True, slots=True)
class StepArrays:
    """B sequences, T tokens in all, the first ``num_decode_rows`` of them generated; all int32."""

    token_ids_T: np.ndarray
    positions_T: np.ndarray
    slots_T: np.ndarray
    query_start_B1: np.ndarray
    context_lens_B: np.ndarray
    block_tables_BM: np.ndarray
    num_decode_rows: int

    @property
    def has_a_token_each(self) -> bool:
        return len(self.token_ids_T) == len(self.context_lens_B)


def cut_row(num_rows: int, num_decode_rows: int = 0) -> int:
    """Where a step is cut whose halves are to take turns, on the wire and in the cores; 0: it is not worth it."""
    if num_rows < _CUT_FROM_ROWS or num_decode_rows == num_rows:
        return 0
    return num_rows // 2 // _CUT_AT * _CUT_AT


def cut(step: StepArrays, row: int) -> tuple[StepArrays, StepArrays]:
    """The rows before ``row`` and the others, neither empty; a sequence that has both goes on in the second part.

    There it needs the keys and values of the first: layer by layer the first part goes ahead.
    """
    starts = step.query_start_B1
    last = int(np.searchsorted(starts, row, side="left"))  # sequences that begin before ``row``
    first = last - 1 if starts[last] > row else last  # the one that goes on, or the next
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
    """Parts of at most so many rows, in order; see ``cut``. Generated rows stay together, however many there are."""
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
    slots_T: Tensor  # where each row's key and value go: block * P + offset
    query_start_B1: Tensor  # first row of each sequence, and T at the end
    context_lens_B: Tensor
    block_tables_BM: Tensor
    num_decode_rows: int  # these come first; the others are prompt rows
    arm: int = 0  # which of the model's sets of AllReduces

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
