"""The torch reference against float64 loops, the cache writer, and refused arguments."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.model.paged_batch import attend

from tightwire.kernels.attention import paged_attention
from tightwire.kernels.spec.attention import HeadGroups, KeyBias, paged_attention_reference, turned_bias

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("query_lens", [(5, 1, 17, 1), (40, 64, 33, 1), (1, 1, 1, 1)])
def test_reference_equals_a_loop_over_sequences(
    device: str, query_lens: tuple[int, ...], paged_batch: Callable[..., Any]
) -> None:
    batch = paged_batch(query_lens=query_lens, context_lens=(40, 64, 33, 1))
    q, *rest, scale = batch.arguments()
    want, bound = batch.expected()

    got = _reference(q.to(device), [tensor.to(device) for tensor in rest], scale).cpu()

    assert got.shape == want.shape
    assert ((got.double() - want).abs() <= bound).all()


@pytest.mark.parametrize("function", [paged_attention_reference, paged_attention])
@pytest.mark.parametrize("window", [0, 1, 20, 64, 100])
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_windows_and_caps(
    function: Callable[..., Any], window: int, cap: float, paged_batch: Callable[..., Any]
) -> None:
    batch = paged_batch(query_lens=(1, 1, 90, 33), context_lens=(200, 64, 300, 33), window=window, cap=cap)
    want, bound = batch.expected()
    got = attend(*batch.arguments(), function=function, window=window, cap=cap)
    assert ((got.double() - want).abs() <= bound).all()


@pytest.mark.parametrize(("first", "stop"), [(0, 5), (5, 9), (1, 2), (2, 8)])
def test_reference_of_heads_that_begin_and_end_inside_a_group(
    first: int, stop: int, paged_batch: Callable[..., Any]
) -> None:
    batch = paged_batch(query_lens=(5, 1, 17), context_lens=(40, 64, 33))
    arguments, groups = batch.part(first, stop)
    want, bound = batch.expected()

    got = attend(*arguments, groups=groups, function=paged_attention_reference)

    assert ((got.double() - want[:, first:stop]).abs() <= bound[:, first:stop]).all()


@pytest.mark.parametrize("bias", [0.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_caches_in_8_bits(dtype: torch.dtype, bias: float, paged_batch: Callable[..., Any]) -> None:
    """Kernel and reference compute attention to what the caches hold, and NaN that no sequence has written is not read."""
    for head_dim in (64, 24):
        lens = {"query_lens": (5, 1, 17, 1), "context_lens": (40, 164, 33, 1)}
        batch = paged_batch(dtype=dtype, head_dim=head_dim, **lens)
        arguments, key_bias = batch.in_8_bits(bias)
        want, bound = batch.expected()
        if dtype != torch.float32:
            bound = bound + batch.rounding_of_weights() + batch.rounding_of_keys()
            bound = bound + (want.abs() + bound) * torch.finfo(dtype).eps
        for function in (paged_attention, paged_attention_reference):
            got = attend(*arguments, function=function, key_bias=key_bias)
            assert ((got.double() - want).abs() <= bound).all()


def test_a_large_bias_of_keys_costs_no_accuracy(paged_batch: Callable[..., Any]) -> None:
    """Cached without it, keys have the steps that they have without a bias; with it, every code has its step."""
    lens = {"query_lens": (1,), "context_lens": (100,)}
    plain, biased, together = (paged_batch(**lens) for _ in range(3))
    errors = []
    for batch, bias in ((plain, 0.0), (biased, 100.0)):
        exact = [keys.clone() for keys in batch.keys]
        arguments, key_bias = batch.in_8_bits(bias)
        got = attend(*arguments, key_bias=key_bias)
        positions = torch.arange(100)
        batch.keys = [keys if key_bias is None else keys + turned_bias(key_bias, positions) for keys in exact]
        errors.append((got.double() - batch.expected()[0]).abs().mean())
    together.keys = biased.keys
    want, _ = together.expected()
    arguments, _ = together.in_8_bits()
    cached_with_it = (attend(*arguments).double() - want).abs().mean()
    assert errors[1] < 4 * errors[0] < cached_with_it


def _reference(q: torch.Tensor, rest: list[torch.Tensor], scale: float) -> torch.Tensor:
    k_cache, v_cache, start, lens, table = rest
    return attend(q, k_cache, v_cache, start, lens, table, scale, function=paged_attention_reference)


def _with(arguments: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*arguments[:index], value, *arguments[index + 1 :])


def test_attention_refuses_arguments_that_do_not_match(paged_batch: Callable[..., Any]) -> None:
    fits = paged_batch(query_lens=(3, 1), context_lens=(20, 9)).arguments()
    q, k_cache, _, start, _lens, table, _ = fits
    wrong = [
        (0, q[:, :, :32], "as many groups of query heads as KV heads"),
        (0, q[:, :8], "as many groups of query heads as KV heads"),
        (0, q.double(), "attention supports torch.float32, torch.bfloat16, torch.float16"),
        (1, k_cache.half(), "the same for both"),
        (1, k_cache.transpose(1, 2).contiguous().transpose(1, 2), "contiguous cache blocks"),
        (3, start.long(), "int32"),
        (3, start[:-1], "3 query starts"),
        (5, table.T.contiguous().T, "contiguous"),
        (3, torch.tensor([0, 2, 3], dtype=torch.int32), "query starts go from 0 to 3, but q has rows 0 to 4"),
        (3, torch.tensor([0, 5, 4], dtype=torch.int32), "sequence 1 has query rows 5 to 4 of 4"),
        (4, torch.tensor([2, 9], dtype=torch.int32), "the queries must be the context's last tokens"),
        (4, torch.tensor([20, 900], dtype=torch.int32), "sequence 1 .* context of 900 tokens"),
        (5, table + 1000, "sequence 0 .* blocks there are|need a block of the"),
        (5, table - 1000, "need a block of the"),
    ]
    for index, value, message in wrong:
        with pytest.raises(ValueError, match=message):
            attend(*_with(fits, index, value))
    for groups in (HeadGroups(3, 3), HeadGroups(3, 1), HeadGroups(4, -1), HeadGroups(5, 0)):
        with pytest.raises(ValueError, match="as many groups of query heads as KV heads"):
            attend(*fits, groups=groups)


def test_biases_of_keys_that_do_not_match_are_refused(paged_batch: Callable[..., Any]) -> None:
    batch = paged_batch(query_lens=(3, 1), context_lens=(20, 9))
    plain, (arguments, key_bias) = batch.arguments(), batch.in_8_bits(1.0)
    assert key_bias is not None
    bias, cos, sin = key_bias
    for given, wrong, message in (
        (plain, key_bias, "caches in torch.int8, got torch.float32"),
        (arguments, KeyBias(bias[:2], cos, sin), r"a bias of keys is \(3, 64\)"),
        (arguments, KeyBias(bias.double(), cos, sin), "contiguous float32"),
        (arguments, KeyBias(bias, cos[:, :0], sin[:, :0]), "32 or less"),
    ):
        with pytest.raises(ValueError, match=message):
            attend(*given, key_bias=wrong)


def test_attention_of_no_rows(paged_batch: Callable[..., Any]) -> None:
    q, k_cache, v_cache, start, lens, table, scale = paged_batch(query_lens=(1,), context_lens=(3,)).arguments()
    out = attend(q[:0], k_cache, v_cache, start[:1], lens[:0], table[:0], scale)
    assert out.shape == (0, *q.shape[1:])
