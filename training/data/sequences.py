"""Packs tokenized documents end to end, cuts them into sequences of equal length, and assigns sequences to ranks.

There is no padding. Every rank reads the same stream and keeps every ``world_size``-th sequence, so all ranks together train on
the same sequences for any number of ranks. A position, which a checkpoint stores, is the number of sequences that all ranks
together have used.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tightwire.training.data.documents import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSequence:
    """One training sample; ``targets`` are ``inputs`` shifted by one."""

    index: int  # position in the stream; resume with ``first_block=index + 1``
    inputs_S: Tensor  # (S,) int64
    targets_S: Tensor


def pack_sequences(
    documents: Iterable[str],
    encode: Callable[[str], list[int]],
    *,
    sequence_tokens: int,
    end_token_id: int,
    rank: int = 0,
    world_size: int = 1,
    first_sequence: int = 0,
    start: int = 0,
) -> Generator[TokenSequence, None, int]:
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
    if sequence_tokens < 1:
        raise ValueError(f"sequence_tokens must be at least 1, got {sequence_tokens}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be 0 to {world_size - 1}, got {rank}")
    pending: list[int] = []
    index = start
    for document in documents:
        pending += [*encode(document), end_token_id]
        used = 0
        while len(pending) - used > sequence_tokens:
            if index >= first_sequence and index % world_size == rank:
                tokens = torch.tensor(pending[used : used + sequence_tokens + 1])
                yield TokenSequence(index=index, inputs_S=tokens[:-1], targets_S=tokens[1:])
            used += sequence_tokens
            index += 1
        del pending[:used]
    return index


Encode = Callable[[str], list[int]]


class Batch(NamedTuple):
    """A micro-batch of one rank."""

    inputs_BS: Tensor
    targets_BS: Tensor


def endless_sequences(
    documents_of: Callable[[int], Iterable[str]],
    encode: Encode,
    *,
    sequence_tokens: int,
    end_token_id: int,
    rank: int = 0,
    world_size: int = 1,
    position: int = 0,
) -> Iterator[TokenSequence]:
    """This rank's blocks from ``position`` on; ``documents_of(epoch)`` returns an epoch's documents.

    Each epoch is packed separately and has the same number of blocks in any order. Resuming tokenizes at most one whole
    epoch, to count its sequences, and then the used part of the current epoch.

    Raises:
        DataError: an epoch does not fill one block.
    """
    epoch, index, epoch_sequences = 0, 0, 0
    while True:
        if epoch_sequences and position > index:
            skipped = (position - index) // epoch_sequences
            epoch, index = epoch + skipped, index + skipped * epoch_sequences
        end = yield from pack_sequences(
            documents_of(epoch),
            encode,
            sequence_tokens=sequence_tokens,
            end_token_id=end_token_id,
            rank=rank,
            world_size=world_size,
            first_sequence=position,
            start=index,
        )
        if end == index:
            raise DataError(
                f"the data does not fill one sequence of {sequence_tokens} tokens; add data, or lower data.sequence_tokens"
            )
        epoch, index, epoch_sequences = epoch + 1, end, end - index


def micro_batches(sequences: Iterator[TokenSequence], num_sequences: int) -> Iterator[Batch]:
    """Stack every ``num_sequences`` blocks."""
    while True:
        stacked = [next(sequences) for _ in range(num_sequences)]
        yield Batch(torch.stack([b.inputs_S for b in stacked]), torch.stack([b.targets_S for b in stacked]))
