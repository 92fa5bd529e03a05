"""Yields a rank's endless stream of training blocks, epoch after epoch, as micro-batches.

A position is the number of blocks that all ranks together have used, so it does not depend on the number of ranks.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tightwire.training.data.blocks import Block, pack_blocks
from tightwire.training.data.documents import DataError

Encode = Callable[[str], list[int]]


class Batch(NamedTuple):
    """A micro-batch of one rank."""

    inputs_BS: Tensor
    targets_BS: Tensor


def endless_blocks(
    documents_of: Callable[[int], Iterable[str]],
    encode: Encode,
    *,
    block_tokens: int,
    end_token_id: int,
    rank: int = 0,
    world_size: int = 1,
    position: int = 0,
) -> Iterator[Block]:
    """This rank's blocks from ``position`` on; ``documents_of(epoch)`` returns an epoch's documents.

    Each epoch is packed separately and has the same number of blocks in any order. Resuming tokenizes at most one whole
    epoch, to count its blocks, and then the used part of the current epoch.

    Raises:
        DataError: an epoch does not fill one block.
    """
    epoch, index, epoch_blocks = 0, 0, 0
    while True:
        if epoch_blocks and position > index:
            skipped = (position - index) // epoch_blocks
            epoch, index = epoch + skipped, index + skipped * epoch_blocks
        end = yield from pack_blocks(
            documents_of(epoch),
            encode,
            block_tokens=block_tokens,
            end_token_id=end_token_id,
            rank=rank,
            world_size=world_size,
            first_block=position,
            start=index,
        )
        if end == index:
            raise DataError(
                f"the data does not fill one sequence of {block_tokens} tokens; add data, or lower data.sequence_tokens"
            )
        epoch, index, epoch_blocks = epoch + 1, end, end - index


def micro_batches(blocks: Iterator[Block], num_sequences: int) -> Iterator[Batch]:
    """Stack every ``num_sequences`` blocks."""
    while True:
        stacked = [next(blocks) for _ in range(num_sequences)]
        yield Batch(torch.stack([b.inputs_S for b in stacked]), torch.stack([b.targets_S for b in stacked]))
