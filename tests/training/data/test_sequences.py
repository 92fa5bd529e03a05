"""Packed sequences: every token is predicted once, ranks share the stream, and a stream resumes where it stopped."""

from itertools import islice

import pytest

from tightwire.training.data.documents import DataError
from tightwire.training.data.sequences import TokenSequence, endless_sequences, micro_batches, pack_sequences

_END = 0


def _encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def _pack(documents: list[str], **kwargs: int) -> list[TokenSequence]:
    return list(pack_sequences(documents, _encode, end_token_id=_END, **kwargs))


def test_every_token_but_the_first_is_a_target_once() -> None:
    sequences = _pack(["hello", "a longer second one", "c"], sequence_tokens=4)

    stream = [*_encode("hello"), _END, *_encode("a longer second one"), _END, *_encode("c"), _END]
    targets = [token for sequence in sequences for token in sequence.targets_S.tolist()]
    assert targets == stream[1 : 1 + len(targets)]
    assert len(stream) - 1 - len(targets) < 4
    assert all(sequence.inputs_S.tolist()[1:] == sequence.targets_S.tolist()[:-1] for sequence in sequences)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_sequences_of_one_rank(world_size: int) -> None:
    documents = ["some text", "more of it", "and the rest of all the text"]

    dealt = [
        b for rank in range(world_size) for b in _pack(documents, sequence_tokens=5, rank=rank, world_size=world_size)
    ]

    alone = _pack(documents, sequence_tokens=5)
    assert [b.inputs_S.tolist() for b in sorted(dealt, key=lambda b: b.index)] == [b.inputs_S.tolist() for b in alone]


def test_a_stream_resumes_after_a_sequence() -> None:
    documents = ["some text", "more of it", "and the rest of all the text"]

    resumed = _pack(documents, sequence_tokens=5, first_sequence=3)

    assert [b.inputs_S.tolist() for b in resumed] == [
        b.inputs_S.tolist() for b in _pack(documents, sequence_tokens=5)[3:]
    ]


_TEXTS = ["some text", "more of it", "and the rest of all the text", "b"]


def _sequences(count: int, **kwargs: int) -> list[tuple[int, list[int]]]:
    def documents(epoch: int) -> list[str]:
        return _TEXTS[epoch % 4 :] + _TEXTS[: epoch % 4]

    stream = endless_sequences(
        documents, lambda text: [ord(c) for c in text], sequence_tokens=5, end_token_id=0, **kwargs
    )
    return [(sequence.index, sequence.inputs_S.tolist()) for sequence in islice(stream, count)]


def test_sequences_are_numbered_through_all_epochs() -> None:
    assert [index for index, _ in _sequences(40)] == list(range(40))


@pytest.mark.parametrize("position", [1, 9, 10, 11, 27, 30])
def test_an_endless_stream_resumes_at_any_position(position: int) -> None:
    assert _sequences(10, position=position) == _sequences(position + 10)[position:]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_an_endless_stream(world_size: int) -> None:
    dealt = [b for rank in range(world_size) for b in _sequences(8, rank=rank, world_size=world_size, position=12)]
    assert sorted(dealt) == _sequences(12 + 8 * world_size)[12:]


def test_data_that_does_not_fill_a_sequence_is_refused() -> None:
    stream = endless_sequences(lambda epoch: ["abc"], lambda text: [1] * len(text), sequence_tokens=9, end_token_id=0)
    with pytest.raises(DataError, match="does not fill one sequence of 9 tokens"):
        next(stream)


def test_micro_batches_are_stacks_of_sequences() -> None:
    stream = endless_sequences(
        lambda epoch: _TEXTS, lambda text: [ord(c) for c in text], sequence_tokens=5, end_token_id=0
    )
    first, second = islice(micro_batches(stream, 3), 2)
    assert first.inputs_BS.shape == (3, 5)
    assert first.inputs_BS[:, 1:].tolist() == first.targets_BS[:, :-1].tolist()
    assert first.targets_BS[-1, -1] == second.inputs_BS[0, 0]
