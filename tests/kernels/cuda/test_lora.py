"""The adapters' kernels for GPUs in Triton's interpreter, against their definition."""

import pytest
import torch
from helpers.kernels.interpreted import InterpretedRank, needs_triton

from tightwire.comm.group.group import Group
from tightwire.kernels.spec.lora import AdapterRows, AdapterSite, add_adapters_reference

pytestmark = needs_triton

_CASES = [(64, (64, 96, 128), (4, 16, 0)), (72, (70, 90), (17, 3, 8)), (33, (50,), (8, 5, 32))]


def _site(num_inputs: int, part_stops: tuple[int, ...], ranks: tuple[int, ...], dtype: torch.dtype) -> AdapterSite:
    generator = torch.Generator().manual_seed(sum(ranks))
    like = torch.empty(0, dtype=dtype)
    site = AdapterSite.empty(num_inputs, part_stops, 2, room=(len(ranks), max(ranks) + 1), like=like)
    for matrices in (site.a_NX, site.b_NX):
        matrices.fill_(torch.nan)  # whatever is not part of an adapter
    for slot, rank in enumerate(ranks):
        site.set_rank(slot, rank)
        for layer in range(2):
            site.a(slot, layer).copy_(torch.randn(site.a(slot, layer).shape, generator=generator) / 8)
            site.set_b(slot, layer, torch.randn(rank, part_stops[-1], generator=generator) / 8)
    return site


def _check(group: Group) -> None:
    from tightwire.kernels.cuda.lora import add_adapters

    slots = torch.tensor([0, 0, 2, 2, -1, 1, 1, 1, 1, -1, 0] * 2, dtype=torch.int32)
    for num_inputs, part_stops, ranks in _CASES:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            site = _site(num_inputs, part_stops, ranks, dtype)
            x = torch.randn(len(slots), num_inputs).to(dtype)
            for out_dtype in {dtype, torch.float32}:
                base = torch.randn(len(slots), part_stops[-1]).to(out_dtype)
                base[4, 0] = -0.0
                got, want = base.clone(), base.clone()
                add_adapters(got, x, site, 1, slots)
                add_adapters_reference(want, x, site, 1, AdapterRows.of(slots))
                eps = torch.finfo(out_dtype).eps + num_inputs * torch.finfo(torch.float32).eps
                assert torch.allclose(got, want, rtol=2 * eps, atol=8 * eps)
                unchanged = [row for row, slot in enumerate(slots.tolist()) if slot < 0 or not ranks[slot]]
                assert torch.equal(got[unchanged].view(torch.uint8), base[unchanged].view(torch.uint8))


def _check_refusals(group: Group) -> None:
    from tightwire.kernels.cuda.lora import add_adapters

    site = _site(64, (32,), (4,), torch.float32)
    slots = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"adapters need out \(2, 32\) and x \(2, 64\)"):
        add_adapters(torch.zeros(2, 33), torch.zeros(2, 64), site, 0, slots)
    with pytest.raises(ValueError, match="contiguous out and x"):
        add_adapters(torch.zeros(2, 64)[:, ::2], torch.zeros(2, 64), site, 0, slots)


def test_products(interpreted: InterpretedRank) -> None:
    interpreted(_check)


def test_arguments_that_do_not_match_are_refused(interpreted: InterpretedRank) -> None:
    interpreted(_check_refusals)
