"""Packed products for GPUs in Triton's interpreter, against float64 products of the weights."""

from collections.abc import Collection
from dataclasses import replace

import pytest
import torch
from helpers.kernels.interpreted import InterpretedRank, needs_triton
from helpers.kernels.packed_blocks import common_blocks, minima_of

from tightwire.comm.group.group import Group
from tightwire.kernels.spec.gguf_blocks import PACKED_FORMATS, Q4_1, Q8_0, PackedFormat
from tightwire.kernels.spec.packed import PackedMatrix, dequantize_reference, quantize

pytestmark = needs_triton


def _by_plane(weight: PackedMatrix) -> PackedMatrix:
    from tightwire.kernels.cuda.packed_blocks import order_by_plane

    return order_by_plane(replace(weight, blocks_OB=weight.blocks_OB.clone()))


def _check(group: Group, names: Collection[str]) -> None:
    from tightwire.kernels.cuda import linear_packed as products
    from tightwire.kernels.cuda.packed_blocks import layout_of

    linear_packed, few_outputs = products.linear_packed, products._FEW_OUTPUTS
    generator = torch.Generator().manual_seed(0)
    for packed in map(PACKED_FORMATS.__getitem__, names):
        for dtype, num_rows, num_outputs in ((torch.float32, 1, 33), (torch.bfloat16, 17, 5), (torch.float16, 2, 5)):
            depth = packed.block_elems
            if dtype == torch.bfloat16:  # more iterations than have their loads under way, and part of one
                layout = layout_of(packed, by_plane=False)
                depth += 4 * layout.num_pieces * layout.piece_elems
            x = torch.randn(num_rows, depth + 3, generator=generator).to(dtype)[:, :depth]
            weight = common_blocks(packed, num_outputs, depth)
            bias = torch.randn(num_outputs, generator=generator).to(dtype)
            numbers, minima = dequantize_reference(weight, torch.float32), minima_of(weight)
            product = linear_packed(x, weight, bias)
            _assert_close(product, x, numbers, minima, bias)
            assert torch.equal(linear_packed(x, _by_plane(weight), bias), product), packed.name
            if dtype == torch.bfloat16 and packed in (Q4_1, Q8_0):  # many outputs: programs have half the warps
                products._FEW_OUTPUTS = 0
                _assert_close(linear_packed(x, _by_plane(weight), bias), x, numbers, minima, bias)
                products._FEW_OUTPUTS = few_outputs
            if packed in (
                Q4_1,
                Q8_0,
            ):  # without a bias, and not rounded to the dtype: the same after each format's product
                _assert_close(linear_packed(x, weight, None), x, numbers, minima, None)
                unrounded = linear_packed(x, weight, None, torch.float32)
                assert unrounded.dtype == torch.float32
                _assert_close(unrounded, x, numbers, minima, None)


def _assert_close(
    got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, minima: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """One rounding to the dtype, and D + 2 of float32 on the way, each of no more than all sizes summed."""
    added = 0.0 if bias is None else bias.double()
    want = x.double() @ weight.double().T + added
    weight_sizes = (weight.double() - minima).abs() + minima.double().abs()
    sizes = x.double().abs() @ weight_sizes.T + abs(added)
    bound = (x.shape[1] + 2) * torch.finfo(torch.float32).eps / 2 * sizes
    bound = bound + torch.finfo(got.dtype).eps / 2 * (want.abs() + bound) + torch.finfo(got.dtype).tiny
    assert got.shape == want.shape and bool(((got.double() - want).abs() <= bound).all())


def _check_refusals(group: Group) -> None:
    from tightwire.kernels.cuda.linear_packed import linear_packed

    weight = quantize(torch.zeros(3, 64), Q4_1)
    assert linear_packed(torch.zeros(0, 64), weight, None).shape == (0, 3)
    with pytest.raises(ValueError, match=r"got \(2, 32\), \(3, 64\) and None"):
        linear_packed(torch.zeros(2, 32), weight, None)
    with pytest.raises(ValueError, match=r"and \(2,\)"):
        linear_packed(torch.zeros(2, 64), weight, torch.zeros(2))
    with pytest.raises(ValueError, match="got torch.float32, Q8_0 and torch.float16"):
        linear_packed(torch.zeros(2, 64), quantize(torch.zeros(3, 64), Q8_0), torch.zeros(3).half())


def _check_unpacked(group: Group) -> None:
    """The reference's bits; of an odd number of rows, of rows inside a matrix, and of none."""
    from tightwire.kernels.cuda.linear_packed import unpack_packed

    for packed in PACKED_FORMATS.values():
        weight = common_blocks(packed, 37, 2 * packed.block_elems)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for rows in ((0, 37), (3, 4), (2, 2)):
                numbers = dequantize_reference(weight.rows(*rows), dtype)
                for layout in (weight, _by_plane(weight)):
                    assert torch.equal(unpack_packed(layout.rows(*rows), dtype), numbers), packed.name


@pytest.mark.parametrize("packed", PACKED_FORMATS.values(), ids=lambda packed: packed.name)
def test_a_row_by_plane_has_its_planes_in_one_piece_each_and_then_its_scales(
    packed: PackedFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tightwire.kernels.cuda import packed_blocks

    weight, count = common_blocks(packed, 9, 3 * packed.block_elems), packed.block_bytes
    kept = weight.blocks_OB.clone()
    monkeypatch.setattr(packed_blocks, "_ROWS_MOVED", 4)
    ordered = packed_blocks.order_by_plane(weight)
    assert ordered.by_plane and ordered.blocks_OB is weight.blocks_OB and ordered.shape == (9, 3 * packed.block_elems)
    planes = packed.codes.planes(packed.block_elems)
    codes = [byte for plane in planes for byte in plane]
    order = [*map(list, planes), [byte for byte in range(count) if byte not in codes]]
    assert sum(map(len, order)) == count and len(codes) == packed.block_elems * packed.bits // 8
    want = torch.cat([kept[:, [block * count + byte for block in range(3) for byte in piece]] for piece in order], 1)
    assert torch.equal(ordered.blocks_OB, want)
    with pytest.raises(AssertionError):
        packed_blocks.order_by_plane(ordered)
    assert (
        torch.equal(ordered.take(torch.tensor([7, 0])).blocks_OB, want[[7, 0]])
        and ordered.take(torch.tensor([1])).by_plane
    )


def test_products(interpreted: InterpretedRank) -> None:
    interpreted(_check, [*PACKED_FORMATS])


def test_unpacked_numbers(interpreted: InterpretedRank) -> None:
    interpreted(_check_unpacked)


def test_arguments_that_do_not_match_are_refused(interpreted: InterpretedRank) -> None:
    interpreted(_check_refusals)
