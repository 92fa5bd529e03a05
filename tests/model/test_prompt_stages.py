import torch

from tightwire.kernels.spec.int8_heads import parts_of, quantize_heads_reference
from tightwire.model.layout import Layout, Shard
from tightwire.model.prompt_stages import moved_heads, put_rows, take_rows


def test_rows_are_copied_from_slots_to_slots() -> None:
    source = [(torch.randn(5, 3, 4, 8), torch.randn(5, 3, 4, 8)) for _ in range(2)]
    target = [(torch.zeros(5, 3, 4, 8), torch.zeros(5, 3, 4, 8)) for _ in range(2)]
    slots = torch.tensor([7, 0, 19], dtype=torch.int32)
    rows_LCTKE = take_rows(source, slots)
    put_rows(target, slots, rows_LCTKE)
    assert rows_LCTKE.shape == (2, 2, 3, 3, 8)
    for (keys, values), (got_keys, got_values) in zip(source, target, strict=True):
        for block, offset in ((1, 3), (0, 0), (4, 3)):
            assert torch.equal(got_keys[block, :, offset], keys[block, :, offset])
            assert torch.equal(got_values[block, :, offset], values[block, :, offset])
        assert int((got_keys != 0).sum()) == 3 * 3 * 8


def test_rows_in_8_bits_are_copied_with_their_scales() -> None:
    """A block has the codes of all its tokens and then their scales."""
    codes, scales = quantize_heads_reference(torch.randn(20, 3, 8))
    source, target = (torch.zeros(5, 3, 4, 10, dtype=torch.int8) for _ in range(2))
    for stored, tokens in zip(parts_of(source), (codes, scales), strict=True):
        stored.copy_(tokens.unflatten(0, (5, 4)).transpose(1, 2))
    slots = torch.tensor([7, 0, 19, 6])
    rows_LCTKE = take_rows([(source, source.clone())], slots)
    put_rows([(target, target.clone())], slots + torch.tensor([0, 1, -3, -4]), rows_LCTKE)
    assert rows_LCTKE.shape == (1, 2, 4, 3, 10)
    for got, tokens in zip(parts_of(target), (codes, scales), strict=True):
        for slot, wanted in ((7, 7), (1, 0), (16, 19), (2, 6)):
            assert torch.equal(got[slot // 4, :, slot % 4], tokens[wanted])


def test_of_a_head_that_several_ranks_of_a_stage_compute_the_first_hands_it_over() -> None:
    """Three KV heads, of which two ranks of a stage share the second; four ranks decode."""

    def layout(*heads: range) -> Layout:
        return Layout(
            shards=tuple(
                Shard(
                    rank=rank,
                    world_size=len(heads),
                    query_heads=range(1),
                    kv_heads=own,
                    mlp_columns=range(1),
                    vocab_rows=range(1),
                )
                for rank, own in enumerate(heads)
            )
        )

    two = layout(range(2), range(1, 3))
    moved = moved_heads(layout(range(1), range(1), range(1, 2), range(1, 3)), Layout(shards=two.shards * 2))
    assert moved[:2] == moved[2:]
    assert [list(heads) for heads in moved[0]] == [[0], [0], [1], [1]]
    assert [list(heads) for heads in moved[1]] == [[], [], [], [2]]
