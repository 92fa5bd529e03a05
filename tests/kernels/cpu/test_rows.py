import re

import pytest
import torch

from tightwire.kernels.layer_ops import apply_rope
from tightwire.kernels.spec.layer_ops import apply_rope_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_tokens", "num_heads", "head_dim"), [(1, 9, 64), (5, 3, 10), (3, 2, 128), (512, 12, 64)])
def test_equals_the_reference_bit_for_bit(dtype: torch.dtype, num_tokens: int, num_heads: int, head_dim: int) -> None:
    wide = torch.randn(num_tokens, num_heads + 3, head_dim).to(dtype)
    x = wide[:, 1 : 1 + num_heads]
    angles = torch.randn(num_tokens, head_dim // 2) * 100

    got = apply_rope(x, angles.cos(), angles.sin())

    assert got.is_contiguous()
    assert torch.equal(got, apply_rope_reference(x, angles.cos(), angles.sin()))


def test_rotates_pairs_half_a_head_apart() -> None:
    x = torch.zeros(1, 1, 8)
    x[0, 0, 1] = 1.0
    angle = torch.full((1, 4), 0.3)
    got = apply_rope(x, angle.cos(), angle.sin())[0, 0]
    assert got.nonzero().flatten().tolist() == [1, 5]
    assert got[1] == angle[0, 1].cos() and got[5] == angle[0, 1].sin()


@pytest.mark.parametrize(
    ("x", "angles", "message"),
    [
        (torch.zeros(2, 3, 8), torch.zeros(2, 8), "cos and sin (T, E/2); got (2, 3, 8), (2, 8) and (2, 8)"),
        (torch.zeros(2, 3, 7), torch.zeros(2, 3), "E even"),
        (torch.zeros(2, 3, 8), torch.zeros(2, 4, dtype=torch.float64), "cos and sin in float32"),
        (torch.zeros(2, 8, 3).transpose(1, 2), torch.zeros(2, 4), "contiguous"),
    ],
)
def test_arguments_that_do_not_match_are_refused(x: torch.Tensor, angles: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        apply_rope(x, angles, angles)
