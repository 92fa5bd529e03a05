"""Sums in rank order: the bits of a plain loop."""

from itertools import product

import pytest
import torch

from tightwire.comm.codec.slices import SUMMABLE, slice_lengths, sum_in_rank_order


def _parts(num_parts: int, dtype: torch.dtype, num_elems: int = 1013) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_parts)
    return [(torch.randn(num_elems, generator=generator) * 10).to(dtype) for _ in range(num_parts)]


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", SUMMABLE)
def test_sum_has_the_bits_of_a_plain_fp32_loop(num_parts: int, dtype: torch.dtype) -> None:
    parts = _parts(num_parts, dtype)
    want = parts[0].float()
    for part in parts[1:]:
        want = want + part.float()

    got = sum_in_rank_order(parts)

    assert torch.equal(got, want.to(dtype))
    assert got.data_ptr() not in {part.data_ptr() for part in parts}


def test_16_bit_parts_are_not_rounded_on_the_way() -> None:
    # In bf16 256 + 1 is 256 again; in fp32 the four ones survive until the end.
    parts = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 1.0, 1.0)]
    assert sum_in_rank_order(parts).item() == 260.0


def test_slices_are_whole_groups() -> None:
    for num_elems, num_slices, multiple in product((0, 1, 7, 127, 128, 129, 1000, 4096), (1, 2, 3, 8), (1, 32, 128)):
        case = f"{num_elems} in {num_slices} by {multiple}"
        lengths = slice_lengths(num_elems, num_slices, multiple)
        assert len(lengths) == num_slices and sum(lengths) == num_elems, case
        assert lengths == sorted(lengths, reverse=True), case
        assert sum(length % multiple != 0 for length in lengths) <= 1, case
        assert lengths[0] < -(-num_elems // num_slices) + multiple, case


def test_no_slice_is_longer_than_needed() -> None:
    assert slice_lengths(10, 4) == [3, 3, 3, 1]
    assert slice_lengths(300, 3, 128) == [128, 128, 44]
    assert slice_lengths(130, 3, 128) == [128, 2, 0]
