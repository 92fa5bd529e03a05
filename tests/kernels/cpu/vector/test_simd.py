"""The vector operations, each against torch, through small kernels compiled here."""

import math
from functools import cache
from typing import Any

import pytest
import torch

from tightwire.kernels.cpu.vector import simd
from tightwire.kernels.cpu.vector.jit import helper
from tightwire.kernels.cpu.vector.numbers import load_numbers, rounded, store_numbers, store_rounded

COUNTS = (1, 7, 15, 16)


@helper
def _exp2(source: int, target: int) -> None:
    simd.store(target, simd.exp2(simd.load(source)))


@helper
def _exp(source: int, target: int) -> None:
    simd.store(target, simd.exp(simd.load(source)))


@helper
def _convert(source: int, source_kind: int, target: int, target_kind: int, count: int) -> None:
    store_numbers(target, load_numbers(source, source_kind, count), target_kind, count)


@helper
def _round(source: int, kind: int, target: int) -> None:
    simd.store(target, rounded(simd.load(source), kind))


@helper
def _store_rounded(source: int, target: int, kind: int, count: int) -> None:
    store_rounded(target, simd.load(source), kind, count)


@helper
def _transpose(source: int, target: int) -> None:
    simd.transpose(source, 4 * 20, target, 4 * 24)


@helper
def _sum_and_max(source: int, target: int) -> None:
    value = simd.load(source)
    simd.store_scalar(target, simd.sum_lanes(value))
    simd.store_scalar(target + 4, simd.max_lanes(value))


def _through(function: Any, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for at in range(0, len(x), 16):
        function(x.data_ptr() + 4 * at, out.data_ptr() + 4 * at)
    return out


@pytest.mark.parametrize(
    ("function", "want", "low", "high"), [(_exp2, torch.exp2, -126, 127), (_exp, torch.exp, -87, 88)]
)
def test_exponentials(function: Any, want: Any, low: float, high: float) -> None:
    x = torch.linspace(low, high, 16 * 5000)
    got = _through(function, x)
    relative = (got.double() - want(x.double())).abs() / want(x.double())
    assert relative.max() <= 3 * 2**-23


@pytest.mark.parametrize("function", [_exp2, _exp])
def test_exponentials_at_the_ends(function: Any) -> None:
    x = torch.tensor([0.0, -0.0, -math.inf, -1e30, -200.0, math.nan] + [0.0] * 10)
    got = _through(function, x)
    assert got[:5].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert got[5].isnan()


def test_exp_overflows_to_infinity() -> None:
    assert _through(_exp, torch.tensor([89.0, 1e30, math.inf] + [0.0] * 13))[:3].tolist() == [math.inf] * 3


@pytest.mark.parametrize("dtype", list(simd.NUMBER_KIND))
def test_rounding_is_torch_rounding(dtype: torch.dtype) -> None:
    bits = torch.randint(-(2**31), 2**31, (16 * 4000,), generator=torch.Generator().manual_seed(0))
    x = bits.int().view(torch.float32)
    x[:8] = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1 + 2**-8, 1 + 3 * 2**-8, 65520.0])
    got = torch.empty_like(x)
    for at in range(0, len(x), 16):
        _round(x.data_ptr() + 4 * at, simd.NUMBER_KIND[dtype], got.data_ptr() + 4 * at)
    want = x.to(dtype).float()
    if dtype == torch.bfloat16 and simd.bf16_products_usable():  # its instruction knows no subnormal numbers
        want = torch.where(x.abs() < torch.finfo(torch.float32).tiny, want * 0, want)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", list(simd.NUMBER_KIND))
def test_numbers_are_stored_as_they_are_rounded(dtype: torch.dtype) -> None:
    x, rounded = torch.randn(16), torch.empty(16)
    x[0] = 1e-40
    _round(x.data_ptr(), simd.NUMBER_KIND[dtype], rounded.data_ptr())
    for count in COUNTS:
        out = torch.full((16,), 7.0, dtype=dtype)
        _store_rounded(x.data_ptr(), out.data_ptr(), simd.NUMBER_KIND[dtype], count)
        assert torch.equal(out[:count].float(), rounded[:count])
        assert (out[count:] == 7.0).all()


@pytest.mark.parametrize("source", list(simd.NUMBER_KIND))
def test_conversion_touches_count_numbers_and_no_more(source: torch.dtype) -> None:
    x = torch.randn(16).to(source)
    for target, kind in simd.NUMBER_KIND.items():
        for count in COUNTS:
            out = torch.full((16,), 7.0, dtype=target)
            _convert(x.data_ptr(), simd.NUMBER_KIND[source], out.data_ptr(), kind, count)
            assert torch.equal(out[:count], x[:count].to(target)), (target, count)
            assert (out[count:] == 7.0).all(), (target, count)


def test_transpose() -> None:
    x = torch.randn(16, 20)
    out = torch.zeros(16, 24)
    _transpose(x.data_ptr(), out.data_ptr())
    assert torch.equal(out[:, :16], x[:, :16].T)
    assert not out[:, 16:].any()


def test_folds_over_lanes() -> None:
    x = torch.arange(16.0) - 3
    out = torch.empty(2)
    _sum_and_max(x.data_ptr(), out.data_ptr())
    assert out.tolist() == [float(x.sum()), 12.0]


@pytest.mark.parametrize("accumulate", [True, False])
def test_tile_shape_changes_no_bit(accumulate: bool) -> None:
    a, b, c = torch.randn(4, 50), torch.randn(50, 64), torch.randn(4, 64)
    wide = _run_tile(4, 4, accumulate, a, b, c)
    want = a.double() @ b.double() + (c.double() if accumulate else 0.0)
    bound = 51 * 2**-24 * (a.double().abs() @ b.double().abs() + c.double().abs())
    assert ((wide.double() - want).abs() <= bound).all()
    for row in range(4):
        for column in range(0, 64, 16):
            piece = slice(row, row + 1), slice(column, column + 16)
            narrow = _run_tile(1, 1, accumulate, a[piece[0]], b[:, piece[1]], c[piece])
            assert torch.equal(narrow, wide[piece])


def _run_tile(
    rows: int, vectors: int, accumulate: bool, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> torch.Tensor:
    tile = simd.make_tile_product(rows, vectors, accumulate=accumulate)

    @helper
    def run(c: int, c_stride: int, a: int, a_stride: int, b: int, b_stride: int, depth: int) -> None:
        tile(c, c_stride, a, a_stride, b, b_stride, depth)

    out = c.clone(memory_format=torch.contiguous_format)
    strides = [tensor.stride(0) * 4 for tensor in (out, a, b)]
    run(out.data_ptr(), strides[0], a.data_ptr(), strides[1], b.data_ptr(), strides[2], a.shape[1])
    return out


@pytest.mark.parametrize("kind", list(simd.NUMBER_KIND.values()))
def test_tile_dot_gives_the_same_bits_in_any_shape(kind: int) -> None:
    dtype = next(dtype for dtype, its_kind in simd.NUMBER_KIND.items() if its_kind == kind)
    for depth in (1, 31, 32, 100):
        b = torch.randn(4, depth).to(dtype)
        a = torch.randn(4, depth).to(dtype)
        if not (kind == simd.BFLOAT16 and simd.bf16_products_usable()):
            a = a.float()
        whole = _run_dot(4, 4, kind, a, b)
        bound = (depth + 5) * 2**-24 * (a.double().abs() @ b.double().abs().T)
        assert ((whole.double() - a.double() @ b.double().T).abs() <= bound).all()
        for rows, columns in ((2, 4), (1, 4), (3, 2), (2, 3), (3, 1), (1, 1)):
            for tiles_ahead in (0, 2):
                part = _run_dot(rows, columns, kind, a[4 - rows :], b[4 - columns :], tiles_ahead=tiles_ahead)
                assert torch.equal(part, whole[4 - rows :, 4 - columns :]), (depth, rows, columns)


@cache
def _compiled_dot(rows: int, columns: int, kind: int, tiles_ahead: int) -> Any:
    tile = simd.make_tile_dot(rows, columns, kind, tiles_ahead=tiles_ahead)

    @helper
    def run(c: int, c_stride: int, a: int, a_stride: int, b: int, b_stride: int, depth: int) -> None:
        tile(c, c_stride, a, a_stride, b, b_stride, depth)

    return run


def _run_dot(
    rows: int, columns: int, kind: int, a: torch.Tensor, b: torch.Tensor, *, tiles_ahead: int = 0
) -> torch.Tensor:
    out = torch.empty(rows, columns)
    a_stride, b_stride = a.stride(0) * a.element_size(), b.stride(0) * b.element_size()
    run = _compiled_dot(rows, columns, kind, tiles_ahead)
    run(out.data_ptr(), 4 * columns, a.data_ptr(), a_stride, b.data_ptr(), b_stride, a.shape[1])
    return out
