"""Bounds of sums hold and are finite; the relative error of a codec is plausible."""

import math

import pytest
import torch

from tightwire.comm.codec.codec import SUMMABLE, parse_codec, sum_and_encode, sum_in_rank_order
from tightwire.comm.codec.error_bounds import (
    quantized_sum_bound,
    quantized_total_bound,
    rank_order_bound,
    relative_rms_error,
    rounded_hops_bound,
    rounded_parts_bound,
)


def _parts(num_parts: int, dtype: torch.dtype, num_elems: int = 1013) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_parts)
    return [(torch.randn(num_elems, generator=generator) * 10).to(dtype) for _ in range(num_parts)]


@pytest.mark.parametrize("bound", [rank_order_bound, rounded_hops_bound])
@pytest.mark.parametrize("dtype", SUMMABLE)
def test_bound_is_tight_to_a_few_roundings(bound, dtype: torch.dtype) -> None:
    parts = _parts(4, dtype)
    magnitude = torch.stack([part.double().abs() for part in parts]).sum(0)
    assert (bound(parts) <= 4 * torch.finfo(dtype).eps * magnitude).all()


def test_rounding_at_every_hop_breaks_the_rank_order_bound() -> None:
    parts = _parts(8, torch.bfloat16)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    error = (total.double() - torch.stack([part.double() for part in parts]).sum(0)).abs()
    assert (error > rank_order_bound(parts)).any()
    assert (error <= rounded_hops_bound(parts)).all()


def test_no_bound_where_the_sum_overflows() -> None:
    parts = [torch.tensor([60000.0, 1.0], dtype=torch.float16)] * 2
    assert rank_order_bound(parts)[0] == torch.inf
    assert rank_order_bound(parts)[1] < 0.01


def test_no_bound_where_roundings_on_the_way_lead_beyond_the_largest_number() -> None:
    """The exact sum is float16's largest number, but the first hop rounds up by half a step of it."""
    parts = [torch.tensor([value], dtype=torch.float16) for value in (16400.0, 16416.0, 32688.0)]
    assert (parts[0] + parts[1] + parts[2]).isinf()
    assert rounded_hops_bound(parts).isinf()
    assert rounded_parts_bound([parts[:2], parts[2:]]).isinf()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parts_rounded_on_the_way_need_their_own_bound(dtype: torch.dtype) -> None:
    parts = _parts(8, dtype)
    halves = [sum_in_rank_order(parts[:4]), sum_in_rank_order(parts[4:])]
    error = (sum_in_rank_order(halves).double() - torch.stack([part.double() for part in parts]).sum(0)).abs()
    assert (error > rank_order_bound(parts)).any()
    assert (error <= rounded_parts_bound([parts[:4], parts[4:]])).all()


def test_one_part_needs_no_more_than_its_own_rounding() -> None:
    parts = _parts(4, torch.bfloat16)
    once, twice = rank_order_bound(parts), rounded_parts_bound([parts])
    assert (twice >= once).all() and (twice <= 2.01 * once).all()


@pytest.mark.parametrize("codec", ["int8", "int4-had", "int3-g64-sym", "fp8"])
@pytest.mark.parametrize("dtype", SUMMABLE)
def test_the_bound_of_a_quantized_sum_holds_and_is_of_its_size(codec: str, dtype: torch.dtype) -> None:
    parts = _parts(4, dtype)
    exact = torch.stack([part.double() for part in parts]).sum(0)
    sum_N, bound = quantized_sum_bound(parts, parse_codec(codec))
    assert ((sum_N.double() - exact).abs() <= bound).all()
    one_pass = torch.stack([parse_codec(codec).max_error(part) for part in parts]).sum(0)
    assert (bound >= one_pass).all()
    # Beside the codec's own errors there are twelve float32 additions of numbers that a group of 128 may rotate.
    added = 128 * torch.stack(parts).double().abs().amax() * 4
    assert (bound - one_pass <= 13 * 2.0**-24 * (added + 1800 * one_pass)).all()


def test_no_bound_where_a_sum_that_is_encoded_again_overflows_on_its_way() -> None:
    """It adds 128 scales of each part, which are more than float32's largest number here; the sum itself is not."""
    int4, wide = parse_codec("int4-g32"), parse_codec("int4")
    parts = [torch.tensor([-3e37, 3e37] * 16 + [1.0] * 224)] * 2
    encoded = sum_and_encode([int4.encode(part) for part in parts], 256, int4, wide, torch.float32)
    got_N = wide.decode(encoded, 256, torch.float32)
    bound = quantized_total_bound(parts, *quantized_sum_bound(parts, int4), wide)
    assert got_N[:128].isnan().all() and bound[:128].isinf().all(), "the group of the second codec"
    assert got_N[128:].isfinite().all() and (bound[128:] < 0.01).all()


def test_a_bound_of_numbers_that_are_none_is_infinite() -> None:
    parts = _parts(2, torch.bfloat16)
    parts[0][3] = torch.nan
    int8 = parse_codec("int8")
    bound = quantized_total_bound(parts, *quantized_sum_bound(parts, int8), int8)
    assert bound[:128].isinf().all() and bound[128:].isfinite().all()


@pytest.mark.parametrize("codec", ["int2", "int3"])
def test_a_total_of_the_smallest_numbers_is_rounded_by_up_to_half_the_smallest(codec: str) -> None:
    half_smallest, reached = 2.0**-25, False  # of float16
    for largest in range(3, 60):
        part = (torch.arange(128) % (largest + 1) * 2.0**-24).half()
        parts, none = [part, torch.zeros_like(part)], parse_codec("none")
        bound = quantized_total_bound(parts, *quantized_sum_bound(parts, none), parse_codec(codec))
        got = parse_codec(codec).decode(parse_codec(codec).encode(part.float()), 128, torch.float16)
        error = (got.double() - part.double()).abs()
        assert (error <= bound).all(), largest
        reached |= bool((error > bound - half_smallest).any())
    assert reached, "some number needs that part of the bound"


def error(reduce: str, gather: str, num_ranks: int = 2) -> float:
    return relative_rms_error(parse_codec(reduce), parse_codec(gather), num_ranks)


def test_exact_codecs_have_none() -> None:
    assert error("none", "none") == 0


@pytest.mark.parametrize(("fewer", "more"), [("int4", "int5"), ("int5", "int6"), ("int6", "int8")])
def test_a_bit_is_worth_about_six_decibels(fewer: str, more: str) -> None:
    bits = int(more[3:]) - int(fewer[3:])
    decibels = 20 * math.log10(error(fewer, fewer) / error(more, more))
    # A step of 1/(2^b - 1) of the range instead of 1/(2^(b + d) - 1).
    expected = 20 * math.log10((2 ** int(more[3:]) - 1) / (2 ** int(fewer[3:]) - 1))
    assert abs(decibels - expected) < 1, f"{decibels:.1f} dB for {bits} bits"


@pytest.mark.parametrize(
    ("name", "decibels"),
    [("int8", 34.5), ("fp8", 34.0), ("int6", 22.4), ("int4", 9.7), ("int4-had", 20.0)],
)
def test_it_is_that_of_numbers_with_outliers(name: str, decibels: float) -> None:
    """tests/comm/test_codec.py has these for as many ranks and 32 times as many numbers; here each outlier counts more."""
    assert -20 * math.log10(error(name, name, 4)) == pytest.approx(decibels, abs=1.5)


def test_two_quantized_legs_err_by_about_the_root_of_both() -> None:
    one = math.hypot(error("int8", "none"), error("none", "int8"))
    assert error("int8", "int8") == pytest.approx(one, rel=0.05)


def test_it_is_the_same_every_time() -> None:
    assert error("int4-g64", "int8-g64", 4) == error("int4-g64", "int8-g64", 4)
