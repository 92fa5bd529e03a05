"""Packed matrices: numbers equal to GGUF's own, errors within half a scale, the CPU's products those of the floats."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from helpers.kernels.packed_blocks import any_blocks, each_format
from hypothesis import given, settings
from hypothesis import strategies as st

from tightwire.kernels.packed import arrange, dequantize, embedding
from tightwire.kernels.spec.gguf_blocks import PACKED_FORMATS, Q4_0, Q4_1, Q8_0, PackedFormat
from tightwire.kernels.spec.packed import PackedMatrix, dequantize_reference, quantize

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

each_made_format = pytest.mark.parametrize("packed", [Q8_0, Q4_0, Q4_1], ids=["Q8_0", "Q4_0", "Q4_1"])


def scales_of(matrix: PackedMatrix) -> torch.Tensor:
    """(O, G, 1) float64."""
    blocks = matrix.blocks_OB.unflatten(1, (-1, matrix.format.block_bytes))
    return blocks[..., :2].contiguous().view(torch.float16).double()


@each_format
def test_blocks_are_those_of_gguf(packed: PackedFormat) -> None:
    kind = GGMLQuantizationType[packed.name]
    assert GGML_QUANT_SIZES[kind] == (packed.block_elems, packed.block_bytes)
    matrix = any_blocks(packed, 40, 5 * packed.block_elems)
    want = torch.from_numpy(gguf_dequantize(matrix.blocks_OB.numpy(), kind))
    assert torch.equal(dequantize_reference(matrix, torch.float32), want)


@each_format
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_unpacks_as_the_reference(packed: PackedFormat, dtype: torch.dtype) -> None:
    matrix = any_blocks(packed, 37, 3 * packed.block_elems)
    got = dequantize(matrix, dtype)
    assert got.dtype == dtype and torch.equal(got, dequantize_reference(matrix, dtype))
    some = PackedMatrix(matrix.blocks_OB[3:20:2, packed.block_bytes :], packed)  # rows with gaps between
    assert torch.equal(dequantize(some, dtype), got[3:20:2, packed.block_elems :])


@each_made_format
@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.floats(-24.0, 4.0),
    shift=st.floats(-3.0, 3.0),
    spread=st.floats(0.0, 12.0),
)
def test_quantized_numbers_are_within_half_a_scale(
    packed: PackedFormat, seed: int, size: float, shift: float, spread: float
) -> None:
    """Numbers of all sizes, far from zero too, some groups larger than others."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(size + spread * (torch.rand(8, 6, 1, generator=generator) - 0.5))
    x_OD = ((torch.randn(8, 6, 32, generator=generator) + shift) * sizes).flatten(1)

    matrix = quantize(x_OD, packed)
    got = dequantize(matrix, torch.float32)

    x_OGN, error = x_OD.double().unflatten(1, (-1, 32)), (got.double() - x_OD.double()).unflatten(1, (-1, 32)).abs()
    scale = scales_of(matrix)
    # Two roundings of float32 on the way to a code of up to 127, and Q4_1's one of its sum.
    rounding = torch.finfo(torch.float32).eps
    assert (error <= scale * (0.5 + 256 * rounding) + rounding * x_OGN.abs()).all()
    # The scale is the least that reaches all, but for its rounding to float16 and the minimum's.
    half, tiny = 2.0**-10, 2.0**-24
    if packed.has_minimum:
        least = x_OGN.amin(-1, keepdim=True)
        reach = (x_OGN.amax(-1, keepdim=True) - least + half * least.abs() + tiny) / 15
    else:
        reach = x_OGN.abs().amax(-1, keepdim=True) / (127 if packed.bits == 8 else 7)
    assert (scale <= reach * (1 + 2 * half) + tiny).all()


@each_made_format
def test_packing_unpacked_numbers_again_loses_nothing(packed: PackedFormat) -> None:
    """Codes from end to end and numbers that are exact: nothing is lost a second time."""
    codes = torch.arange(32).float().clamp_max(14) - 7  # -7 to 7
    x_OD = torch.stack([codes, 0.5 * codes]).repeat(1, 2)
    once = dequantize(quantize(x_OD, packed), torch.float32)
    assert torch.equal(dequantize(quantize(once, packed), torch.float32), once)


@each_made_format
@pytest.mark.parametrize("value", [0.0, 1.5, -1.5, 1e-8, -1e-8])
def test_groups_of_one_number(packed: PackedFormat, value: float) -> None:
    x_OD = torch.full((2, 64), value)
    matrix = quantize(x_OD, packed)
    bound = scales_of(matrix).max() / 2 if value else 0.0
    assert ((dequantize(matrix, torch.float32) - x_OD).abs() <= bound * (1 + 2**-20)).all()


@each_made_format
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e30])
def test_numbers_too_large_for_a_scale_are_refused(packed: PackedFormat, value: float) -> None:
    x_OD = torch.zeros(2, 64)
    x_OD[1, 40] = value
    with pytest.raises(ValueError, match="infinite or NaN"):
        quantize(x_OD, packed)


def test_rows_without_whole_groups_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Q8_0 packs rows of whole blocks of 32 numbers, got 40"):
        quantize(torch.zeros(2, 40), Q8_0)
    with pytest.raises(ValueError, match="got 8"):
        Q4_1.row_bytes(8)
    with pytest.raises(ValueError, match=re.escape("whole blocks of 18 bytes; got (2, 40) torch.uint8")):
        PackedMatrix(torch.zeros(2, 40, dtype=torch.uint8), Q4_0)


def test_sizes() -> None:
    matrix = quantize(torch.zeros(3, 96), Q4_1)
    assert matrix.shape == (3, 96) and matrix.nbytes == 3 * 3 * 20
    assert matrix.rows(1, 3).shape == (2, 96)
    bits = {name: 8 * packed.row_bytes(256) / 256 for name, packed in PACKED_FORMATS.items()}
    assert bits == {
        "Q8_0": 8.5,
        "Q4_0": 4.5,
        "Q4_1": 5.0,
        "Q5_0": 5.5,
        "Q5_1": 6.0,
        "IQ4_NL": 4.5,
        "MXFP4": 4.25,
        "Q2_K": 2.625,
        "Q3_K": 3.4375,
        "Q4_K": 4.5,
        "Q5_K": 5.5,
        "Q6_K": 6.5625,
        "IQ4_XS": 4.25,
    }


@each_format
@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_unpacks_the_rows_it_needs(packed: PackedFormat, dtype: torch.dtype) -> None:
    table = any_blocks(packed, 50, 2 * packed.block_elems)
    ids = torch.tensor([7, 0, 49, 7], dtype=torch.int32)
    assert torch.equal(embedding(ids, table, dtype), dequantize_reference(table, dtype)[ids])
    plain = dequantize_reference(table, dtype)
    assert torch.equal(embedding(ids, plain, dtype), plain[ids])


def test_embedding_of_an_interleaved_table_by_ids_that_are_not_contiguous() -> None:
    table = arrange(any_blocks(replace(Q4_1, int8_activations=True), 50, 128))
    assert isinstance(table, PackedMatrix)
    ids = torch.arange(40)[::2]
    assert torch.equal(embedding(ids, table, torch.float32), embedding(ids.contiguous(), table, torch.float32))


def test_many_rows_are_unpacked_on_several_threads(num_threads: Callable[[int], None]) -> None:
    matrix = any_blocks(Q4_1, 3000, 128)
    num_threads(3)
    assert torch.equal(dequantize(matrix, torch.bfloat16), dequantize_reference(matrix, torch.bfloat16))
