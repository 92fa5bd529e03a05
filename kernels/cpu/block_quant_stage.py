"""The stage: a group's numbers as float32, on a kernel's stack, between memory and codes."""

import numpy as np

from tightwire.kernels.cpu.block_quant_word import group_elems
from tightwire.kernels.cpu.vector import simd, simd_codes
from tightwire.kernels.cpu.vector.jit import helper
from tightwire.kernels.cpu.vector.numbers import load_numbers, size_of, store_numbers
from tightwire.kernels.cpu.vector.simd import LANES

MAX_GROUP = 128
make_stage = simd.make_stack(MAX_GROUP)


@helper
def load_group(stage: int, source: int, kind: int, count: int, word: int) -> None:
    """The stage's numbers from ``source``; from ``count`` on (at least 1) the last number again and again."""
    size = group_elems(word)
    if count >= size:
        for at in range(0, size, LANES):
            simd.store(stage + 4 * at, load_numbers(source + size_of(kind) * at, kind, LANES))
        return
    for at in range(0, count, LANES):
        simd.store(stage + 4 * at, load_numbers(source + size_of(kind) * at, kind, count - at))
    fill_group(stage, count, word)


@helper
def fill_group(stage: int, count: int, word: int) -> None:
    """Numbers from ``count`` on (at least 1) become the one before them."""
    last = simd.load_scalar(stage + 4 * (count - 1))
    for at in range(count, group_elems(word)):
        simd.store_scalar(stage + 4 * at, last)


@helper
def store_group(target: int, kind: int, stage: int, count: int) -> None:
    """The first ``count`` numbers, rounded to nearest even."""
    whole = count & -LANES
    for at in range(0, whole, LANES):
        store_numbers(target + size_of(kind) * at, simd.load(stage + 4 * at), kind, LANES)
    if whole < count:
        store_numbers(target + size_of(kind) * whole, simd.load(stage + 4 * whole), kind, count - whole)


@helper
def add_group(sums: int, stage: int, count: int) -> None:
    """``sums`` (float32) += the first ``count`` numbers."""
    whole = count & -LANES
    for at in range(0, whole, LANES):
        simd.store(sums + 4 * at, simd.add(simd.load(sums + 4 * at), simd.load(stage + 4 * at)))
    if whole < count:
        part = simd.add(simd.load_part(sums + 4 * whole, count - whole), simd.load(stage + 4 * whole))
        simd.store_part(sums + 4 * whole, part, count - whole)


@helper
def rotate_group(stage: int, word: int) -> None:
    size = group_elems(word)
    for at in range(0, size, LANES):
        simd.store(stage + 4 * at, simd_codes.rotate(simd.load(stage + 4 * at)))
    stride = LANES
    while stride < size:
        for block in range(0, size, 2 * stride):
            for at in range(stage + 4 * block, stage + 4 * (block + stride), 4 * LANES):
                a, b = simd.load(at), simd.load(at + 4 * stride)
                simd.store(at, simd.add(a, b))
                simd.store(at + 4 * stride, simd.sub(a, b))
        stride *= 2


@helper
def unrotate_group(stage: int, word: int) -> None:
    rotate_group(stage, word)
    size = group_elems(word)
    factor = simd.splat(np.float32(1.0) / np.float32(size))
    for at in range(0, size, LANES):
        simd.store(stage + 4 * at, simd.mul(simd.load(stage + 4 * at), factor))
