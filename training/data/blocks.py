"""Packs tokenized documents end to end, cuts them into blocks of equal length, and assigns blocks to data-parallel ranks.

There is no padding. Every rank reads the same stream and keeps every ``world_size``-th block, so all ranks together train on
the same blocks for any number of ranks. A position in the stream is one integer, which a checkpoint stores.
"""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One training sample; ``targets`` are ``inputs`` shifted by one."""

    index: int  # position in the stream; resume with ``first_block=index + 1``
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
        encode: returns the token ids of a text, without special tokens.
        end_token_id: inserted after each document.
        first_block: blocks before this one are tokenized but not yielded.
        start: number of the first block, if this stream continues another one.
    Returns:
        The number after the last block of all ranks.
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
