"""Text to training blocks: token documents packed end to end, cut to equal length, dealt to data-parallel ranks.

Packing wastes no position on padding. Every rank reads the same stream and keeps every ``world_size``-th block, so the
blocks of all ranks together are the blocks of one rank, whatever their number; a position in the stream is one integer,
which is all a checkpoint needs to go on from.
"""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One training sample; ``targets`` are ``inputs`` shifted by one."""

    index: int  # place in the stream; resume with ``first_block=index + 1``
    inputs_S: Tensor  # (S,) int64
    targets_S: Tensor


def pack_blocks(
    documents: Iterable[str],
    encode: Callable[[str], list[int]],
    *,
    block_tokens: int,
    end_token_id: int,
    rank: int = 0,
    world_size: int = 1,
    first_block: int = 0,
    start: int = 0,
) -> Generator[Block, None, int]:
    """Cut the token stream of ``documents`` into blocks and yield this rank's.

    Consecutive blocks share one token: the last target of one is the first input of the next, so that every token but
    the first is predicted once. Tokens that do not fill a last block are dropped.

    Args:
        encode: text to token ids, without special tokens.
        end_token_id: put after each document.
        first_block: blocks before this one are skipped (they are tokenized again, not trained on).
        start: the first block's number, where a stream goes on from another.
    Returns:
        The number after the last block's, of all ranks.
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be 0 to {world_size - 1}, got {rank}")
    pending: list[int] = []
    index = start
    for document in documents:
        pending += [*encode(document), end_token_id]
        used = 0
        while len(pending) - used > block_tokens:
            if index >= first_block and index % world_size == rank:
                tokens = torch.tensor(pending[used : used + block_tokens + 1])
                yield Block(index=index, inputs_S=tokens[:-1], targets_S=tokens[1:])
            used += block_tokens
            index += 1
        del pending[:used]
    return index
