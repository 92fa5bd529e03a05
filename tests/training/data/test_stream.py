"""The endless stream: its blocks from any position, on any number of ranks, are those of one rank from the beginning."""

from itertools import islice

import pytest

from tightwire.training.data.documents import DataError
from tightwire.training.data.stream import endless_blocks, micro_batches

_TEXTS = ["some text", "more of it", "and the rest of all the text", "b"]


def _blocks(count: int, **kwargs: int) -> list[tuple[int, list[int]]]:
    def documents(epoch: int) -> list[str]:
        return _TEXTS[epoch % 4 :] + _TEXTS[: epoch % 4]

    stream = endless_blocks(documents, lambda text: [ord(c) for c in text], block_tokens=5, end_token_id=0, **kwargs)
    return [(block.index, block.inputs_S.tolist()) for block in islice(stream, count)]


def test_blocks_are_numbered_through_all_epochs() -> None:
    assert [index for index, _ in _blocks(40)] == list(range(40))


@pytest.mark.parametrize("position", [1, 9, 10, 11, 27, 30])
def test_goes_on_from_any_position(position: int) -> None:
    assert _blocks(10, position=position) == _blocks(position + 10)[position:]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_out_the_blocks_of_one_rank(world_size: int) -> None:
    dealt = [b for rank in range(world_size) for b in _blocks(8, rank=rank, world_size=world_size, position=12)]
    assert sorted(dealt) == _blocks(12 + 8 * world_size)[12:]


def test_data_that_does_not_fill_a_block_is_refused() -> None:
    stream = endless_blocks(lambda epoch: ["abc"], lambda text: [1] * len(text), block_tokens=9, end_token_id=0)
    with pytest.raises(DataError, match="does not fill one sequence of 9 tokens"):
        next(stream)


def test_micro_batches_are_stacks_of_blocks() -> None:
    stream = endless_blocks(lambda epoch: _TEXTS, lambda text: [ord(c) for c in text], block_tokens=5, end_token_id=0)
    first, second = islice(micro_batches(stream, 3), 2)
    assert first.inputs_BS.shape == (3, 5)
    assert first.inputs_BS[:, 1:].tolist() == first.targets_BS[:, :-1].tolist()
    assert first.targets_BS[-1, -1] == second.inputs_BS[0, 0]
