"""Adapters on the CPU against their definition: mixed rows, parts, ranks and dtypes; a row's bits do not depend on others."""

import pytest
import torch
from torch import Tensor

from tightwire.kernels.lora import add_adapters
from tightwire.kernels.spec.lora import AdapterRows, AdapterSite, add_adapters_reference, find_runs

_DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_site(
    num_inputs: int, part_stops: tuple[int, ...], ranks: tuple[int, ...], dtype: torch.dtype, num_layers: int = 2
) -> AdapterSite:
    generator = torch.Generator().manual_seed(sum(ranks))
    like = torch.empty(0, dtype=dtype)
    site = AdapterSite.empty(num_inputs, part_stops, num_layers, room=(len(ranks), max(ranks) + 1), like=like)
    for matrices in (site.a_NX, site.b_NX):
        matrices.copy_(torch.randn(matrices.shape, generator=generator) / 8)
    for slot, rank in enumerate(ranks):
        site.set_rank(slot, rank)
    return site


def _exact(out: Tensor, x: Tensor, site: AdapterSite, layer: int, slots: list[int]) -> tuple[Tensor, Tensor]:
    """The sum in float64, and the sizes of what is summed."""
    total, sizes = out.double(), out.double().abs()
    for row, slot in enumerate(slots):
        if slot < 0 or not (rank := site.ranks[slot]):
            continue
        a_PD, b_RO = site.a(slot, layer).double(), site.b(slot, layer).double()
        for part, columns in enumerate(site.parts):
            own = a_PD[part * rank : (part + 1) * rank]
            total[row, columns] += own @ x[row].double() @ b_RO[:, columns]
            sizes[row, columns] += own.abs() @ x[row].double().abs() @ b_RO[:, columns].abs()
    return total, sizes


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize(
    ("num_inputs", "part_stops", "ranks"),
    [
        (64, (64, 96, 128), (4, 16, 0)),
        (72, (72, 96, 120), (1, 3, 8)),
        (33, (50,), (8, 5, 32)),
        (160, (130, 260), (2, 7, 0)),
    ],
)
def test_products(num_inputs: int, part_stops: tuple[int, ...], ranks: tuple[int, ...], dtype: torch.dtype) -> None:
    site = make_site(num_inputs, part_stops, ranks, dtype)
    slots = [0, 0, 2, 2, 2, 2, 2, -1, 1, 1, 1, 1, 1, 1, -1, 0]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(len(slots), num_inputs, generator=generator).to(dtype)
    rows = AdapterRows.of(torch.tensor(slots, dtype=torch.int32))
    for out_dtype in {dtype, torch.float32}:
        base = torch.randn(len(slots), part_stops[-1], generator=generator).to(out_dtype)
        total, sizes = _exact(base, x, site, 1, slots)
        got = {}
        for name, function in (("kernel", add_adapters), ("reference", add_adapters_reference)):
            got[name] = base.clone()
            function(got[name], x, site, 1, rows)
            eps = torch.finfo(torch.float32).eps
            bound = (num_inputs + max(ranks) + 4) * eps * sizes
            bound += torch.finfo(out_dtype).eps / 2 * (total.abs() + bound) + torch.finfo(out_dtype).tiny
            assert ((got[name].double() - total).abs() <= bound).all(), name
        for row, slot in enumerate(slots):
            alone = base[row : row + 1].clone()
            add_adapters(alone, x[row : row + 1], site, 1, AdapterRows.of(torch.tensor([slot], dtype=torch.int32)))
            assert torch.equal(alone[0], got["kernel"][row])
            if slot < 0 or not ranks[slot]:
                assert torch.equal(alone[0], base[row])


def test_many_rows_on_several_threads_have_the_bits_of_one() -> None:
    site = make_site(576, (576, 768, 960), (16,), torch.bfloat16)
    x, out = torch.randn(700, 576).bfloat16(), torch.randn(700, 960).bfloat16()
    rows = AdapterRows.of(torch.zeros(700, dtype=torch.int32))
    results = []
    for num_threads in (1, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        results.append(out.clone())
        add_adapters(results[-1], x, site, 0, rows)
        torch.set_num_threads(before)
    assert torch.equal(*results) and not torch.equal(results[0], out)


def test_b_lies_in_panels_of_64_outputs() -> None:
    site, rank = make_site(64, (130, 260), (3, 5), torch.bfloat16), 5
    before, b_RO = site.b_NX.clone(), torch.randn(rank, 260)
    site.set_b(1, 1, b_RO)
    stored_RO = b_RO.bfloat16()
    assert torch.equal(site.b(1, 1), stored_RO)
    panels = [stored_RO[:, first : first + 64].flatten() for first in range(0, 260, 64)]
    own = slice(rank * 260, 2 * rank * 260)
    assert torch.equal(site.b_NX[1, own], torch.cat(panels))
    before[1, own] = site.b_NX[1, own]
    assert torch.equal(site.b_NX, before)


def test_runs() -> None:
    assert find_runs(torch.tensor([3, 3, -1, 0, 3], dtype=torch.int32)).tolist() == [[0, 2, 3], [3, 1, 0], [4, 1, 3]]
    assert find_runs(torch.tensor([-1, -1], dtype=torch.int32)).tolist() == []


def test_tensors_that_do_not_match_are_refused() -> None:
    site = make_site(64, (32,), (4,), torch.bfloat16)
    rows = AdapterRows.of(torch.zeros(2, dtype=torch.int32))
    x, out = torch.zeros(2, 64).bfloat16(), torch.zeros(2, 32).bfloat16()
    with pytest.raises(ValueError, match=r"adapters need out \(2, 32\) and x \(2, 64\) in torch.bfloat16"):
        add_adapters(out[:1], x, site, 0, rows)
    with pytest.raises(ValueError, match="got .* torch.float16"):
        add_adapters(out, x.half(), site, 0, rows)
    with pytest.raises(ValueError, match="contiguous out and x; got strides"):
        add_adapters(torch.zeros(2, 64).bfloat16()[:, ::2], x, site, 0, rows)
    for layer in (-1, site.num_layers):
        with pytest.raises(ValueError, match=f"adapters of layer {layer}; there are layers 0 to {site.num_layers - 1}"):
            add_adapters(out, x, site, layer, rows)
