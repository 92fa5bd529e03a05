"""The one number for a codec's error: none for exact ones, about a bit's worth apart, worse with both legs quantized."""

import math

import pytest

from tightwire.comm.codec.codec import parse_codec
from tightwire.comm.policy.codec_error import relative_rms_error


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
    [("int8", 34.5), ("fp8", 34.0), ("int6", 22.4), ("int4", 9.7), ("int4-had", 20.0), ("int4-g64-sr", 24.1)],
)
def test_it_is_that_of_numbers_with_outliers(name: str, decibels: float) -> None:
    """tests/comm/test_codec.py has these for as many ranks and 32 times as many numbers; here each outlier counts more."""
    assert -20 * math.log10(error(name, name, 4)) == pytest.approx(decibels, abs=1.5)


def test_two_quantized_legs_err_by_about_the_root_of_both() -> None:
    one = math.hypot(error("int8", "none"), error("none", "int8"))
    assert error("int8", "int8") == pytest.approx(one, rel=0.05)


def test_it_is_the_same_every_time() -> None:
    assert error("int4-g64", "int8-g64", 4) == error("int4-g64", "int8-g64", 4)
