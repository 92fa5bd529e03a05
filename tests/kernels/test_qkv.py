"""Rotation with the cache's write: the reference bit for bit, on a CPU and, in Triton's interpreter, as on a GPU."""

import re
from collections.abc import Callable

import pytest
import torch
from helpers.kernels.interpreted import InterpretedRank, needs_triton
from torch import Tensor

from tightwire.comm.group.group import Group
from tightwire.kernels.qkv import rotate_and_cache
from tightwire.kernels.spec.layer_ops import rotate_and_cache_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
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


def _assert_the_references_bits(function: Callable[..., Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    qkv, cos, sin, caches, slots = _inputs(shape, dtype)
    got_caches, want_caches = caches(), caches()
    got = function(qkv, cos, sin, *got_caches, slots)
    want = rotate_and_cache_reference(qkv, cos, sin, *want_caches, slots)
    assert torch.equal(got, want), f"{shape} {dtype}"
    assert all(map(torch.equal, got_caches, want_caches)), f"{shape} {dtype}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_cpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    _assert_the_references_bits(rotate_and_cache, shape, dtype)


def _check_interpreted(group: Group) -> None:
    from tightwire.kernels.cuda import qkv as qkv_triton

    for shape in SHAPES:
        for dtype in DTYPES:
            _assert_the_references_bits(qkv_triton.rotate_and_cache, shape, dtype)


def _check_padding(group: Group) -> None:
    """A padding row's slot is negative: nothing is stored for it, and the others are what they would be without it."""
    from tightwire.kernels.cuda import qkv as qkv_triton

    qkv, cos, sin, caches, slots = _inputs((3, 9, 3, 64, 16), torch.bfloat16)
    got_caches, want_caches = caches(), caches()
    qkv_triton.rotate_and_cache(qkv, cos, sin, *got_caches, torch.where(torch.arange(3) == 1, -1, slots).int())
    kept = [0, 2]
    rotate_and_cache_reference(qkv[kept], cos[kept], sin[kept], *want_caches, slots[kept])
    assert all(map(torch.equal, got_caches, want_caches))


def _check_refusals(group: Group) -> None:
    from tightwire.kernels.cuda import qkv as qkv_triton

    qkv, cos, sin, caches, slots = _inputs((3, 9, 3, 64, 16), torch.bfloat16)
    k_cache, v_cache = caches()
    for arguments, message in (
        ((qkv[:, :6], cos, sin, k_cache, v_cache, slots), "needs qkv (T, H + 2 K, E)"),
        ((qkv, cos[:2], sin, k_cache, v_cache, slots), "needs cos and sin (3, 32) and slots (3,)"),
        ((qkv, cos, sin, k_cache, v_cache.half(), slots), "caches in one of"),
        ((qkv, cos, sin, k_cache, v_cache, slots.long()), "int32 slots"),
        (
            (qkv, cos, sin, k_cache, v_cache.transpose(1, 2).contiguous().transpose(1, 2), slots),
            "caches of the same layout",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            qkv_triton.rotate_and_cache(*arguments)
    nothing = qkv_triton.rotate_and_cache(qkv[:0], cos[:0], sin[:0], k_cache, v_cache, slots[:0])
    assert nothing.shape == (0, 9, 64)


@needs_triton
@pytest.mark.parametrize("check", [_check_interpreted, _check_padding, _check_refusals])
def test_in_the_interpreter(check: Callable[[Group], None], interpreted: InterpretedRank) -> None:
    interpreted(check)
