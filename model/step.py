"""The step plan: the input of one forward pass, sent to every rank at every step.

All ranks of a replica get the same one. Arrays are int32 bytes: encoding Python ints takes longer than scheduling.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from tightwire.model.layer_groups import LayerGroups
from tightwire.model.sampling.rows import NO_ROWS, SampleRows

if TYPE_CHECKING:  # a rank says that it is there before it imports torch
    from torch import Tensor


class StepPlan(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One forward pass over B sequences with T new tokens in total, packed without padding.

    Rows are ordered by sequence; a sequence's new tokens are the last ``query_lens[b]`` of its ``context_lens[b]``.
    Decode rows come before prefill rows, which have other kernels, and no sequence has both.
    """

    index: int  # increases by one; a rank that sees a gap stops
    token_ids: bytes  # (T,) int32; a negative one is a deferred token (``deferred_token``)
    query_lens: bytes  # (B,) int32
    context_lens: bytes  # (B,) int32, tokens in the cache after this step
    # (B, max_blocks) int32, row-major, unused entries 0; with windows the entries of ``LayerGroups.held``, group after group
    block_tables: bytes
    num_decode_rows: int  # the first rows are generated tokens, the others prompt tokens
    logit_rows: bytes  # (R,) int32 rows of T whose logits choose or score a token; may be empty
    policy: int = 0  # index of the set of AllReduces for this step
    adapters: bytes = b""  # (B,) int32, the entry of each sequence's adapter or -1; empty if no sequence has one
    # Prompt rows pass the stages, one each step, and the rows of ``logit_rows`` after the decode rows are those of the
    # chunk that leaves the last stage in this step. False: all ranks compute all rows together.
    staged: bool = False
    awaits: int = 0  # decode rows read keys and values of chunks that entered in this step, or before
    rewritten: bytes = b""  # (X,) int32, blocks given to other sequences, in which chunks on their way write no more
    sampling: SampleRows = NO_ROWS  # how the R tokens are chosen
    # (replicas,) int32: each replica's number of results, the same in all plans; empty if only the first one has rows
    gather_sizes: bytes = b""

    @property
    def num_rows(self) -> int:
        """T."""
        return len(ints(self.token_ids))

    @property
    def phase(self) -> str:
        return phase_of(self.num_decode_rows, self.num_rows)


IDLE_PLAN = StepPlan(0, b"", b"", b"", b"", 0, b"")  # of a replica that has nothing to compute in a step


def phase_of(num_decode_rows: int, num_rows: int) -> str:
    """Return the ledger's phase of a step. One with any prompt row sends large messages, so it counts as prefill."""
    return "decode" if num_decode_rows == num_rows else "prefill"


def make_plan(
    *,
    token_ids: ArrayLike,
    query_lens: ArrayLike,
    context_lens: ArrayLike,
    block_tables: ArrayLike,
    num_decode_rows: int,
    logit_rows: ArrayLike,
    index: int = 0,
    policy: int = 0,
    adapters: ArrayLike | None = None,
    staged: bool = False,
    awaits: int = 0,
    rewritten: ArrayLike = (),
    sampling: SampleRows = NO_ROWS,
) -> StepPlan:
    """Make a plan from arrays; ``ints`` unpacks the plan's bytes."""
    tokens, queries, contexts, tables = map(_packed, (token_ids, query_lens, context_lens, block_tables))
    rows, entries = _packed(logit_rows), b"" if adapters is None else _packed(adapters)
    given = index, tokens, queries, contexts, tables, num_decode_rows, rows, policy, entries
    return StepPlan(*given, staged, awaits, _packed(rewritten), sampling)


def gather_sizes(plans: Sequence[StepPlan]) -> bytes:
    """Return ``StepPlan.gather_sizes`` for the replicas' plans of one step."""
    return _packed([plan.sampling.num_results for plan in plans]) if any(plan.logit_rows for plan in plans[1:]) else b""


def deferred_token(index: int) -> int:
    """Return the placeholder for the ``index``-th token of the last step; ranks replace it on the device."""
    return -1 - index


def ints(data: bytes) -> np.ndarray:
    """Unpack a plan's integers as a one-dimensional view of ``data``."""
    return np.frombuffer(data, "<i4")


def _packed(values: ArrayLike) -> bytes:
    return np.asarray(values, "<i4").tobytes()


_CUT_FROM_ROWS = 64  # with fewer rows, latency dominates the time of a sum
_CUT_MULTIPLE = 16  # a part of 16 rows has whole groups of every codec if a row is a multiple of eight numbers


@dataclass(frozen=True, slots=True)
class StepArrays:
    """One step on the host: B sequences with T tokens, decode rows first; arrays are int32."""

    token_ids_T: np.ndarray
    positions_T: np.ndarray
    slots_LT: np.ndarray
    query_start_B1: np.ndarray
    context_lens_B: np.ndarray
    block_tables_LBM: np.ndarray
    num_decode_rows: int
    adapters_T: np.ndarray | None = None  # the entry of each row's adapter or -1; None: no row has one

    @classmethod
    def from_plan(cls, plan: StepPlan, block_size: int, groups: LayerGroups) -> Self:
        query_lens_B, context_lens_B = ints(plan.query_lens), ints(plan.context_lens)
        query_start_B1 = np.zeros(len(query_lens_B) + 1, dtype=np.int32)
        np.cumsum(query_lens_B, out=query_start_B1[1:])
        sequence_T = np.repeat(np.arange(len(query_lens_B)), query_lens_B)
        first_position_B = context_lens_B - query_lens_B
        begin_T = (first_position_B - query_start_B1[:-1])[sequence_T]
        positions_T = np.arange(query_start_B1[-1], dtype=np.int32) + begin_T
        tables_LBM = ints(plan.block_tables)
        if groups.num_sliding:
            held_LBM = groups.held(first_position_B, context_lens_B, block_size)
            tables_LBM, entries = np.zeros(held_LBM.shape, np.int32), tables_LBM
            tables_LBM[held_LBM] = entries
        tables_LBM = tables_LBM.reshape(groups.num, len(query_lens_B), -1)
        block, offset = positions_T // block_size, positions_T % block_size
        slots_LT = np.ascontiguousarray(tables_LBM[:, sequence_T, block]) * block_size + offset
        lens = query_start_B1, context_lens_B, tables_LBM
        adapters_T = ints(plan.adapters)[sequence_T] if plan.adapters else None
        return cls(ints(plan.token_ids), positions_T, slots_LT, *lens, plan.num_decode_rows, adapters_T)


def cut_row(num_rows: int, num_decode_rows: int = 0) -> int:
    """Return the row at which to cut a step, to sum one half while the other is computed; 0: cutting does not pay."""
    if num_rows < _CUT_FROM_ROWS or num_decode_rows == num_rows:
        return 0
    return num_rows // 2 // _CUT_MULTIPLE * _CUT_MULTIPLE


def cut(step: StepArrays, row: int) -> tuple[StepArrays, StepArrays]:
    """Split a step before ``row``. In each layer the first part runs first: the second reads its keys and values."""
    starts = step.query_start_B1
    last = int(np.searchsorted(starts, row, side="left"))  # sequences that begin before ``row``
    num_rows_after = max(0, starts[last] - row)  # of the sequence that is cut; 0: none is
    first = last - 1 if num_rows_after else last  # the sequence that is cut, or the next one
    context_lens_B = step.context_lens_B[:last].copy()
    context_lens_B[-1] -= num_rows_after
    tables, num_decode = step.block_tables_LBM, step.num_decode_rows
    before = (np.minimum(starts[: last + 1], row), context_lens_B, tables[:, :last], min(num_decode, row))
    starts_after = np.maximum(starts[first:], row) - row
    after = (starts_after, step.context_lens_B[first:], tables[:, first:], max(0, num_decode - row))
    ids_T, positions_T, slots_LT, adapters_T = step.token_ids_T, step.positions_T, step.slots_LT, step.adapters_T
    adapters_before, adapters_after = (None, None) if adapters_T is None else (adapters_T[:row], adapters_T[row:])
    return (
        StepArrays(ids_T[:row], positions_T[:row], slots_LT[:, :row], *before, adapters_before),
        StepArrays(ids_T[row:], positions_T[row:], slots_LT[:, row:], *after, adapters_after),
    )


def cut_up(step: StepArrays, most_rows: int) -> list[StepArrays]:
    """Split a step into parts of at most ``most_rows`` rows, in order; see ``cut``. Decode rows stay in one part."""
    parts: list[StepArrays] = []
    while len(step.token_ids_T) > (row := max(most_rows, step.num_decode_rows)):
        part, step = cut(step, row)
        parts.append(part)
    return [*parts, step]


def split(step: StepArrays, *, most_rows: int | None, halve: bool) -> Sequence[StepArrays]:
    """Return the step, or its parts: of at most ``most_rows`` rows, or else two halves if asked for, see ``cut_row``."""
    parts = [step] if most_rows is None else cut_up(step, most_rows)
    if halve and len(parts) == 1 and (row := cut_row(len(step.token_ids_T), step.num_decode_rows)):
        return cut(step, row)
    return parts


def split_prompts(step: StepArrays) -> tuple[StepArrays | None, StepArrays | None]:
    """Return the decode rows and the prompt rows of a step; None for either that it has not."""
    num_decode = step.num_decode_rows
    if num_decode in (0, len(step.token_ids_T)):
        return (step, None) if num_decode else (None, step)
    return cut(step, num_decode)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One step on the device: B sequences packed into T rows; tensors are int32."""

    token_ids_T: "Tensor"
    positions_T: "Tensor"
    slots_LT: "Tensor"  # cache slot of each row's key and value: block * P + offset
    query_start_B1: "Tensor"  # the first row of each sequence, then T
    context_lens_B: "Tensor"
    block_tables_LBM: "Tensor"
    num_decode_rows: int  # decode rows come first; the others are prompt rows
    policy: int = 0  # index of the set of AllReduces
    adapters_T: "Tensor | None" = None  # the entry of each row's adapter or -1; None: no row has one
    # The rows that are needed after the last layer, and how many of them are decode rows; None: all.
    needed: "tuple[Tensor, int] | None" = None
    hidden_TD: "Tensor | None" = None  # float32, of the stage before, or embedded; None: tokens are embedded
    fuses: bool = False  # on CUDA, one row: kernels of products compute norms, rotations and SwiGLU too, if they can

    @property
    def phase(self) -> str:
        return phase_of(self.num_decode_rows, len(self.token_ids_T))


def num_deferred(token_ids_T: np.ndarray) -> int:
    """Return the smallest n such that the first n tokens of the last step include all deferred ones; 0: none."""
    return max(0, -int(token_ids_T.min()))


def resolve_deferred(token_ids_T: "Tensor", chosen_R: "Tensor") -> "Tensor":
    """Replace deferred tokens by the tokens that the last step chose; a negative one (no choice) becomes token 0."""
    index_T = (-1 - token_ids_T).clamp_(min=0)
    return token_ids_T.where(token_ids_T >= 0, chosen_R.clamp(min=0)[index_T])
