"""Products of packed weights with activations in 8 bits: the bits of the reference, in every layout and for any rows."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers.kernels.interleaved import interleave_reference
from helpers.kernels.packed_blocks import any_blocks, common_blocks

from tightwire.kernels.cpu.library import available
from tightwire.kernels.cpu.linear import interleave_cpu
from tightwire.kernels.linear import linear
from tightwire.kernels.packed import dequantize, embedding
from tightwire.kernels.spec.gguf_blocks import PACKED_FORMATS, Q4_1, PackedFormat
from tightwire.kernels.spec.packed import PackedMatrix, dequantize_reference, quantize
from tightwire.kernels.spec.packed_int8 import linear_int8_reference, quantize_activations

pytestmark = pytest.mark.skipif(not available(), reason="needs the compiled kernels")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INT8_FORMATS = {name: replace(packed, int8_activations=True) for name, packed in PACKED_FORMATS.items()}

each_format = pytest.mark.parametrize("packed", list(INT8_FORMATS.values()), ids=list(INT8_FORMATS))


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _interleaved(weight: PackedMatrix) -> PackedMatrix:
    return interleave_cpu(PackedMatrix(weight.blocks_OB.clone(), weight.format))


def _assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@each_format
@pytest.mark.parametrize("seed", range(12))
def test_the_bits_are_those_of_the_reference(packed: PackedFormat, seed: int) -> None:
    """Shapes, dtypes, magnitudes and every code byte at random; zeros, subnormal numbers, infinities and NaN among x."""
    draw = random.Random(f"{packed.name} {seed}")
    num_outputs, num_groups = draw.choice([1, 5, 16, 17, 48, 64, 67, 130]), draw.choice([1, 2, 3, 18])
    num_tokens, dtype = draw.choice([1, 2, 3, 5, 7, 12, 31, 70]), draw.choice(DTYPES)
    num_groups = min(num_groups, 3) if packed.block_elems > 32 else num_groups
    weight = common_blocks(packed, num_outputs, num_groups * packed.block_elems, seed)
    x = (_random(num_tokens, weight.shape[1], seed=seed + 1) * 10 ** draw.uniform(-4, 3)).to(dtype)
    x[-1, :32] = 0
    x[0, 3] = draw.choice([1e-40, 1.0, float("nan"), float("inf"), -float("inf")])
    for bias in (None, _random(num_outputs, dtype=dtype, seed=seed)):
        expected = linear_int8_reference(x, weight, bias)
        for layout in (weight, _interleaved(weight)):
            _assert_same(linear(x, layout, bias), expected)
    _assert_same(
        linear(x, _interleaved(weight), out_dtype=torch.float32), linear_int8_reference(x, weight, None, torch.float32)
    )


@each_format
def test_the_largest_codes_do_not_overflow(packed: PackedFormat) -> None:
    weight = common_blocks(packed, 16, 2 * packed.block_elems)
    x = torch.ones(2, weight.shape[1])
    x[1] = -1
    kept = weight.blocks_OB.unflatten(1, (2, -1))[:, :, packed.floats_at : packed.floats_at + 4].clone()
    for code in (0x80, 0x7F, 0xFF, 0x00):
        weight.blocks_OB.fill_(code)
        blocks_OGB = weight.blocks_OB.unflatten(1, (2, -1))
        blocks_OGB[:, :, packed.floats_at : packed.floats_at + 4] = kept  # the floats, and in some formats codes
        _assert_same(linear(x, _interleaved(weight)), linear_int8_reference(x, weight, None))


@each_format
def test_interleaving_moves_bytes_as_the_reference_does(packed: PackedFormat) -> None:
    weight = any_blocks(packed, 70, 3 * packed.block_elems)
    interleaved = _interleaved(weight)
    assert interleaved.interleaved and interleaved.nbytes == weight.nbytes
    assert torch.equal(interleaved.blocks_OB, interleave_reference(weight).blocks_OB)


@each_format
@pytest.mark.parametrize("dtype", DTYPES)
def test_interleaved_rows_are_unpacked_and_looked_up(packed: PackedFormat, dtype: torch.dtype) -> None:
    weight = any_blocks(packed, 70, 3 * packed.block_elems)
    interleaved, plain = _interleaved(weight), dequantize_reference(weight, dtype)
    assert torch.equal(dequantize(interleaved, dtype), plain)
    assert torch.equal(dequantize(interleaved.rows(16, 48), dtype), plain[16:48])
    assert torch.equal(dequantize(interleaved.rows(48, 70), dtype), plain[48:])
    for ids in (torch.tensor([69, 0, 63, 64, 17, 17]), torch.tensor([], dtype=torch.int64)):
        for index_dtype in (torch.int64, torch.int32):
            assert torch.equal(embedding(ids.to(index_dtype), interleaved, dtype), plain[ids])
    for wrong in (70, -1):
        with pytest.raises(IndexError, match="of a table of 70 rows"):
            embedding(torch.tensor([wrong]), interleaved, dtype)
    with pytest.raises(ValueError, match="rows 8 to 32 of an interleaved matrix are not whole 16s"):
        interleaved.rows(8, 32)


def test_rows_and_threads_change_no_bit(num_threads: Callable[[int], None]) -> None:
    weight = _interleaved(quantize(_random(3000, 192), INT8_FORMATS["Q4_1"]))
    x = _random(540, 192, dtype=torch.bfloat16, seed=1)
    num_threads(3)
    whole = linear(x, weight, num_decode_rows=3)
    num_threads(1)
    for first, stop in ((0, 1), (539, 540), (3, 9), (100, 132), (0, 540)):
        assert torch.equal(linear(x[first:stop], weight, num_decode_rows=0), whole[first:stop])
        assert torch.equal(linear(x[first:stop], weight), whole[first:stop])


def test_no_rows() -> None:
    weight = quantize(torch.zeros(16, 32), INT8_FORMATS["Q4_1"])
    assert linear(torch.zeros(0, 32), _interleaved(weight)).shape == (0, 16)


@each_format
def test_the_error_is_that_of_eight_bits(packed: PackedFormat) -> None:
    """Each activation is within half a step of its code, so an output is within that times the weights' magnitudes."""
    weight = common_blocks(packed, 64, 576 if packed.block_elems == 32 else 512)
    x = _random(8, weight.shape[1], seed=1)
    codes, scale = quantize_activations(x)
    assert codes.abs().amax() <= 127
    plain = dequantize_reference(weight, torch.float64)
    error = (linear(x, weight).double() - x.double() @ plain.T).abs()
    # Terms of codes that have no sign are larger than the numbers, and so are their float32 roundings.
    bound = 0.5001 * scale.double().repeat_interleave(32, 1) @ plain.abs().T + 1e-3
    assert bool((error <= bound).all())


def test_the_torch_fallback_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = quantize(_random(40, 96), replace(Q4_1, int8_activations=True))
    x = _random(5, 96, dtype=torch.bfloat16, seed=1)
    expected, logits = linear(x, weight), linear(x, weight, out_dtype=torch.float32)
    monkeypatch.setattr("tightwire.kernels.linear.available", lambda: False)
    assert torch.equal(linear(x, weight), expected) and torch.equal(linear(x, weight, out_dtype=torch.float32), logits)
