"""Packed matrices of random bytes, for formats that nothing here quantizes to, and a parametrization over all formats."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tightwire.kernels.spec.gguf_blocks import PACKED_FORMATS, PackedFormat
from tightwire.kernels.spec.packed import PackedMatrix, dequantize_reference

each_format = pytest.mark.parametrize("packed", list(PACKED_FORMATS.values()), ids=list(PACKED_FORMATS))


def any_blocks(packed: PackedFormat, num_rows: int, num_columns: int, seed: int = 0) -> PackedMatrix:
    """Every code, and scales and minima of all sizes and signs, but none that is infinite or NaN."""
    generator = torch.Generator().manual_seed(seed)
    shape = num_rows, num_columns // packed.block_elems, packed.block_bytes
    blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    if packed.name == "MXFP4":
        blocks[..., 0].clamp_(max=250)
    for at in _floats_of(packed):
        blocks[..., at + 1] &= 0xBF  # an exponent below the one of infinity
    return PackedMatrix(blocks.flatten(1), packed)


def common_blocks(packed: PackedFormat, num_rows: int, num_columns: int, seed: int = 0) -> PackedMatrix:
    """``any_blocks`` with numbers of the size of a model's weights, some hundredths."""
    matrix = any_blocks(packed, num_rows, num_columns, seed)
    blocks = matrix.blocks_OB.unflatten(1, (-1, packed.block_bytes))
    if packed.name == "MXFP4":
        blocks[..., 0] = blocks[..., 0] % 4 + 120
    for at in _floats_of(packed):
        size = 0x10 if packed.block_elems == 32 else 0x04  # from 2^-11 or 2^-14 on, either sign
        blocks[..., at + 1] = (blocks[..., at + 1] & 0x83) | size
    return matrix


def _floats_of(packed: PackedFormat) -> list[int]:
    """Where a block's float16 numbers are."""
    if packed.name == "MXFP4":
        return []
    return [packed.floats_at, packed.floats_at + 2] if packed.has_minimum else [packed.floats_at]


def minima_of(weight: PackedMatrix) -> Tensor:
    """What is added to each number of ``weight``: the numbers whose codes are 0."""
    packed = weight.format
    if not packed.has_minimum:
        return torch.zeros(weight.shape)
    blocks_OGB = weight.blocks_OB.clone().unflatten(1, (-1, packed.block_bytes))
    for plane in packed.codes.planes(packed.block_elems):
        blocks_OGB[:, :, plane.start : plane.stop] = 0
    return dequantize_reference(replace(weight, blocks_OB=blocks_OGB.flatten(1)), torch.float32)
