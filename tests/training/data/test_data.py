"""Packed blocks: every token is predicted once, ranks share the stream, and a stream resumes where it stopped."""

import pytest

from tightwire.training.data.blocks import Block, pack_blocks

_END = 0


def _encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def _pack(documents: list[str], **kwargs: int) -> list[Block]:
    return list(pack_blocks(documents, _encode, end_token_id=_END, **kwargs))


def test_every_token_but_the_first_is_a_target_once() -> None:
    blocks = _pack(["hello", "a longer second one", "c"], block_tokens=4)

    stream = [*_encode("hello"), _END, *_encode("a longer second one"), _END, *_encode("c"), _END]
    targets = [token for block in blocks for token in block.targets_S.tolist()]
    assert targets == stream[1 : 1 + len(targets)]
    assert len(stream) - 1 - len(targets) < 4
    assert all(block.inputs_S.tolist()[1:] == block.targets_S.tolist()[:-1] for block in blocks)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_out_the_blocks_of_one_rank(world_size: int) -> None:
    documents = ["some text", "more of it", "and the rest of all the text"]

    dealt = [
        b for rank in range(world_size) for b in _pack(documents, block_tokens=5, rank=rank, world_size=world_size)
    ]

    alone = _pack(documents, block_tokens=5)
    assert [b.inputs_S.tolist() for b in sorted(dealt, key=lambda b: b.index)] == [b.inputs_S.tolist() for b in alone]


def test_resumes_after_the_last_block_seen() -> None:
    documents = ["some text", "more of it", "and the rest of all the text"]

    resumed = _pack(documents, block_tokens=5, first_block=3)

    assert [b.inputs_S.tolist() for b in resumed] == [b.inputs_S.tolist() for b in _pack(documents, block_tokens=5)[3:]]


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="block_tokens"):
        _pack(["x"], block_tokens=0)
    with pytest.raises(ValueError, match="rank must be 0 to 1"):
        _pack(["x"], block_tokens=2, rank=2, world_size=2)
