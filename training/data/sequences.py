"""Packs tokenized documents end to end, cuts them into sequences of equal length, and assigns sequences to ranks.

Only rows of chats are padded. Every rank reads the same stream and keeps every W-th sequence. A position, which a checkpoint
stores, is the number of sequences that all ranks together have used.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from threading import Event
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tightwire.threads import until_closed
from tightwire.training.data.chats import ChatPacker, PairPacker, Prompt, PromptPacker, Row
from tightwire.training.data.documents import DataError, RunData

TokenSequence = list[int]  # S inputs and one more token: the targets are the inputs shifted by one


class Batch(NamedTuple):
    """Sequences as tensors, int64. ``positions_BS`` None: each sequence is one sample."""

    inputs_BS: Tensor
    targets_BS: Tensor
    positions_BS: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(None if tensor is None else tensor.to(device, non_blocking=True) for tensor in self))  # pyright: ignore[reportArgumentType]

    def split(self, size: int) -> list["Batch"]:
        parts = [[None] * len(self.inputs_BS) if tensor is None else tensor.split(size) for tensor in self]
        return [Batch(*part) for part in zip(*parts, strict=False)]  # pyright: ignore[reportArgumentType]


def stack(sequences: Iterable[TokenSequence | Row]) -> Batch:
    sequences = list(sequences)
    if isinstance(sequences[0], Row):
        return Batch(*(torch.tensor(values) for values in zip(*sequences, strict=True)))
    tokens_BT = torch.tensor(sequences)
    return Batch(tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous())


@dataclass(frozen=True, slots=True)
class Packer:
    """Cuts the token stream of documents, each followed by the end token, into sequences.

    Consecutive sequences share one token, so that every token but the first is predicted once. Tokens that do not fill a last
    sequence are dropped. ``encode`` returns the token ids of a text, without special tokens.
    """

    encode: Callable[[str], list[int]]
    sequence_tokens: int
    end_token_id: int
    same_length = True  # every epoch has the same number of sequences, in any order

    def __call__(self, documents: Iterable[str]) -> Iterator[TokenSequence]:
        pending: list[int] = []
        for document in documents:
            pending += [*self.encode(document), self.end_token_id]
            used = 0
            while len(pending) - used > self.sequence_tokens:
                yield pending[used : used + self.sequence_tokens + 1]
                used += self.sequence_tokens
            del pending[:used]


AnyPacker = Packer | ChatPacker | PairPacker | PromptPacker


def endless_sequences(
    documents_of: Callable[[int], Iterable[str]], pack: AnyPacker, position: int = 0
) -> Iterator[tuple[int, TokenSequence | Row | Prompt]]:
    """The sequences from ``position`` on, numbered; ``documents_of(epoch)`` returns an epoch's documents.

    Each epoch is packed separately. Resuming tokenizes at most one whole epoch, to count its sequences, and then the used part
    of the current one; all used epochs if their lengths differ. Raises DataError: an epoch fills no sequence.
    """
    epoch, index, epoch_sequences = 0, 0, 0
    while True:
        if epoch_sequences and position > index and pack.same_length:
            skipped = (position - index) // epoch_sequences
            epoch, index = epoch + skipped, index + skipped * epoch_sequences
        begin = index
        for sequence in pack(documents_of(epoch)):
            if index >= position:
                yield index, sequence
            index += 1
        if index == begin:
            raise DataError(
                f"what is not held out fills no sequence of {pack.sequence_tokens} tokens; add data, or lower data.sequence_tokens"
            )
        epoch, epoch_sequences = epoch + 1, index - begin


def rank_batches(
    data: RunData, pack: AnyPacker, *, rank: int, world_size: int, position: int, closed: Event
) -> Iterator[Any]:
    """A rank's endless micro-batches of a run from ``position`` on: ``Batch``, or lists of prompts. ``closed`` stops reading."""
    numbered = endless_sequences(lambda epoch: until_closed(data.training(epoch), closed), pack, position)
    own = (sequence for index, sequence in numbered if index % world_size == rank)
    while True:
        own_batch = islice(own, data.config.batch.micro_sequences)
        yield list(own_batch) if isinstance(pack, PromptPacker) else stack(own_batch)  # pyright: ignore[reportArgumentType]


def held_out_sequences(data: RunData, pack: AnyPacker) -> list[TokenSequence | Row]:
    """The evaluation sequences of all ranks. Raises DataError: the held-out documents do not fill one sequence."""
    config = data.config
    sequences: list[Any] = list(islice(pack(data.held_out()), config.evaluation.sequences))
    if not sequences:
        raise DataError(
            f"held-out documents do not fill one sequence of {config.data.sequence_tokens} tokens; raise data.held_out (now "
            f"{config.data.held_out}), name data.held_out_files, or set evaluation.every=0"
        )
    return sequences
