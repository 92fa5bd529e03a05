"""Norms and SwiGLU within their roundings; rotation with the cache's write to the bit, on a CPU and as on a GPU."""

import re
from collections.abc import Callable

import pytest
import torch
from helpers.kernels.interpreted import InterpretedRank, needs_triton
from torch import Tensor

from tightwire.comm.group.group import Group
from tightwire.kernels.layer_ops import add_rms_norm, rms_norm, rotate_and_cache, swiglu
from tightwire.kernels.spec.int8_heads import cache_width
from tightwire.kernels.spec.layer_ops import (
    HeadNorms,
    NormForm,
    Rotation,
    SumNorms,
    add_rms_norm_reference,
    rms_norm_reference,
    rotate_and_cache_reference,
    swiglu_reference,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _assert_norm_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal except for the order of one sum over D, which moves the float32 scale by some roundings.

    That may change how the result is rounded.
    """
    eps32, eps = torch.finfo(torch.float32).eps, torch.finfo(want.dtype).eps
    bound = want.float().abs() * (8 * eps32 + (eps if want.dtype != torch.float32 else 0.0))
    assert ((got.float() - want.float()).abs() <= bound).all()
    if want.dtype != torch.float32:
        assert (got == want).float().mean() > 0.99  # a rounding tips over seldom


@pytest.mark.parametrize("wide", [False, True], ids=["", "float32 rows"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 576), (3, 16), (5, 37), (2, 7), (700, 576)])
def test_norm_matches_the_reference(dtype: torch.dtype, num_tokens: int, size: int, wide: bool) -> None:
    x = torch.randn(num_tokens, size, generator=torch.Generator().manual_seed(0)).to(torch.float32 if wide else dtype)
    weight = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype)
    residual = x.flip(0) * 3

    _assert_norm_close(rms_norm(x, weight, NormForm(1e-5)), rms_norm_reference(x, weight, NormForm(1e-5)))
    normed, total = add_rms_norm(x, residual, SumNorms(weight, NormForm(1e-5)))
    want_normed, want_total = add_rms_norm_reference(x, residual, SumNorms(weight, NormForm(1e-5)))
    assert torch.equal(total, want_total) and total.dtype == x.dtype and normed.dtype == dtype
    _assert_norm_close(normed, want_normed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_a_row_does_not_depend_on_the_others(dtype: torch.dtype, num_threads: Callable[[int], None]) -> None:
    x = torch.randn(700, 576).to(dtype)
    weight = torch.randn(576).to(dtype)
    num_threads(2)
    whole = rms_norm(x, weight, NormForm(1e-6))
    num_threads(1)
    for row in (0, 1, 350, 699):
        assert torch.equal(rms_norm(x[row : row + 1], weight, NormForm(1e-6))[0], whole[row])


def test_norm_a_view_is_read_without_a_copy_and_not_changed() -> None:
    wide = torch.randn(4, 100)
    before = wide.clone()
    x = wide[:, 10:60]
    weight = torch.ones(50)
    assert torch.equal(rms_norm(x, weight, NormForm(1e-5)), rms_norm(x.contiguous(), weight, NormForm(1e-5)))
    assert torch.equal(add_rms_norm(x, x, SumNorms(weight, NormForm(1e-5)))[1], x * 2)
    assert torch.equal(wide, before)


def test_norm_no_rows() -> None:
    assert rms_norm(torch.zeros(0, 8), torch.ones(8), NormForm(1e-5)).shape == (0, 8)


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.zeros(2, 8), torch.ones(7), "weight (D,); got (2, 8), (2, 8) and (7,)"),
        (torch.zeros(8, 2).T, torch.ones(8), "contiguous rows"),
        (
            torch.zeros(2, 8, dtype=torch.float64),
            torch.ones(8, dtype=torch.float64),
            "got torch.float64, torch.float64 and torch.float64",
        ),
        (torch.zeros(2, 8).half(), torch.ones(8), "got torch.float32, torch.float16 and torch.float16"),
    ],
)
def test_norm_arguments_that_do_not_match_are_refused(x: torch.Tensor, weight: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        rms_norm(x, weight, NormForm(1e-5))


def _assert_swiglu_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Within some roundings of float32, which in 16 bits seldom change the rounding of the product."""
    eps32, eps = torch.finfo(torch.float32).eps, torch.finfo(want.dtype).eps
    bound = want.float().abs() * (8 * eps32 + (eps if want.dtype != torch.float32 else 0.0)) + 1e-35
    assert ((got.float() - want.float()).abs() <= bound).all()
    if want.dtype != torch.float32:
        assert (got == want).float().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 1536), (3, 16), (5, 37), (2, 7), (200, 1536)])
def test_swiglu_matches_the_reference(dtype: torch.dtype, num_tokens: int, width: int) -> None:
    gate_up = (torch.randn(num_tokens, 2 * width, generator=torch.Generator().manual_seed(0)) * 5).to(dtype)
    _assert_swiglu_close(swiglu(gate_up), swiglu_reference(gate_up))
    half = gate_up[:, : width // 2 * 2]
    _assert_swiglu_close(swiglu(half), swiglu_reference(half))


def test_swiglu_gates_of_all_float32_magnitudes() -> None:
    gates = torch.tensor([0.0, -0.0, 1e-40, 20.0, 80.0, 88.0, 89.0, 1e30, -20.0, -80.0, -88.0, -89.0, -1e30])
    gate_up = torch.cat((gates, torch.ones_like(gates)))[None]
    _assert_swiglu_close(swiglu(gate_up), swiglu_reference(gate_up))
    assert swiglu(torch.tensor([[float("inf"), 2.0]])).item() == float("inf")


def test_swiglu_nan_stays_nan() -> None:
    assert swiglu(torch.tensor([[float("nan"), 1.0]])).isnan().all()


def test_swiglu_a_row_does_not_depend_on_the_others(num_threads: Callable[[int], None]) -> None:
    gate_up = torch.randn(300, 3072).bfloat16()
    num_threads(2)
    whole = swiglu(gate_up)
    num_threads(1)
    for row in (0, 150, 299):
        assert torch.equal(swiglu(gate_up[row : row + 1])[0], whole[row])


@pytest.mark.parametrize(
    ("gate_up", "message"),
    [
        (torch.zeros(2, 7), "swiglu needs (T, 2F)"),
        (torch.zeros(8, 2).T, "contiguous rows"),
        (torch.zeros(2, 8, dtype=torch.float64), "torch.float16; got (2, 8) torch.float64"),
    ],
)
def test_swiglu_arguments_that_do_not_match_are_refused(gate_up: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        swiglu(gate_up)


SHAPES = [(1, 1, 1, 8, 16), (3, 9, 3, 64, 16), (5, 8, 1, 80, 32), (2, 32, 8, 128, 16), (17, 6, 2, 10, 8)]


def _inputs(
    shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Callable[[], tuple[Tensor, Tensor]], Tensor]:
    """qkv as a view, cosines and sines, makers of empty caches, and slots in no order."""
    num_tokens, num_heads, num_kv_heads, head_dim, tokens_per_block = shape
    generator = torch.Generator().manual_seed(num_tokens)
    wide = torch.randn(num_tokens, num_heads + 2 * num_kv_heads + 1, head_dim, generator=generator).to(dtype)
    angles = torch.randn(num_tokens, head_dim // 2, generator=generator) * 100
    slots = torch.randperm(8 * tokens_per_block, generator=generator)[:num_tokens].int()
    cache = torch.full((8, num_kv_heads, tokens_per_block, head_dim), -7.0, dtype=dtype)
    return wide[:, 1:], angles.cos(), angles.sin(), lambda: (cache.clone(), cache.clone()), slots


def _assert_the_references_bits(
    function: Callable[..., Tensor], shape: tuple[int, ...], dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> None:
    """Caches of another dtype hold what qkv's dtype does, rounded; in 8 bits a head with NaN, infinity or zeros too."""
    qkv, cos, sin, caches, slots = _inputs(shape, dtype)
    got_caches, want_caches = caches(), caches()
    if kv_dtype is not None:
        empty = torch.zeros(*got_caches[0].shape[:3], cache_width(qkv.shape[2], kv_dtype), dtype=kv_dtype)
        got_caches, want_caches = (empty.clone(), empty.clone()), (empty.clone(), empty.clone())
        if len(qkv) > 2:
            qkv[0, -1, 0], qkv[1, -1, -1], qkv[2, -1] = torch.nan, -torch.inf, 0.0
    want = rotate_and_cache_reference(qkv.clone(), Rotation(cos, sin, *want_caches, slots))
    got = function(qkv.clone(), Rotation(cos, sin, *got_caches, slots))
    assert torch.equal(got, want), f"{shape} {dtype}"
    for mine, other in zip(got_caches, want_caches, strict=True):
        assert torch.equal(mine.nan_to_num(), other.nan_to_num()), f"{shape} {dtype} {kv_dtype}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rotation_on_a_cpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    _assert_the_references_bits(rotate_and_cache, shape, dtype)


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_caches_of_another_dtype_on_a_cpu(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    for shape in SHAPES:
        _assert_the_references_bits(rotate_and_cache, shape, dtype, kv_dtype)


def _check_other_caches(group: Group) -> None:
    from tightwire.kernels.cuda import layer_ops as triton_ops

    for dtype in DTYPES:
        for kv_dtype in (torch.int8, torch.float32, torch.bfloat16):
            _assert_the_references_bits(triton_ops.rotate_and_cache, SHAPES[0], dtype, kv_dtype)


def _check_interpreted(group: Group) -> None:
    from tightwire.kernels.cuda import layer_ops as triton_ops

    for shape in SHAPES:
        for dtype in DTYPES:
            _assert_the_references_bits(triton_ops.rotate_and_cache, shape, dtype)


def _norm_of_heads(shape: tuple[int, ...], dtype: torch.dtype, whole: bool, given: bool) -> HeadNorms:
    num_tokens, num_heads, num_kv_heads, head_dim, _ = shape
    generator = torch.Generator().manual_seed(1)
    sizes = [head_dim * (count if whole else 1) for count in (num_heads, num_kv_heads)]
    q_norm, k_norm = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    squares = torch.rand(num_tokens, 2, generator=generator) + 0.5 if given else None
    return HeadNorms(q_norm, k_norm, NormForm(1e-6, offset=1.0), whole, squares)


def _assert_close_with_norms(function: Callable[..., Tensor], whole: bool, given: bool) -> None:
    """The order of sums may change how a number rounds, before and after it is rotated."""
    for shape in SHAPES:
        for dtype in DTYPES:
            qkv, cos, sin, caches, slots = _inputs(shape, dtype)
            norms = _norm_of_heads(shape, dtype, whole, given)
            got_caches, want_caches = caches(), caches()
            want = rotate_and_cache_reference(qkv, Rotation(cos, sin, *want_caches, slots), norms)
            got = function(qkv.clone(), Rotation(cos, sin, *got_caches, slots), norms)
            unit = torch.finfo(dtype).eps * (8 if dtype == torch.float32 else 2)
            for mine, other in zip((got, *got_caches), (want, *want_caches), strict=True):
                assert ((mine.float() - other.float()).abs() <= unit * other.float().abs().max()).all()


_NORMS = [(False, False), (True, False), (True, True)]


@pytest.mark.parametrize(("whole", "given"), _NORMS)
def test_norms_of_heads_on_a_cpu(whole: bool, given: bool) -> None:
    _assert_close_with_norms(rotate_and_cache, whole, given)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_of_each_head_is_rotated(dtype: torch.dtype) -> None:
    _assert_a_part_is_rotated(rotate_and_cache, dtype)


def _assert_a_part_is_rotated(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    for shape, turned in (((3, 9, 3, 64, 16), 24), ((5, 8, 1, 80, 32), 1)):
        qkv, cos, sin, caches, slots = _inputs(shape, dtype)
        cos, sin, got_caches, want_caches = cos[:, :turned], sin[:, :turned], caches(), caches()
        got = function(qkv, Rotation(cos, sin, *got_caches, slots))
        assert torch.equal(got, rotate_and_cache_reference(qkv, Rotation(cos, sin, *want_caches, slots)))
        assert torch.equal(got[..., 2 * turned :], qkv[:, : got.shape[1], 2 * turned :])
        assert all(map(torch.equal, got_caches, want_caches))


def _check_forms_interpreted(group: Group) -> None:
    from tightwire.kernels.cuda import layer_ops as triton_ops

    for whole, given in _NORMS:
        _assert_close_with_norms(triton_ops.rotate_and_cache, whole, given)
    for dtype in DTYPES:
        _assert_a_part_is_rotated(triton_ops.rotate_and_cache, dtype)
        _assert_norm_forms(triton_ops.add_rms_norm, dtype)
        _assert_geglu(triton_ops.swiglu, dtype)


@needs_triton
def test_forms_of_families_in_the_interpreter(interpreted: InterpretedRank) -> None:
    interpreted(_check_forms_interpreted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_forms_of_families_on_a_cpu(dtype: torch.dtype) -> None:
    _assert_norm_forms(add_rms_norm, dtype)
    _assert_geglu(swiglu, dtype)


def _assert_geglu(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    """Near x sigmoid(2 y) in float64, which is x (1 + tanh y) / 2: that loses digits of negative gates."""
    gate_up = (torch.randn(5, 300, generator=torch.Generator().manual_seed(2)) * 3).to(dtype)
    got, x = function(gate_up, gelu=True), gate_up[:, :150].double()
    want = x * torch.sigmoid((8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)) * gate_up[:, 150:].double()
    unit = 128 * torch.finfo(torch.float32).eps + (torch.finfo(dtype).eps if dtype != torch.float32 else 0)
    smallest = 1e-35 + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((got.double() - want).abs() <= unit * want.abs() + smallest).all()
    assert torch.allclose(swiglu_reference(gate_up, gelu=True).double(), want, atol=1e-4, rtol=unit)


def _assert_norm_forms(function: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype) -> None:
    """Norms of what is added, factors of it, weights less 1, and sums that are not normalized."""
    generator = torch.Generator().manual_seed(3)
    x, residual = torch.randn(2, 5, 100, generator=generator)
    weight, x_weight = torch.randn(2, 100, generator=generator).to(dtype)
    form = NormForm(1e-6, offset=1.0, scale=0.25)
    for own, of_x in ((weight, x_weight), (weight, None), (None, x_weight), (None, None)):
        got = function(x, residual, SumNorms(own, form, of_x, dtype))
        want = add_rms_norm_reference(x, residual, SumNorms(own, form, of_x, dtype))
        for mine, other in zip(got, want, strict=True):
            assert mine.dtype == other.dtype
            unit = 2 * torch.finfo(mine.dtype).eps
            assert ((mine.float() - other.float()).abs() <= unit * (1 + other.float().abs()) * 4).all()


def _check_padding(group: Group) -> None:
    """A padding row's slot is negative: nothing is stored for it, and the others are what they would be without it."""
    from tightwire.kernels.cuda import layer_ops as triton_ops

    qkv, cos, sin, caches, slots = _inputs((3, 9, 3, 64, 16), torch.bfloat16)
    got_caches, want_caches = caches(), caches()
    padded = torch.where(torch.arange(3) == 1, -1, slots).int()
    triton_ops.rotate_and_cache(qkv, Rotation(cos, sin, *got_caches, padded))
    kept = [0, 2]
    rotate_and_cache_reference(qkv[kept], Rotation(cos[kept], sin[kept], *want_caches, slots[kept]))
    assert all(map(torch.equal, got_caches, want_caches))


def test_tensors_that_do_not_match_are_refused() -> None:
    qkv, cos, sin, caches, slots = _inputs((3, 9, 3, 64, 16), torch.bfloat16)
    k_cache, v_cache = caches()
    for arguments, message in (
        ((qkv[:, :6], cos, sin, k_cache, v_cache, slots), "needs qkv (T, H + 2 K, E)"),
        ((qkv, cos[:2], sin, k_cache, v_cache, slots), "; cos (2, 32) torch.float32"),
        ((qkv, cos.double(), sin, k_cache, v_cache, slots), "; cos (3, 32) torch.float64"),
        ((qkv, cos, sin, k_cache, v_cache.half(), slots), f"v_cache {tuple(v_cache.shape)} torch.float16"),
        ((qkv, cos, sin, k_cache, v_cache, slots.long()), "slots (3,) torch.int64"),
        (
            (qkv, cos, sin, k_cache, v_cache.transpose(1, 2).contiguous().transpose(1, 2), slots),
            "of one layout",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            rotate_and_cache(arguments[0], Rotation(*arguments[1:]))


def _assert_nothing_is_rotated(function: Callable[..., Tensor]) -> None:
    qkv, cos, sin, caches, slots = _inputs((3, 9, 3, 64, 16), torch.bfloat16)
    assert function(qkv[:0], Rotation(cos[:0], sin[:0], *caches(), slots[:0])).shape == (0, 9, 64)


def test_no_tokens_on_a_cpu() -> None:
    _assert_nothing_is_rotated(rotate_and_cache)


def _check_no_tokens(group: Group) -> None:
    from tightwire.kernels.cuda import layer_ops as triton_ops

    _assert_nothing_is_rotated(triton_ops.rotate_and_cache)


def test_norms_of_heads_that_do_not_match_are_refused() -> None:
    shape = (3, 9, 3, 64, 16)
    qkv, cos, sin, caches, slots = _inputs(shape, torch.bfloat16)
    norms = _norm_of_heads(shape, torch.bfloat16, whole=True, given=True)
    assert norms.mean_squares_T2 is not None
    for wrong, message in (
        (norms._replace(whole=False), "need contiguous weights of 64 and 64 numbers in torch.bfloat16; got (576,)"),
        (norms._replace(k_norm=norms.k_norm.float()), "and (192,) torch.float32"),
        (norms._replace(mean_squares_T2=norms.mean_squares_T2[:2]), "mean squares must be (3, 2) float32"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            rotate_and_cache(qkv, Rotation(cos, sin, *caches(), slots), wrong)


@pytest.mark.parametrize(
    ("x", "residual", "norms", "message"),
    [
        (
            torch.zeros(4, 8),
            torch.zeros(1, 8),
            SumNorms(None, NormForm(1e-5), None, torch.float32),
            "got (4, 8), (1, 8)",
        ),
        (
            torch.zeros(4, 8),
            torch.zeros(4, 16)[:, ::2],
            SumNorms(None, NormForm(1e-5), None, torch.float32),
            "contiguous rows",
        ),
        (
            torch.zeros(4, 8).half(),
            torch.zeros(4, 8).half(),
            SumNorms(None, NormForm(1e-5), None, torch.float32),
            "in that dtype or in torch.float32; got torch.float32, torch.float16",
        ),
        (torch.zeros(4, 8), None, SumNorms(torch.ones(8), NormForm(1e-5), torch.ones(8)), "x_weight needs a residual"),
    ],
)
def test_sums_that_do_not_match_are_refused_with_any_norms(
    x: torch.Tensor, residual: torch.Tensor | None, norms: SumNorms, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        add_rms_norm(x, residual, norms)


def test_norm_weights_of_two_dtypes_are_refused() -> None:
    x, half, single = torch.zeros(2, 8), torch.ones(8).half(), torch.ones(8)
    for weight, x_weight, dtype in ((half, single, None), (None, half, torch.float32)):
        with pytest.raises(ValueError, match="weights of one dtype, got"):
            add_rms_norm(x, x, SumNorms(weight, NormForm(1e-5), x_weight, dtype))


@pytest.mark.parametrize("slot", [-1, 128])
def test_a_slot_outside_the_cache_is_refused_on_a_cpu(slot: int) -> None:
    qkv, cos, sin, caches, slots = _inputs((3, 9, 3, 64, 16), torch.bfloat16)
    slots[1] = slot
    got, untouched = caches(), caches()
    with pytest.raises(ValueError, match="the cache has slots 0 to 127"):
        rotate_and_cache(qkv, Rotation(cos, sin, *got, slots))
    assert all(map(torch.equal, got, untouched))


def test_rotation_turns_pairs_half_a_head_apart() -> None:
    qkv = torch.zeros(1, 3, 8)
    qkv[0, 0, 1] = 1.0
    angle = torch.full((1, 4), 0.3)
    k_cache, v_cache = torch.zeros(2, 1, 1, 16, 8)
    rotation = Rotation(angle.cos(), angle.sin(), k_cache, v_cache, torch.zeros(1, dtype=torch.int32))
    got = rotate_and_cache(qkv, rotation)[0, 0]
    assert got.nonzero().flatten().tolist() == [1, 5]
    assert got[1] == angle[0, 1].cos() and got[5] == angle[0, 1].sin()


@needs_triton
@pytest.mark.parametrize("check", [_check_interpreted, _check_other_caches, _check_padding, _check_no_tokens])
def test_rotation_in_the_interpreter(check: Callable[[Group], None], interpreted: InterpretedRank) -> None:
    interpreted(check)


def test_rows_without_numbers_are_empty() -> None:
    x_TD = torch.zeros(2, 0)
    assert rms_norm(x_TD, torch.zeros(0), NormForm(1e-5)).shape == swiglu(x_TD).shape == (2, 0)
