"""Sums in rank order, and bounds that are neither broken nor empty."""

import pytest
import torch

from tightwire.comm.summing import SUMMABLE, rank_order_bound, rounded_hops_bound, sum_in_rank_order


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
