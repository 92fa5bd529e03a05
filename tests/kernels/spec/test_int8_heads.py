"""Heads in 8 bits: the error's bound, numbers that are not finite, and where codes and scales lie."""

import pytest
import torch

from tightwire.kernels.spec.int8_heads import cache_width, head_bytes, max_error, parts_of, quantize_heads_reference


@pytest.mark.parametrize("size", [1e-42, 1e-38, 1e-3, 1.0, 300.0, 1e30, 3e38])
def test_decoded_numbers_are_within_the_bound(size: float) -> None:
    x = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0)).clamp(-1, 1) * size
    codes, scales = quantize_heads_reference(x)
    assert codes.dtype == torch.int8 and scales.dtype == torch.bfloat16 and codes.abs().max() <= 127
    error = (codes.double() * scales.double().unsqueeze(-1) - x.double()).abs()
    assert (error <= max_error(x).double()).all()


def test_zeros_stay_and_heads_that_are_not_finite_become_nan() -> None:
    x = torch.ones(4, 2, 8)
    x[0, 0] = 0.0
    x[1, 1, 3], x[2, 0, 7], x[3, 1, 0] = torch.nan, torch.inf, -torch.inf
    codes, scales = quantize_heads_reference(x)
    assert not codes[0, 0].any() and scales[0, 0].isfinite()
    assert scales.isnan().nonzero().tolist() == [[1, 1], [2, 0], [3, 1]]
    assert not codes[scales.isnan()].any() and (codes[0, 1] >= 126).all()


def test_codes_of_a_head_and_block_come_before_its_scales() -> None:
    assert head_bytes(64, torch.int8) == cache_width(64, torch.int8) == 66
    assert head_bytes(64, torch.bfloat16) == 128 and cache_width(64, torch.bfloat16) == 64
    cache = torch.arange(2 * 2 * 3 * 4 * 10).to(torch.int8).view(2, 2, 3, 4, 10)[:, 1]  # keys or values of moved blocks
    codes, scales = parts_of(cache)
    assert codes.shape == (2, 3, 4, 8) and scales.shape == (2, 3, 4)
    assert torch.equal(codes[1, 2].flatten(), cache[1, 2].flatten()[:32])
    assert torch.equal(scales[1, 2].view(torch.int8), cache[1, 2].flatten()[32:])
