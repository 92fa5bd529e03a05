"""The CPU kernels give the reference's bytes for all formats, numbers, counts and addresses."""

import re
from collections.abc import Callable
from itertools import product

import pytest
import torch
from helpers.kernels.block_data import NUMBERS, all_formats, format_id, hard_numbers
from hypothesis import given, settings
from hypothesis import strategies as st

from tightwire.kernels import block_quant
from tightwire.kernels.spec import block_quant as reference
from tightwire.kernels.spec.block_format import BlockFormat

FORMATS = pytest.mark.parametrize("fmt", all_formats(), ids=format_id)
_GUARD = 0xA5


def _same(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(), want.nan_to_num())


def _guarded(num_bytes: int, before: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory and a part of it, ``before`` bytes after an aligned address and before as many."""
    memory = torch.full((num_bytes + 2 * before,), _GUARD, dtype=torch.uint8)
    return memory, memory[before : before + num_bytes]


def _check(x_N: torch.Tensor, fmt: BlockFormat, before: int = 2) -> None:
    """All four functions against the reference, between guards and at an address that is merely even."""
    num_elems = x_N.numel()
    want = reference.encode_reference(x_N, fmt)
    memory, buf = _guarded(len(want), before)
    assert block_quant.encode(x_N, fmt, buf) is buf
    assert torch.equal(buf, want)
    assert (memory[:before] == _GUARD).all()
    assert (memory[before + len(want) :] == _GUARD).all()

    out = torch.full((num_elems + 2,), 0.5, dtype=x_N.dtype)
    block_quant.decode(buf, fmt, num_elems, x_N.dtype, out[1:-1])
    assert _same(out[1:-1], reference.decode_reference(want, fmt, num_elems, x_N.dtype))
    assert out[[0, -1]].tolist() == [0.5, 0.5]

    sums, want_sums = torch.linspace(-3, 3, num_elems), torch.linspace(-3, 3, num_elems)
    block_quant.decode_add(buf, fmt, sums)
    reference.decode_add_reference(want, fmt, want_sums)
    assert _same(sums, want_sums)


@FORMATS
@pytest.mark.parametrize("dtype", NUMBERS)
def test_hard_numbers(fmt: BlockFormat, dtype: torch.dtype) -> None:
    _check(hard_numbers(dtype), fmt)


@FORMATS
def test_any_count(fmt: BlockFormat) -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    for num_elems, dtype in zip((0, 1, 7, 31, 32, 33, 63, 65, 127, 128, 129, 4096), NUMBERS * 4, strict=True):
        _check(x[:num_elems].to(dtype), fmt, before=2 + 4 * (num_elems % 3))


@FORMATS
def test_sums_of_messages_encoded_again(fmt: BlockFormat) -> None:
    generator = torch.Generator().manual_seed(2)
    for num_elems in (1, 77, 333):
        parts = [torch.randn(num_elems, generator=generator) * 10**i for i in range(3)]
        bufs = [reference.encode_reference(part, fmt) for part in parts]
        for out_fmt in {fmt, BlockFormat(8), BlockFormat(4, 32, hadamard=True)}:
            want = reference.decode_reduce_encode_reference(bufs, fmt, out_fmt, num_elems)
            memory, out = _guarded(len(want), 6)
            assert block_quant.decode_reduce_encode(bufs, fmt, out_fmt, num_elems, out) is out
            assert torch.equal(out, want)
            assert (memory[-6:] == _GUARD).all()


@FORMATS
def test_what_encoding_loses_is_carried(fmt: BlockFormat) -> None:
    generator, out_fmt = torch.Generator().manual_seed(3), BlockFormat(4, 64, symmetric=True, hadamard=True)
    for num_elems in (1, 77, 333):
        carried_M = torch.zeros(fmt.carried_elems(num_elems), dtype=torch.bfloat16)
        out_carried_M = torch.zeros(out_fmt.carried_elems(num_elems), dtype=torch.bfloat16)
        want_M, want_out_M = carried_M.clone(), out_carried_M.clone()
        bufs = []
        for dtype in NUMBERS:
            x_N = torch.randn(num_elems, generator=generator).to(dtype)
            bufs.append(reference.encode_reference(x_N, fmt, want_M))
            assert torch.equal(block_quant.encode(x_N, fmt, None, carried_M), bufs[-1])
            assert torch.equal(carried_M, want_M)
        for some in (bufs[:1], bufs):
            want = reference.decode_reduce_encode_reference(some, fmt, out_fmt, num_elems, want_out_M)
            got = block_quant.decode_reduce_encode(some, fmt, out_fmt, num_elems, None, out_carried_M)
            assert torch.equal(got, want)
            assert torch.equal(out_carried_M, want_out_M)
    message = f"carried_M must be {fmt.carried_elems(77)} bfloat16 or more, got 1 of"
    with pytest.raises(ValueError, match=message):
        block_quant.encode(torch.zeros(77), fmt, None, torch.zeros(1, dtype=torch.bfloat16))


@FORMATS
def test_hard_numbers_are_carried(fmt: BlockFormat) -> None:
    x_N = hard_numbers(torch.float32)
    carried_M = torch.zeros(fmt.carried_elems(len(x_N)), dtype=torch.bfloat16)
    want_M = carried_M.clone()
    for dtype in NUMBERS:
        want = reference.encode_reference(x_N.to(dtype), fmt, want_M)
        assert torch.equal(block_quant.encode(x_N.to(dtype), fmt, None, carried_M), want)
        assert _same(carried_M, want_M)


def test_broken_and_single_messages_encoded_again() -> None:
    x = hard_numbers(torch.float32)
    for fmt, out_fmt in product(
        (BlockFormat(4), BlockFormat(8, 32, hadamard=True)), (BlockFormat(3, 64), BlockFormat(8))
    ):
        bufs = [reference.encode_reference(x, fmt), reference.encode_reference(-x, fmt)]
        for some in (bufs[:1], bufs):
            want = reference.decode_reduce_encode_reference(some, fmt, out_fmt, len(x))
            assert torch.equal(block_quant.decode_reduce_encode(some, fmt, out_fmt, len(x)), want)


@pytest.mark.parametrize(
    "fmt",
    [BlockFormat(8), BlockFormat(5, 64), BlockFormat(2, 32, symmetric=True), BlockFormat(3, hadamard=True)],
    ids=format_id,
)
def test_threads_share_a_long_message(fmt: BlockFormat, num_threads: Callable[[int], None]) -> None:
    num_threads(3)
    x = torch.randn(3 * (1 << 17) + 3, generator=torch.Generator().manual_seed(4))
    _check(x.bfloat16(), fmt)
    buf = block_quant.encode(x, fmt)
    want = reference.decode_reduce_encode_reference([buf, buf], fmt, fmt, len(x))
    assert torch.equal(block_quant.decode_reduce_encode([buf, buf], fmt, fmt, len(x)), want)


@settings(max_examples=150, derandomize=True, database=None)
@given(
    fmt=st.sampled_from(all_formats()),
    dtype=st.sampled_from(NUMBERS),
    numbers=st.lists(st.floats(width=32), min_size=1, max_size=140),
)
def test_any_numbers(fmt: BlockFormat, dtype: torch.dtype, numbers: list[float]) -> None:
    _check(torch.tensor(numbers).to(dtype), fmt)


@settings(max_examples=50, derandomize=True, database=None)
@given(fmt=st.sampled_from(all_formats()), seed=st.integers(0, 2**32))
def test_any_bytes_decode_without_crashing(fmt: BlockFormat, seed: int) -> None:
    """A damaged message gives numbers, nonsense maybe, and writes nowhere else."""
    size = fmt.encoded_bytes(100)
    buf = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    out = torch.full((102,), 0.5)
    block_quant.decode(buf, fmt, 100, torch.float32, out[1:-1])
    assert out[[0, -1]].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("num_elems", [64000, 63995])
@FORMATS
def test_bfloat16_numbers_are_the_float32_ones_rounded(fmt: BlockFormat, num_elems: int) -> None:
    """With any scales, subnormal, infinite and NaN ones too: whole groups of some formats have a kernel of their own."""
    generator = torch.Generator().manual_seed(5)
    buf = torch.randint(0, 256, (fmt.encoded_bytes(num_elems),), dtype=torch.uint8, generator=generator)
    got = block_quant.decode(buf, fmt, num_elems, torch.bfloat16)
    assert _same(got, block_quant.decode(buf, fmt, num_elems, torch.float32).bfloat16())


_BUF = torch.zeros(132, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda fmt: block_quant.encode(torch.zeros(4, dtype=torch.float64), fmt), "x_N must be one-dimensional"),
        (lambda fmt: block_quant.encode(torch.zeros(8)[::2], fmt), "with strides (2,)"),
        (lambda fmt: block_quant.encode(torch.zeros(2, 2), fmt), "got (2, 2) torch.float32"),
        (lambda fmt: block_quant.encode(torch.zeros(129), fmt, _BUF), "129 numbers in BlockFormat"),
        (lambda fmt: block_quant.encode(torch.zeros(8), fmt, _BUF.view(torch.int8)), "got (132,) torch.int8"),
        (lambda fmt: block_quant.decode(_BUF, fmt, 129, torch.float32), "are (264,) torch.uint8"),
        (lambda fmt: block_quant.decode(_BUF, fmt, 128, torch.float64), "torch.float64"),
        (lambda fmt: block_quant.decode(_BUF, fmt, 8, torch.float32, torch.zeros(9)), "out must be 8 numbers"),
        (lambda fmt: block_quant.decode_add(_BUF, fmt, torch.zeros(8).bfloat16()), "sum_N must be float32"),
        (lambda fmt: block_quant.decode_reduce_encode([], fmt, fmt, 8), "at least one message"),
        (lambda fmt: block_quant.encode(torch.zeros(4, device="meta"), fmt), "on cpu; got (4,) torch.float32"),
        (
            lambda fmt: block_quant.decode(torch.zeros(132, dtype=torch.uint8, device="meta"), fmt, 4, torch.float32),
            "on cpu; got (132,) torch.uint8 with strides (1,) on meta",
        ),
    ],
)
def test_arguments_that_do_not_match_are_refused(call: Callable[[BlockFormat], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call(BlockFormat(8))
