import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.kernels.packed_blocks import common_blocks

from tightwire.kernels.layer_ops import swiglu
from tightwire.kernels.linear import gated_linear, linear
from tightwire.kernels.spec.gguf_blocks import PACKED_FORMATS, PackedFormat

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _assert_close(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """One rounding to the dtype, and at most D + 5 of float32 on the way, each of no more than all sizes summed."""
    added = 0.0 if bias is None else bias.double()
    want = x.double() @ weight.double().T + added
    sizes = x.double().abs() @ weight.double().abs().T + abs(added)
    bound = (x.shape[1] + 5) * torch.finfo(torch.float32).eps / 2 * sizes
    if got.dtype != torch.float32:
        # Half a unit in the last place; and below the smallest normal number units no longer shrink.
        bound = bound + torch.finfo(got.dtype).eps / 2 * (want.abs() + bound) + torch.finfo(got.dtype).tiny
    assert ((got.double() - want).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"), [(960, 576), (576, 1536), (100, 37), (65, 70), (40, 301), (3, 5), (1, 1)]
)
def test_within_rounding_of_float64(dtype: torch.dtype, with_bias: bool, num_outputs: int, num_inputs: int) -> None:
    weight = _random(num_outputs, num_inputs, dtype=dtype)
    bias = _random(num_outputs, dtype=dtype, seed=1) if with_bias else None
    for num_tokens in (1, 2, 3, 5, 30, 70):
        x = _random(num_tokens, num_inputs, dtype=dtype, seed=2)
        got = linear(x, weight, bias)
        assert got.shape == (num_tokens, num_outputs) and got.dtype == dtype
        _assert_close(got, x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_inputs", [576, 70, 37])
def test_a_row_does_not_depend_on_the_others_or_on_threads(
    dtype: torch.dtype, num_inputs: int, num_threads: Callable[[int], None]
) -> None:
    weight = _random(3000, num_inputs, dtype=dtype)
    x = _random(130, num_inputs, dtype=dtype, seed=1)
    num_threads(3)
    whole = linear(x, weight)
    num_threads(1)
    for first, last in [(0, 1), (129, 130), (3, 5), (10, 13), (60, 64), (1, 34), (0, 130)]:
        assert torch.equal(linear(x[first:last], weight), whole[first:last])


def test_torch_may_not_round_the_parts_of_a_gpus_sums() -> None:
    matmul = torch.backends.cuda.matmul
    assert not matmul.allow_bf16_reduced_precision_reduction and not matmul.allow_fp16_reduced_precision_reduction


def test_a_last_row_that_a_thread_prepares_alone_is_that_of_the_whole(num_threads: Callable[[int], None]) -> None:
    """The 257th row is the only one of its sixteen, and of its thread's share."""
    weight, x = _random(64, 4096, dtype=torch.bfloat16), _random(257, 4096, dtype=torch.bfloat16, seed=2)
    num_threads(2)
    _assert_close(linear(x, weight, None)[256:], x[256:], weight, None)


def test_a_split_of_the_outputs_changes_no_bit() -> None:
    weight = _random(200, 64, dtype=torch.bfloat16)
    x = _random(3, 64, dtype=torch.bfloat16, seed=1)
    parts = [linear(x, weight[first:last]) for first, last in ((0, 7), (7, 130), (130, 200))]
    assert torch.equal(torch.cat(parts, dim=1), linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_inputs", [1024, 6000])
def test_rows_too_wide_to_keep_a_block_of_weights_widened(dtype: torch.dtype, num_inputs: int) -> None:
    weight, x = _random(50, num_inputs, dtype=dtype), _random(100, num_inputs, dtype=dtype, seed=1)
    whole = linear(x, weight)
    _assert_close(whole, x, weight, None)
    for first, last in ((0, 1), (5, 9), (40, 99)):
        assert torch.equal(linear(x[first:last], weight), whole[first:last])


def test_views_are_read_without_a_copy() -> None:
    wide_x, wide_weight = _random(4, 100, dtype=torch.bfloat16), _random(80, 90, dtype=torch.bfloat16)
    x, weight = wide_x[:, 3:67], wide_weight[::2, 5:69]
    for rows in (x, x[:1].expand(70, -1)):
        assert torch.equal(linear(rows, weight), linear(rows.contiguous(), weight.contiguous()))


def test_nan_in_one_row_stays_there() -> None:
    x, weight = _random(5, 70, dtype=torch.bfloat16), _random(9, 70, dtype=torch.bfloat16)
    clean = linear(x, weight)
    x[2, 69] = float("nan")
    got = linear(x, weight)
    assert got[2].isnan().all()
    assert torch.equal(got[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 5, 70])
def test_no_outputs_and_no_inputs(dtype: torch.dtype, num_tokens: int) -> None:
    assert linear(torch.zeros(num_tokens, 8, dtype=dtype), torch.zeros(0, 8, dtype=dtype)).shape == (num_tokens, 0)
    x, weight, bias = _random(num_tokens, 0, dtype=dtype), _random(40, 0, dtype=dtype), _random(40, dtype=dtype)
    assert torch.equal(linear(x, weight, bias), bias.expand(num_tokens, -1))
    assert torch.equal(gated_linear(x, weight, bias, num_decode_rows=0), swiglu(bias.expand(num_tokens, -1)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows(dtype: torch.dtype) -> None:
    assert linear(torch.zeros(0, 8, dtype=dtype), torch.zeros(6, 8, dtype=dtype)).shape == (0, 6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [None, *PACKED_FORMATS.values()])
def test_linear_in_float32_is_the_same_sum_not_rounded(dtype: torch.dtype, packed: PackedFormat | None) -> None:
    x = _random(5, 256, dtype=dtype)
    weight = _random(70, 256, dtype=dtype, seed=1) if packed is None else common_blocks(packed, 70, 256)
    bias = _random(70, 1, dtype=dtype, seed=2)[:, 0].contiguous()
    for given in (None, bias):
        got = linear(x, weight, given, out_dtype=torch.float32)
        assert got.dtype == torch.float32
        assert torch.equal(got.to(dtype), linear(x, weight, given))
        if dtype != torch.float32:
            assert not torch.equal(got.to(dtype).float(), got)


def test_four_threads_may_call_at_once(num_threads: Callable[[int], None]) -> None:
    num_threads(2)
    weight = _random(4000, 576, dtype=torch.bfloat16)
    inputs = [_random(20, 576, dtype=torch.bfloat16, seed=seed) for seed in range(4)]
    want = [linear(x, weight) for x in inputs]
    with ThreadPoolExecutor(max_workers=4) as pool:
        for _ in range(5):
            got = list(pool.map(lambda x: linear(x, weight), inputs, timeout=240))
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("x", "weight", "bias", "message"),
    [
        (torch.zeros(2, 8), torch.zeros(3, 7), None, "got (2, 8), (3, 7) and None"),
        (torch.zeros(2, 8), torch.zeros(3, 8), torch.zeros(2), "got (2, 8), (3, 8) and (2,)"),
        (torch.zeros(2, 8), torch.zeros(3, 8).half(), None, "got torch.float32, torch.float16 and None"),
        (torch.zeros(2, 8), torch.zeros(3, 8), torch.zeros(3).half(), "and torch.float16"),
        (torch.zeros(2, 8).double(), torch.zeros(3, 8).double(), None, "torch.float16; got torch.float64"),
        (torch.zeros(8, 2).T, torch.zeros(3, 8), None, "contiguous rows"),
        (torch.zeros(2, 8), torch.zeros(3, 8, device="meta"), None, "on one device, got cpu and meta"),
    ],
)
def test_arguments_that_do_not_match_are_refused(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        linear(x, weight, bias)
