import torch

from tightwire.model.prompt_stages import put_rows, take_rows


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
