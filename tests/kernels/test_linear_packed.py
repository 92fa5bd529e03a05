"""Products with packed weights: on CPU the bits of the same numbers unpacked; rows do not depend on each other."""

import re
from collections.abc import Callable

import pytest
import torch
from helpers.kernels.packed_blocks import common_blocks, each_format

from tightwire.kernels.cpu.library import has_pairs
from tightwire.kernels.layer_ops import swiglu
from tightwire.kernels.linear import gated_linear, linear
from tightwire.kernels.packed import dequantize
from tightwire.kernels.spec.gguf_blocks import Q4_1, Q6_K, Q8_0, PackedFormat
from tightwire.kernels.spec.packed import PackedMatrix, StackedMatrix, quantize

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _unpacked_product(x: torch.Tensor, weight: PackedMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    """What ``linear`` gives for the unpacked weights in float32, rounded to the dtype of x; or in bfloat16 pairs."""
    if x.dtype == torch.bfloat16 and has_pairs():
        return linear(x, dequantize(weight, torch.bfloat16), bias)
    added = None if bias is None else bias.float()
    return linear(x.float(), dequantize(weight, torch.float32), added).to(x.dtype)


@each_format
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(130, 576), (65, 96), (3, 32)])
def test_the_bits_are_those_of_the_unpacked_product(
    packed: PackedFormat, dtype: torch.dtype, num_outputs: int, num_inputs: int
) -> None:
    weight = common_blocks(packed, num_outputs, num_inputs // 32 * packed.block_elems)
    num_inputs = weight.shape[1]
    for bias in (None, _random(num_outputs, dtype=dtype, seed=1)):
        for num_tokens in (1, 2, 3, 5, 70):
            x = _random(num_tokens, num_inputs, dtype=dtype, seed=2)
            got = linear(x, weight, bias)
            assert got.dtype == dtype and torch.equal(got, _unpacked_product(x, weight, bias))


@each_format
def test_rows_wider_than_one_unpacked_piece(packed: PackedFormat) -> None:
    for num_inputs in (4096, 1 << 17):
        weight = common_blocks(packed, 9, num_inputs)
        x = _random(5, num_inputs, seed=1)
        assert torch.equal(linear(x, weight), _unpacked_product(x, weight, None))


def test_threads_change_no_bit(num_threads: Callable[[int], None]) -> None:
    weight, x = quantize(_random(3000, 192), Q4_1), _random(40, 192, dtype=torch.bfloat16, seed=1)
    num_threads(3)
    whole = linear(x, weight)
    num_threads(1)
    for first, stop in ((0, 1), (39, 40), (3, 9), (0, 40)):
        assert torch.equal(linear(x[first:stop], weight), whole[first:stop])


def test_no_rows() -> None:
    assert linear(torch.zeros(0, 32), quantize(torch.zeros(6, 32), Q4_1)).shape == (0, 6)


def test_a_slice_of_rows_and_columns_is_read_without_a_copy() -> None:
    for packed in (Q4_1, Q6_K):
        elems, block_bytes = packed.block_elems, packed.block_bytes
        weight = common_blocks(packed, 80, 5 * elems)
        part = PackedMatrix(weight.blocks_OB[10:70, block_bytes : 4 * block_bytes], packed)
        x = _random(3, 3 * elems, seed=1)
        assert torch.equal(linear(x, part), linear(x, dequantize(weight, torch.float32)[10:70, elems : 4 * elems]))


@pytest.mark.parametrize(
    ("num_tokens", "num_outputs", "num_inputs"),
    [
        (70, 150, 64),
        (70, 150, 1568),
        (70, 150, 14336),
        (33, 47, 576),
        (545, 1100, 96),
        (530, 97, 1536),
        (300, 1100, 4640),
    ],
)
def test_rows_of_a_long_prompt_have_the_bits_of_a_single_row(
    num_tokens: int, num_outputs: int, num_inputs: int, num_threads: Callable[[int], None]
) -> None:
    """Weights are unpacked once for many rows: a whole panel of columns, or a part of it where columns are long."""
    num_threads(2)
    weight = quantize(_random(num_outputs, num_inputs), Q4_1)
    x = _random(num_tokens, num_inputs, dtype=torch.bfloat16, seed=1)
    for out_dtype in (torch.bfloat16, torch.float32):
        got = linear(x, weight, out_dtype=out_dtype)
        assert all(
            torch.equal(got[row : row + 1], linear(x[row : row + 1], weight, out_dtype=out_dtype))
            for row in (0, 32, num_tokens // 2, num_tokens - 1)
        )


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "half", "num_inputs"), [(5, 64, 96), (33, 40, 64), (545, 560, 576), (70, 17, 4640)]
)
def test_gates_in_the_same_pass_have_the_bits_of_two(
    num_tokens: int, half: int, num_inputs: int, gelu: bool, with_bias: bool, num_threads: Callable[[int], None]
) -> None:
    num_threads(2)
    weight = _random(2 * half, num_inputs) * 2 * num_inputs**-0.5
    gate, up = (quantize(part, packed) for part, packed in zip(weight.chunk(2), (Q4_1, Q8_0), strict=True))
    for dtype in (torch.bfloat16, torch.float32):
        x = _random(num_tokens, num_inputs, dtype=dtype, seed=1)
        bias = _random(2 * half, dtype=dtype, seed=2) if with_bias else None
        for matrix in (weight.to(dtype), quantize(weight, Q4_1), StackedMatrix((gate, up))):
            got = gated_linear(x, matrix, bias, num_decode_rows=0, gelu=gelu)
            assert torch.equal(got, swiglu(linear(x, matrix, bias), gelu=gelu))


@pytest.mark.parametrize(
    ("x", "bias", "message"),
    [
        (torch.zeros(2, 32), None, "got (2, 32), (3, 64) and None"),
        (torch.zeros(2, 64).double(), None, "torch.float16; got torch.float64, Q4_1 and None"),
        (torch.zeros(2, 64), torch.zeros(3).half(), "got torch.float32, Q4_1 and torch.float16"),
        (torch.zeros(64, 2).T, None, "contiguous rows"),
    ],
)
def test_arguments_that_do_not_match_are_refused(x: torch.Tensor, bias: torch.Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        linear(x, quantize(torch.zeros(3, 64), Q4_1), bias)
