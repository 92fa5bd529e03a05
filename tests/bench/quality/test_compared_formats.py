import math

import pytest
import torch

from tightwire.bench.quality.compared_formats import affine, amd, uniform

BITS = pytest.mark.parametrize("bits", [4, 6])


def random_numbers(num_elems: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(num_elems, generator=torch.Generator().manual_seed(3))


def sqnr_db(x: torch.Tensor, y: torch.Tensor) -> float:
    return 10 * math.log10(float(x.square().sum() / (y - x).square().sum()))


@BITS
def test_levels_are_numbers_where_the_step_is_one(bits: int) -> None:
    most = 2 ** (bits - 1)
    levels = torch.randint(-most, most, (4096,), generator=torch.Generator().manual_seed(bits)).float()
    levels.view(-1, 16)[:, 5] = -most
    assert torch.equal(amd(levels, bits), levels)


@pytest.mark.parametrize(
    ("number", "scale"),
    [
        (0.0, 0.0),
        (1.0, 1.0),
        (-1.0, -1.0),
        (1.0625, 1.125),  # half of a step rounds up
        (1.9999, 2.0),
        (2.0**-7, 1.125 * 2.0**-7),  # the code of 2^-7 is zero's
        (-(2.0**-7), -(2.0**-7)),
        (1.5 * 2.0**-9, 1.5 * 2.0**-7),  # below the range the mantissa stays
        (24809.0, 480.0),
        (-24809.0, -480.0),
    ],
)
def test_a_scale_is_a_float_of_eight_bits(number: float, scale: float) -> None:
    """The number of the largest size has the level -L, or the nearest one if its scale is larger."""
    x = torch.zeros(16)
    x[3] = number
    level = max(-32.0, round(-32 * number / scale)) if scale else 0.0
    assert amd(x, 6)[3].item() == level * scale / -32
    assert amd(x, 6).count_nonzero() == (number != 0)


def test_the_sum_of_gaussians_over_eight_ranks_has_the_published_noise() -> None:
    """aiter's pull requests give 30.2 dB for INT6 and 19.2 dB for INT4 with 8 ranks."""
    parts = random_numbers(8 << 14).view(8, -1)
    for bits, published in ((6, 30.2), (4, 19.2)):
        result = amd(amd(parts, bits).sum(0), bits)
        assert sqnr_db(parts.sum(0), result) == pytest.approx(published, abs=0.3)


@pytest.mark.parametrize("bits", [4, 8])
def test_uniform_levels_are_one_step_apart(bits: int) -> None:
    x = random_numbers(4 * 576).view(4, 576)
    y = uniform(x, bits)
    step = x.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1) * (1 + 2.0**-7)
    assert ((y - x).abs() <= step / 2 * (1 + 1e-6)).all()
    assert all(len(row.unique()) <= 2**bits - 1 for row in y)


@pytest.mark.parametrize("bits", [4, 8])
def test_affine_levels_lie_between_the_least_and_the_largest_number(bits: int) -> None:
    x = random_numbers(4 * 576).view(4, 576) + 5
    y = affine(x, bits)
    low, high = (end.unsqueeze(1) for end in x.aminmax(dim=1))
    # Half a step, and what rounding the minimum and the step to bfloat16 moves an end.
    assert ((y - x).abs() <= (high - low) / (2**bits - 1) / 2 + 2.0**-8 * (high - low + low.abs() + high.abs())).all()
    assert all(len(row.unique()) <= 2**bits for row in y)
