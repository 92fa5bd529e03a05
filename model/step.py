"""The step plan: everything a rank needs to run one forward pass, small enough to send at every step.

Made by the scheduler on rank 0, encoded with msgspec, the same on every rank. Integer arrays travel as little-endian
int32 bytes, because a list of a few thousand Python ints costs more to encode than the step's scheduling.
"""

import msgspec


class StepPlan(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One forward pass over B sequences, T new tokens in all, packed without padding.

    Rows are ordered by sequence; a sequence's new tokens are the last ``query_lens[b]`` of its ``context_lens[b]``.
    Generated tokens come before prompts, and no sequence has both: kernels differ for the two, and which of them a token
    gets must not depend on what it is batched with.
    """

    index: int  # counts up by one; a rank that sees a gap stops
    token_ids: bytes  # (T,) int32; a negative one refers to what the last step chose (``references``)
    query_lens: bytes  # (B,) int32
    context_lens: bytes  # (B,) int32, tokens in the cache once this step has written its own
    block_tables: bytes  # (B, max_blocks) int32, row-major, unused entries 0
    num_decode_rows: int  # the first so many rows of T are tokens the model generated, the others are prompt
    logit_rows: bytes  # (R,) int32 rows of T whose logits rank 0 needs; may be empty
    arm: int = 0  # which of the AllReduces that the model was given sum this step
    num_candidates: int = 0  # so many of each row's best logits are wanted of every rank; 0: all
