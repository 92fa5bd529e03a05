"""The reference: errors of ordinary numbers, and groups with inf, NaN and huge numbers."""

import pytest
import torch
from helpers.kernels.block_data import CASE_ELEMS, NUMBERS, format_id, formats_with, hard_cases, hard_numbers

from tightwire.kernels.spec.block_format import BlockFormat
from tightwire.kernels.spec.block_quant import (
    decode_add_reference,
    decode_reduce_encode_reference,
    decode_reference,
    encode_reference,
)

# The formats of one group size are one test, because most formats take milliseconds.
GROUPS = pytest.mark.parametrize("group_elems", [32, 64, 128])


def _through(x_N: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    return decode_reference(encode_reference(x_N, fmt), fmt, x_N.numel(), torch.float32)


@GROUPS
@pytest.mark.parametrize("dtype", NUMBERS)
def test_a_group_is_finite_or_NaN_throughout(group_elems: int, dtype: torch.dtype) -> None:
    x, cases = hard_numbers(dtype), hard_cases()
    broken_G = ~x.isfinite().view(-1, group_elems).all(1)
    ordinary = torch.cat([cases[name] for name in ("normal", "wide", "beyond float16", "huge", "subnormal")])
    for fmt in formats_with(group_elems):
        nan_GE = _through(x, fmt).isnan().view(-1, group_elems)
        assert nan_GE[broken_G].all(), format_id(fmt)
        if not fmt.hadamard:  # rotating back can overflow as well
            assert (nan_GE.all(1) == nan_GE.any(1)).all(), format_id(fmt)
        assert _through(ordinary, fmt).isfinite().all(), format_id(fmt)


@GROUPS
def test_zeros_stay_zeros(group_elems: int) -> None:
    for fmt in formats_with(group_elems):
        assert (_through(torch.zeros(100), fmt) == 0).all(), format_id(fmt)


@pytest.mark.parametrize("bits", [5, 4, 2])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_symmetric_codes_use_every_level(bits: int, sign: float) -> None:
    """The largest size comes back exactly; its opposite has one level less."""
    levels = 2 ** (bits - 1)
    x = sign * torch.linspace(-1, 1, 2 * levels + 1)[torch.arange(128) % (2 * levels + 1)]
    got = _through(x * 1.5, BlockFormat(bits, symmetric=True)) / 1.5
    assert len(got.unique()) == 2 * levels
    assert (got - x).abs().max() <= 1 / levels

    x = torch.full((128,), sign * 4.0)
    assert torch.equal(_through(x, BlockFormat(bits, symmetric=True)), x)


@GROUPS
def test_a_sum_of_messages_encoded_in_one_step_is_that_of_three_but_for_a_last_code(group_elems: int) -> None:
    generator = torch.Generator().manual_seed(3)
    parts = [torch.randn(333, generator=generator) for _ in range(3)]
    for fmt in formats_with(group_elems):
        _assert_one_step_is_near_three(parts, fmt)


def _assert_one_step_is_near_three(parts: list[torch.Tensor], fmt: BlockFormat) -> None:
    bufs = [encode_reference(part, fmt) for part in parts]
    out_fmt = BlockFormat(8, 128, hadamard=fmt.hadamard)
    total = torch.zeros(333)
    for buf in bufs:
        decode_add_reference(buf, fmt, total)
    # The sum begins with the zeros, and may stay rotated, which rounds elsewhere: codes may differ by one.
    got, want = decode_reduce_encode_reference(bufs, fmt, out_fmt, 333), encode_reference(total, out_fmt)
    codes = [buf[: 3 * 128].int() for buf in (got, want)]
    assert (codes[0] - codes[1])[: 333 if not fmt.hadamard else 2 * 128].abs().max() <= 1, format_id(fmt)


@GROUPS
def test_what_messages_lost_is_carried_in_the_numbers_that_they_encode(group_elems: int) -> None:
    x_3N = torch.randn(3, 333, generator=torch.Generator().manual_seed(4))
    for fmt in formats_with(group_elems):
        carried_M = torch.zeros(fmt.carried_elems(333), dtype=torch.bfloat16)
        total_N = torch.zeros(333)
        for x_N in x_3N:
            decode_add_reference(encode_reference(x_N, fmt, carried_M), fmt, total_N)
        lost_GE = carried_M.float().view(-1, group_elems)
        if fmt.hadamard:
            signs_EE = torch.tensor(
                [[1.0 - 2.0 * ((i & j).bit_count() % 2) for i in range(group_elems)] for j in range(group_elems)]
            )
            lost_GE = lost_GE @ signs_EE / group_elems
        torch.testing.assert_close(total_N + lost_GE.view(-1)[:333], x_3N.sum(0), atol=0.02, rtol=0)


@pytest.mark.parametrize("fmt", [BlockFormat(8), BlockFormat(4, 32, symmetric=True)], ids=format_id)
def test_empty_tensors(fmt: BlockFormat) -> None:
    assert encode_reference(torch.zeros(0), fmt).shape == (0,)
    assert decode_reference(torch.zeros(0, dtype=torch.uint8), fmt, 0, torch.bfloat16).shape == (0,)


def test_groups_do_not_depend_on_each_other() -> None:
    x = hard_numbers(torch.float32)
    for name, at in zip(hard_cases(), range(0, len(x), CASE_ELEMS), strict=True):
        alone = _through(x[at : at + CASE_ELEMS], BlockFormat(5))
        within = _through(x, BlockFormat(5))[at : at + CASE_ELEMS]
        assert torch.equal(alone.nan_to_num(), within.nan_to_num()), name
