"""Sums in rank order: the bits of a plain loop."""

import pytest
import torch

from tightwire.comm.summing import SUMMABLE, sum_in_rank_order


def _parts(num_parts: int, dtype: torch.dtype, num_elems: int = 1013) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_parts)
    return [(torch.randn(num_elems, generator=generator) * 10).to(dtype) for _ in range(num_parts)]


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", SUMMABLE)
def test_sum_has_the_bits_of_a_plain_fp32_loop(num_parts: int, dtype: torch.dtype) -> None:
    parts = _parts(num_parts, dtype)
    want = parts[0].float()
    for part in parts[1:]:
        want = want + part.float()

    got = sum_in_rank_order(parts)

    assert torch.equal(got, want.to(dtype))
    assert got.data_ptr() not in {part.data_ptr() for part in parts}


def test_16_bit_parts_are_not_rounded_on_the_way() -> None:
    # In bf16 256 + 1 is 256 again; in fp32 the four ones survive until the end.
    parts = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 1.0, 1.0)]
    assert sum_in_rank_order(parts).item() == 260.0
