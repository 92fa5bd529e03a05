"""Packed sequences: every token is predicted once, ranks share the stream, and a stream resumes where it stopped."""

from itertools import islice
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tightwire.training.data.documents import DataError
from tightwire.training.data.sequences import Batch, Packer, endless_sequences, rank_batches

_END = 0


def _encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_every_token_but_the_first_is_a_target_once() -> None:
    sequences = list(Packer(_encode, 4, _END)(["hello", "a longer second one", "c"]))

    stream = [*_encode("hello"), _END, *_encode("a longer second one"), _END, *_encode("c"), _END]
    targets = [token for sequence in sequences for token in sequence[1:]]
    assert targets == stream[1 : 1 + len(targets)]
    assert len(stream) - 1 - len(targets) < 4
    assert [sequence[0] for sequence in sequences[1:]] == [sequence[-1] for sequence in sequences[:-1]]


_TEXTS = ["some text", "more of it", "and the rest of all the text", "b"]
_PACK = Packer(_encode, 5, _END)


def _documents(epoch: int) -> list[str]:
    return _TEXTS[epoch % 4 :] + _TEXTS[: epoch % 4]


def _sequences(count: int, position: int = 0) -> list[tuple[int, Any]]:
    return list(islice(endless_sequences(_documents, _PACK, position), count))


def test_sequences_are_numbered_through_all_epochs() -> None:
    assert [index for index, _ in _sequences(40)] == list(range(40))


@pytest.mark.parametrize("position", [1, 9, 10, 11, 27, 30])
def test_an_endless_stream_resumes_at_any_position(position: int) -> None:
    assert _sequences(10, position) == _sequences(position + 10)[position:]


def test_data_that_does_not_fill_a_sequence_is_refused() -> None:
    stream = endless_sequences(lambda epoch: ["abc"], Packer(_encode, 9, _END))
    with pytest.raises(DataError, match="what is not held out fills no sequence of 9 tokens"):
        next(stream)


def _batches(rank: int, world_size: int, count: int) -> list[Batch]:
    config = SimpleNamespace(batch=SimpleNamespace(micro_sequences=3))
    data: Any = SimpleNamespace(config=config, training=_documents)
    ranks = {"rank": rank, "world_size": world_size}
    return list(islice(rank_batches(data, _PACK, **ranks, position=12, closed=Event()), count))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_an_endless_stream_in_stacks(world_size: int) -> None:
    own = [torch.cat([batch.inputs_BS for batch in _batches(rank, world_size, 2)]) for rank in range(world_size)]
    dealt = torch.stack(own, dim=1).flatten(0, 1).tolist()
    assert dealt == [tokens[:-1] for _, tokens in _sequences(6 * world_size, 12)]


def test_targets_are_the_inputs_shifted_by_one() -> None:
    first, second = _batches(0, 1, 2)
    assert first.inputs_BS.shape == (3, 5)
    assert first.inputs_BS[:, 1:].tolist() == first.targets_BS[:, :-1].tolist()
    assert first.targets_BS[-1, -1] == second.inputs_BS[0, 0]
