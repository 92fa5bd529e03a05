"""Packs tokenized documents end to end, cuts them into sequences of equal length, and assigns sequences to ranks.

There is no padding. Every rank reads the same stream and keeps every W-th sequence. A position, which a checkpoint stores, is
the number of sequences that all ranks together have used.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from threading import Event
from typing import NamedTuple

import torch
from torch import Tensor

from tightwire.model.text.tokenizer import Tokenizer
from tightwire.training.data.documents import DataError, RunData
from tightwire.training.data.read_ahead import until_closed

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSequence:
    """One training sample; ``targets`` are ``inputs`` shifted by one."""

    index: int  # position in the stream; resume with ``first_sequence=index + 1``
    inputs_S: Tensor  # (S,) int64
    targets_S: Tensor


def pack_sequences(
    documents: Iterable[str],
    encode: Encode,
    *,
    sequence_tokens: int,
    end_token_id: int,
    rank: int = 0,
    world_size: int = 1,
    first_sequence: int = 0,
    start: int = 0,
) -> Generator[TokenSequence, None, int]:
    """Cut the token stream of ``documents`` into sequences and yield this rank's. Returns the number after the last of all ranks.

    Consecutive sequences share one token, so that every token but the first is predicted once. Tokens that do not fill a last
    sequence are dropped.

    Args:
        encode: returns the token ids of a text, without special tokens.
        end_token_id: inserted after each document.
        first_sequence: sequences before this one are tokenized but not yielded.
        start: number of the first sequence, if this stream continues another one.
    """
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
    """This rank's sequences from ``position`` on; ``documents_of(epoch)`` returns an epoch's documents.

    Each epoch is packed separately and has the same number of sequences in any order. Resuming tokenizes at most one whole
    epoch, to count its sequences, and then the used part of the current one. Raises DataError: an epoch fills no sequence.
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
    """Stack every ``num_sequences`` sequences."""
    while True:
        stacked = [next(sequences) for _ in range(num_sequences)]
        yield Batch(torch.stack([b.inputs_S for b in stacked]), torch.stack([b.targets_S for b in stacked]))


def rank_batches(
    data: RunData, tokenizer: Tokenizer, end_token_id: int, *, rank: int, world_size: int, position: int, closed: Event
) -> Iterator[Batch]:
    """A rank's endless micro-batches of a run from ``position`` on. ``closed`` stops reading."""
    sequences = endless_sequences(
        lambda epoch: until_closed(data.training(epoch), closed),
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        sequence_tokens=data.config.data.sequence_tokens,
        end_token_id=end_token_id,
        rank=rank,
        world_size=world_size,
        position=position,
    )
    return micro_batches(sequences, data.config.batch.micro_sequences)


def held_out_sequences(data: RunData, tokenizer: Tokenizer, end_token_id: int) -> list[TokenSequence]:
    """The evaluation sequences of all ranks. Raises DataError: the held-out documents do not fill one sequence."""
    config = data.config
    packed = pack_sequences(
        data.held_out(),
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        sequence_tokens=config.data.sequence_tokens,
        end_token_id=end_token_id,
    )
    sequences = list(islice(packed, config.evaluation.sequences))
    if not sequences:
        raise DataError(
            f"held-out documents do not fill one sequence of {config.data.sequence_tokens} tokens; raise data.held_out (now "
            f"{config.data.held_out}), name data.held_out_files, or set evaluation.every=0"
        )
    return sequences
