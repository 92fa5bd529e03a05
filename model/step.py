"""The step plan: the input of one forward pass, sent to every rank at every step.

All ranks of a replica get the same one. Integer arrays are sent as little-endian int32 bytes, because encoding a few
thousand Python ints takes longer than scheduling the step.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import ArrayLike

_INT_BYTES = 4


class StepPlan(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One forward pass over B sequences with T new tokens in total, packed without padding.

    Rows are ordered by sequence; a sequence's new tokens are the last ``query_lens[b]`` of its ``context_lens[b]``.
    Decode rows come before prefill rows, which have other kernels, and no sequence has both.
    """

    index: int  # increases by one; a rank that sees a gap stops
    token_ids: bytes  # (T,) int32; a negative one is a deferred token (``deferred_token``)
    query_lens: bytes  # (B,) int32
    context_lens: bytes  # (B,) int32, tokens in the cache after this step
    block_tables: bytes  # (B, max_blocks) int32, row-major, unused entries 0
    num_decode_rows: int  # the first rows are generated tokens, the others prompt tokens
    logit_rows: bytes  # (R,) int32 rows of T whose logits rank 0 needs; may be empty
    policy: int = 0  # index of the set of AllReduces for this step
    num_candidates: int = 0  # each rank keeps at least this many of a row's largest logits; 0: all
    # (replicas, 2) int32: each replica's number of logit rows and candidates, the same in every replica's plan. Empty
    # if only the first replica has rows.
    gather_sizes: bytes = b""

    @property
    def num_rows(self) -> int:
        """T."""
        return len(self.token_ids) // _INT_BYTES

    @property
    def num_logit_rows(self) -> int:
        """R."""
        return len(self.logit_rows) // _INT_BYTES

    @property
    def is_decode(self) -> bool:
        """True when no row belongs to a prompt."""
        return self.num_decode_rows == self.num_rows

    @property
    def phase(self) -> str:
        """The ledger's phase. A step with any prompt row sends large messages, so it counts as prefill."""
        return "decode" if self.is_decode else "prefill"


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
    num_candidates: int = 0,
) -> StepPlan:
    """Make a plan from arrays; ``ints`` unpacks the plan's bytes."""
    tokens, queries, contexts, tables = map(_packed, (token_ids, query_lens, context_lens, block_tables))
    rows = _packed(logit_rows)
    return StepPlan(index, tokens, queries, contexts, tables, num_decode_rows, rows, policy, num_candidates)


def idle_plan(index: int) -> StepPlan:
    """Return the plan of a replica that has nothing to compute in a step."""
    return StepPlan(index, b"", b"", b"", b"", 0, b"")


def gather_sizes(plans: Sequence[StepPlan]) -> bytes:
    """Return ``StepPlan.gather_sizes`` for the replicas' plans of one step."""
    sizes = [(plan.num_logit_rows, plan.num_candidates) for plan in plans]
    if not any(num_rows for num_rows, _ in sizes[1:]):
        return b""
    return _packed(sizes)


def deferred_token(index: int) -> int:
    """Return the placeholder for the ``index``-th token of the last step; ranks replace it on the device."""
    return -1 - index


def ints(data: bytes) -> np.ndarray:
    """Unpack a plan's integers as a one-dimensional view of ``data``."""
    return np.frombuffer(data, "<i4")


def _packed(values: ArrayLike) -> bytes:
    return np.asarray(values, "<i4").tobytes()
