"""Slices cover the tensor, keep groups whole, and differ in length only at the end."""

import pytest

from tightwire.comm.slices import slice_lengths


@pytest.mark.parametrize("num_elems", [0, 1, 7, 127, 128, 129, 1000, 4096])
@pytest.mark.parametrize("num_slices", [1, 2, 3, 8])
@pytest.mark.parametrize("multiple", [1, 32, 128])
def test_slices_are_whole_groups(num_elems: int, num_slices: int, multiple: int) -> None:
    lengths = slice_lengths(num_elems, num_slices, multiple)
    assert len(lengths) == num_slices and sum(lengths) == num_elems
    assert lengths == sorted(lengths, reverse=True)
    assert sum(length % multiple != 0 for length in lengths) <= 1
    assert lengths[0] < -(-num_elems // num_slices) + multiple


def test_no_slice_is_longer_than_needed() -> None:
    assert slice_lengths(10, 4) == [3, 3, 3, 1]
    assert slice_lengths(300, 3, 128) == [128, 128, 44]
    assert slice_lengths(130, 3, 128) == [128, 2, 0]
