import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.kernels.block_data import all_formats

from tightwire.kernels.spec.block_format import GROUPS, PLANES, BlockFormat
from tightwire.kernels.spec.block_quant import encode_reference


@pytest.mark.parametrize(
    ("fmt", "bits_per_number"),
    [
        *((BlockFormat(bits), bits + 0.25) for bits in PLANES),
        (BlockFormat(8, symmetric=True), 8.125),
        (BlockFormat(8, float8=True), 8.125),
        (BlockFormat(4, hadamard=True), 4.25),
        (BlockFormat(4, 32), 5.0),
        (BlockFormat(4, 32, symmetric=True), 4.5),
    ],
    ids=str,
)
def test_bits_on_the_wire(fmt: BlockFormat, bits_per_number: float) -> None:
    assert fmt.encoded_bytes(4096) * 8 == bits_per_number * 4096


@pytest.mark.parametrize("num_elems", [0, 1, 127, 128, 1000])
def test_sections_fill_the_message(num_elems: int) -> None:
    for fmt in all_formats():
        starts = [offset * fmt.num_groups(num_elems) for offset in fmt.section_offsets]
        assert starts[0] == 0
        assert list(starts) == sorted(starts)
        assert starts[-1] + 2 * fmt.num_groups(num_elems) == fmt.encoded_bytes(num_elems)
        assert all(start % 2 == 0 for start in starts[: len(fmt.plane_bits) + 2])


@pytest.mark.parametrize("group_elems", GROUPS)
@pytest.mark.parametrize("bits", PLANES)
def test_codes_are_at_the_places_of_the_layout(bits: int, group_elems: int) -> None:
    """Whole numbers from 0 to the highest code are their own codes: the scale is 1, the zero 0."""
    fmt = BlockFormat(bits, group_elems)
    codes = torch.randint(0, 2**bits, (2, group_elems), generator=torch.Generator().manual_seed(bits))
    codes[:, 0], codes[:, 5] = 0, 2**bits - 1
    want = []
    for plane_bits, shift in zip(fmt.plane_bits, fmt.plane_shifts, strict=True):
        size = group_elems * plane_bits // 8
        for group in range(2):
            plane = [0] * size
            for e in range(group_elems):
                field = int(codes[group, e]) >> shift & (1 << plane_bits) - 1
                plane[e % size] |= field << plane_bits * (e // size)
            want += plane
    want += [0x80, 0x3F] * 2 + [0, 0] * 2  # bfloat16 1.0 and 0.0, low byte first
    assert encode_reference(codes.view(-1).float(), fmt).tolist() == want


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 9}, f"bits must be one of {sorted(PLANES, reverse=True)}, got 9"),
        ({"bits": 4, "group_elems": 16}, "group_elems must be one of [32, 64, 128], got 16"),
        ({"bits": 4, "float8": True}, "float8 needs 8 bits"),
        ({"bits": 8, "float8": True, "symmetric": True}, "float8 needs 8 bits"),
    ],
)
def test_options_that_cannot_be_combined_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        BlockFormat(**options)


def test_planes_hold_a_code_and_fill_bytes() -> None:
    for bits, planes in PLANES.items():
        assert sum(planes) == bits and all(8 % plane == 0 for plane in planes)


def test_sizes_are_computed_once_and_are_no_part_of_a_format() -> None:
    fmt = BlockFormat(6, 64, symmetric=True)
    assert fmt.plane_bytes is fmt.plane_bytes and fmt.section_offsets == (0, 32, 48) and fmt.group_bytes == 50
    assert replace(fmt, bits=8).group_bytes == 66
    assert fmt == BlockFormat(6, 64, symmetric=True) and hash(fmt) == hash(BlockFormat(6, 64, symmetric=True))
    assert repr(fmt) == "BlockFormat(bits=6, group_elems=64, symmetric=True, hadamard=False, float8=False)"
