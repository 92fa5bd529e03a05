"""``block_quant`` for CPU tensors: numba over vectors, the reference's bytes. Groups are shared among torch's threads.

A kernel knows a format by one integer (``block_quant_cpu_word``), an encoded message by the address of its first byte,
which may lie anywhere. Of each group it makes numbers in a *stage* (``block_quant_cpu_stage``):

    encode     ``load_group`` (widen, fill up the tail), ``rotate_group`` if the word says so, ``encode_group``
    decode     ``decode_group``, ``unrotate_group`` if the word says so, ``store_group`` or ``add_group``

Other kernels, those of AllReduce over shared memory for instance, inline ``encode_groups``, ``decode_groups`` and
``decode_reduce_encode_blocks`` to run over a part of a message without coming back to Python.
"""

from array import array

import torch
from torch import Tensor

from tightwire.kernels.cpu.block_quant_bf16 import decode_groups_to_bf16, decodes_to_bf16
from tightwire.kernels.cpu.block_quant_decode import decode_group
from tightwire.kernels.cpu.block_quant_encode import encode_group
from tightwire.kernels.cpu.block_quant_stage import (
    add_group,
    fill_group,
    load_group,
    make_stage,
    rotate_group,
    store_group,
    unrotate_group,
)
from tightwire.kernels.cpu.block_quant_word import format_word, group_elems, is_rotated, log2_group_elems
from tightwire.kernels.cpu.vector.jit import helper, kernel
from tightwire.kernels.cpu.vector.numbers import size_of
from tightwire.kernels.cpu.vector.simd import BFLOAT16, NUMBER_KIND, load_i64
from tightwire.kernels.cpu.vector.threads import run_on_rows
from tightwire.kernels.spec.block_format import BlockFormat

_BLOCK_ELEMS = 128  # a whole number of groups of every format


def encode(x_N: Tensor, fmt: BlockFormat, out: Tensor | None = None) -> Tensor:
    """``block_quant.encode``."""
    _check_numbers(x_N, "x_N")
    num_elems = x_N.numel()
    out = _bytes_for(num_elems, fmt, out)
    arguments = (out.data_ptr(), format_word(fmt), x_N.data_ptr(), NUMBER_KIND[x_N.dtype], num_elems)
    run_on_rows(_encode, arguments, fmt.num_groups(num_elems), fmt.group_elems)
    return out


def decode(buf: Tensor, fmt: BlockFormat, num_elems: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """``block_quant.decode``."""
    if out is None:
        out = torch.empty(num_elems, dtype=dtype)
    _check_numbers(out, "out")
    if out.dtype != dtype or out.numel() != num_elems:
        raise ValueError(f"out must be {num_elems} numbers of {dtype}, got {out.numel()} of {out.dtype}")
    _decode_all(buf, fmt, out, add=False)
    return out


def decode_add(buf: Tensor, fmt: BlockFormat, sum_N: Tensor) -> None:
    """``block_quant.decode_add``."""
    _check_numbers(sum_N, "sum_N")
    if sum_N.dtype != torch.float32:
        raise ValueError(f"sum_N must be float32, got {sum_N.dtype}")
    _decode_all(buf, fmt, sum_N, add=True)


def decode_reduce_encode(
    bufs: list[Tensor], fmt: BlockFormat, out_fmt: BlockFormat, num_elems: int, out: Tensor | None = None
) -> Tensor:
    """``block_quant.decode_reduce_encode``; the sum never leaves the first-level cache."""
    if not bufs:
        raise ValueError("decode_reduce_encode needs at least one message to add, got none")
    for buf in bufs:
        _check_message(buf, fmt, num_elems)
    out = _bytes_for(num_elems, out_fmt, out)
    addresses = array("q", [buf.data_ptr() for buf in bufs])
    sources, count = addresses.buffer_info()
    arguments = (out.data_ptr(), format_word(out_fmt), sources, count, format_word(fmt), num_elems)
    run_on_rows(_decode_reduce_encode, arguments, -(-num_elems // _BLOCK_ELEMS), _BLOCK_ELEMS)
    return out


def _decode_all(buf: Tensor, fmt: BlockFormat, out_N: Tensor, *, add: bool) -> None:
    num_elems = out_N.numel()
    _check_message(buf, fmt, num_elems)
    target, kind, source, word = out_N.data_ptr(), NUMBER_KIND[out_N.dtype], buf.data_ptr(), format_word(fmt)

    num_groups = fmt.num_groups(num_elems)
    if not add and kind == BFLOAT16 and decodes_to_bf16(fmt):
        run_on_rows(_decode_to_bf16, (target, source, word, num_elems), num_groups, fmt.group_elems)
    else:
        run_on_rows(_decode, (target, kind, add, source, word, num_elems), num_groups, fmt.group_elems)


# --- kernels trust the addresses they are given ---------------------------------------------------------------------------


def _check_numbers(x_N: Tensor, name: str) -> None:
    if x_N.dtype not in NUMBER_KIND or x_N.dim() != 1 or not x_N.is_contiguous() or not x_N.is_cpu:
        raise ValueError(
            f"{name} must be one-dimensional and contiguous, of {', '.join(map(str, NUMBER_KIND))}, on the CPU; "
            f"got {tuple(x_N.shape)} {x_N.dtype} with strides {x_N.stride()} on {x_N.device}"
        )


def _check_message(buf: Tensor, fmt: BlockFormat, num_elems: int) -> None:
    size = fmt.encoded_bytes(num_elems)
    if buf.dtype != torch.uint8 or buf.shape != (size,) or not buf.is_contiguous() or not buf.is_cpu:
        raise ValueError(
            f"{num_elems} numbers in {fmt} are ({size},) torch.uint8, contiguous, on the CPU; "
            f"got {tuple(buf.shape)} {buf.dtype} with strides {buf.stride()} on {buf.device}"
        )


def _bytes_for(num_elems: int, fmt: BlockFormat, out: Tensor | None) -> Tensor:
    if out is None:
        return torch.empty(fmt.encoded_bytes(num_elems), dtype=torch.uint8)
    _check_message(out, fmt, num_elems)
    return out


# --- what runs ------------------------------------------------------------------------------------------------------------


@helper
def encode_groups(target: int, word: int, source: int, kind: int, num_elems: int, start: int, stop: int) -> None:
    """Groups ``start`` to ``stop`` of the message at ``target``, from the ``num_elems`` numbers at ``source``."""
    size = group_elems(word)
    num_groups = (num_elems + size - 1) // size
    stage = make_stage()
    for group in range(start, stop):
        first = group * size
        load_group(stage, source + size_of(kind) * first, kind, num_elems - first, word)
        if is_rotated(word):
            rotate_group(stage, word)
        encode_group(target, num_groups, word, group, stage)


@helper
def decode_groups(
    target: int, kind: int, add: bool, source: int, word: int, num_elems: int, start: int, stop: int
) -> None:
    """Groups ``start`` to ``stop`` of the message at ``source``, into the ``num_elems`` numbers at ``target`` or added."""
    size = group_elems(word)
    num_groups = (num_elems + size - 1) // size
    stage = make_stage()
    for group in range(start, stop):
        first = group * size
        decode_group(stage, source, num_groups, word, group)
        if is_rotated(word):
            unrotate_group(stage, word)
        count = min(size, num_elems - first)
        if add:
            add_group(target + 4 * first, stage, count)
        else:
            store_group(target + size_of(kind) * first, kind, stage, count)


@helper
def decode_reduce_encode_blocks(
    target: int, out_word: int, sources: int, num_sources: int, word: int, num_elems: int, start: int, stop: int
) -> None:
    """Blocks ``start`` to ``stop`` of 128 numbers; ``sources`` is the address of the messages' addresses, int64."""
    size, out_size = group_elems(word), group_elems(out_word)
    num_groups, out_num_groups = (num_elems + size - 1) // size, (num_elems + out_size - 1) // out_size
    stay_rotated = is_rotated(word) and is_rotated(out_word) and size == out_size
    stage, sums = make_stage(), make_stage()
    for block in range(start, stop):
        first = block * _BLOCK_ELEMS
        count = min(_BLOCK_ELEMS, num_elems - first)
        for index in range(num_sources):
            source = load_i64(sources + 8 * index)
            for at in range(0, count, size):
                part = sums + 4 * at if index == 0 else stage
                decode_group(part, source, num_groups, word, (first + at) >> log2_group_elems(word))
                if is_rotated(word) and not stay_rotated:
                    unrotate_group(part, word)
                if index:
                    add_group(sums + 4 * at, stage, size)
        for at in range(0, count, out_size):
            if not stay_rotated:
                if count - at < out_size:
                    fill_group(sums + 4 * at, count - at, out_word)
                if is_rotated(out_word):
                    rotate_group(sums + 4 * at, out_word)
            encode_group(target, out_num_groups, out_word, (first + at) >> log2_group_elems(out_word), sums + 4 * at)


@kernel
def _encode(target: int, word: int, source: int, kind: int, num_elems: int, start: int, stop: int) -> None:
    encode_groups(target, word, source, kind, num_elems, start, stop)


@kernel
def _decode(target: int, kind: int, add: bool, source: int, word: int, num_elems: int, start: int, stop: int) -> None:
    decode_groups(target, kind, add, source, word, num_elems, start, stop)


@kernel
def _decode_to_bf16(target: int, source: int, word: int, num_elems: int, start: int, stop: int) -> None:
    size = group_elems(word)
    whole = min(stop, num_elems // size)
    decode_groups_to_bf16(target, source, word, (num_elems + size - 1) // size, start, whole)
    decode_groups(target, BFLOAT16, False, source, word, num_elems, max(start, whole), stop)


@kernel
def _decode_reduce_encode(
    target: int, out_word: int, sources: int, num_sources: int, word: int, num_elems: int, start: int, stop: int
) -> None:
    decode_reduce_encode_blocks(target, out_word, sources, num_sources, word, num_elems, start, stop)
