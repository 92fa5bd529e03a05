"""One row's norm and product in one kernel, in Triton's interpreter: the sum to the bit, the rest within its roundings."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from helpers.kernels.interpreted import InterpretedRank, needs_triton

from tightwire.comm.group.group import Group
from tightwire.kernels.spec.layer_ops import (
    NormForm,
    Rotation,
    RowProduct,
    SumNorms,
    add_rms_norm_reference,
    norm_linear_reference,
    rotate_and_cache_reference,
)

# Outputs, two a program; rows of one piece, and that end in a second and a third.
_SIZES = (20, 576), (6, 1100), (30, 40)
_MANY = ((4102, 40),)  # sixteen outputs a program
_DTYPES = torch.bfloat16, torch.float16, torch.float32


def _check(
    group: Group | None, sizes: Sequence[tuple[int, int]] = _SIZES, dtypes: Sequence[torch.dtype] = _DTYPES
) -> None:
    from tightwire.kernels.cuda.linear_row import norm_linear_row

    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    kinds = itertools.cycle([(True, None), (False, False), (True, True), (True, False), (False, None)])
    for dtype in dtypes:
        for (num_outputs, size), (adds, gelu) in zip(sizes, kinds, strict=False):
            sum_dtype = torch.float32 if gelu else dtype
            form = NormForm(0.5, 1.0 if gelu else 0.0, 0.5 if gelu is None else 1.0)
            residual, norm = drawn(1, size).to(sum_dtype), drawn(size).to(dtype)
            x = drawn(1, size).to(sum_dtype) if adds else None
            padded = drawn(num_outputs, size + 8).to(dtype)
            weight, bias = padded[:, :size], None if gelu else drawn(num_outputs).to(dtype)
            got, total = norm_linear_row(x, residual, norm, form, RowProduct(weight, bias, gelu))
            want, want_total = norm_linear_reference(x, residual, norm, form, RowProduct(weight, bias, gelu))
            assert torch.equal(total, want_total) and (total is residual) == (x is None)
            assert got.dtype == dtype and got.shape == want.shape
            # The float32 sums differ by their order: a unit for each of their numbers at most.
            normed = add_rms_norm_reference(
                want_total.double(), torch.zeros(1, size), SumNorms(norm.double(), form._replace(scale=1))
            )[0]
            products = weight.double() * normed
            error_O = (products.abs().sum(1) + (0 if bias is None else bias.abs())) * size * 2**-23
            exact_O = products.sum(1) + (0 if bias is None else bias.double())
            if gelu is not None:
                (gate_F, up_F), (gate_error_F, up_error_F) = exact_O.chunk(2), error_O.chunk(2)
                active = (
                    torch.nn.functional.gelu(gate_F, approximate="tanh") if gelu else torch.nn.functional.silu(gate_F)
                )
                exact_O = active * up_F
                error_O = 1.2 * gate_error_F * up_F.abs() + active.abs() * up_error_F + exact_O.abs() * 2**-20 + 1e-6
            error_O += exact_O.abs() * torch.finfo(dtype).eps
            assert bool(((got[0] - exact_O).abs() <= error_O).all()), f"{dtype} {num_outputs} {size} {gelu}"
            assert bool(((want[0] - exact_O).abs() <= error_O).all())


def _check_rotated(
    group: Group | None,
    dtypes: Sequence[torch.dtype] = _DTYPES,
    heads: Sequence[tuple[int, int, int, int]] = ((5, 1, 8, 4), (3, 2, 10, 3)),
) -> None:
    """In float32 what the rotation's own function makes of the product, to the bit; in 16 bits that, rounded once.

    ``heads``: of queries and of keys, their size, and the pairs of numbers that are rotated.
    """
    from tightwire.kernels.cuda.linear_row import norm_linear_row

    generator, form = torch.Generator().manual_seed(1), NormForm(0.5)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().float()

    for (queries, keys, head_dim, turned), slot in itertools.product(heads, (13, -1)):
        num_outputs = (queries + 2 * keys) * head_dim
        given = drawn(1, 40), drawn(40), drawn(num_outputs, 40), drawn(num_outputs)
        cos, sin = torch.randn(2, 1, turned, generator=generator)
        blocks = drawn(4, 2 * keys, 6, head_dim)  # of keys and of values
        slots, (want_keys, want_values) = torch.tensor([slot]).int(), blocks.clone().split(keys, 1)
        qkv, _ = norm_linear_row(None, *given[:2], form, RowProduct(*given[2:]))
        # Rows of padding, which the reference does not have, write nothing.
        apart = Rotation(cos, sin, want_keys, want_values, slots.clamp(min=0))
        want = rotate_and_cache_reference(qkv.view(1, -1, head_dim), apart).flatten(1)
        want_blocks = blocks if slot < 0 else torch.cat([want_keys, want_values], 1)
        for dtype in dtypes:
            residual, norm, weight, bias = (each.to(dtype) for each in given)
            caches = blocks.to(dtype, copy=True)
            rotation = Rotation(cos, sin, caches[:, :keys], caches[:, keys:], slots)
            got, _ = norm_linear_row(None, residual, norm, form, RowProduct(weight, bias, rotation=rotation))
            assert got.dtype == dtype and torch.equal(got, want.to(dtype)), f"{dtype} {queries} {slot}"
            assert torch.equal(caches, want_blocks.to(dtype)), f"{dtype} {queries} {slot}"


@needs_triton
@pytest.mark.parametrize(("sizes", "dtypes"), [(_SIZES, _DTYPES), (_MANY, _DTYPES[:1])])
def test_a_rows_norm_and_product_in_the_interpreter(
    sizes: Sequence[tuple[int, int]], dtypes: Sequence[torch.dtype], interpreted: InterpretedRank
) -> None:
    interpreted(_check, sizes, dtypes)


@needs_triton
def test_a_rows_rotated_product_in_the_interpreter(interpreted: InterpretedRank) -> None:
    interpreted(_check_rotated)


def test_more_rows_are_refused() -> None:
    from tightwire.kernels.layer_ops import norm_linear

    x, weight = torch.ones(2, 8), torch.ones(4, 8)
    with pytest.raises(ValueError, match="one row, and with gates an even number of outputs; got 2 and 4"):
        norm_linear(None, x, x[0], NormForm(1e-5), RowProduct(weight))
    with pytest.raises(ValueError, match="got 1 and 3"):
        norm_linear(None, x[:1], x[0], NormForm(1e-5), RowProduct(weight[:3], gelu=False))
    got, total = norm_linear(None, x[:1], x[0], NormForm(0.0), RowProduct(weight))
    assert torch.equal(got, torch.full((1, 4), 8.0)) and torch.equal(total, x[:1])
