"""Numbers in the registers of 32 threads, and what PTX computes of them."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

LANES = 32
Bits = np.ndarray[Any, Any]  # (32,) uint64: a register's bits in each thread

NUMPY = {"f16": np.float16, "f32": np.float32, "f64": np.float64} | {
    f"{sign}{size}": np.dtype(f"{'i' if sign == 's' else 'u'}{size // 8}") for sign in "bus" for size in (8, 16, 32, 64)
}
_UNSIGNED = {kind: np.dtype(f"u{np.dtype(numbers).itemsize}") for kind, numbers in NUMPY.items()}


def from_bits(bits: Bits, kind: str) -> Bits:
    if kind == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.astype(_UNSIGNED[kind]).view(NUMPY[kind])


def to_bits(numbers: Bits, kind: str) -> Bits:
    if kind == "bf16":
        bits = to_odd(numbers, np.float32).view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF
        return np.where(np.isnan(numbers), np.uint64(0x7FFF), rounded)
    return numbers.astype(NUMPY[kind]).view(_UNSIGNED[kind]).astype(np.uint64)


def to_odd(numbers: Bits, kind: Any) -> Bits:
    """Numbers of another type, those that it lacks to the neighbour whose last bit is 1: rounding these again rounds only once."""
    found = numbers.astype(kind)
    bits = found.view(f"u{found.itemsize}")
    is_even = (found != numbers) & (bits & 1 == 0) & np.isfinite(found)
    toward = np.where(numbers > found, np.inf, -np.inf).astype(kind)
    return np.where(is_even, np.nextafter(found, toward), found)


def fused(a: Bits, b: Bits, c: Bits) -> Bits:
    """a * b + c, float64 rounded to odd; exact products of up to 32 bits."""
    product = a.astype(np.float64) * b
    total = product + c
    back = total - product
    lost = (product - (total - back)) + (c - back)
    is_even = (lost != 0) & np.isfinite(total) & np.isfinite(lost) & (total.view(np.uint64) & 1 == 0)
    return np.where(is_even, np.nextafter(total, np.where(lost > 0, np.inf, -np.inf)), total)


def halves(bits: Bits, kind: str) -> list[Bits]:
    return [from_bits(bits >> shift & 0xFFFF, kind) for shift in (0, 16)]


def joined(halves: list[Bits], kind: str) -> Bits:
    low, high = (to_bits(half, kind) for half in halves)
    return low | high << 16


def _shift(left: bool) -> Callable[[Bits, Bits], Bits]:
    def shift(numbers: Bits, counts: Bits) -> Bits:
        size = 8 * numbers.dtype.itemsize
        moved = (operator.lshift if left else operator.rshift)(
            numbers, np.minimum(counts, size - 1).astype(numbers.dtype)
        )
        gone = 0 if left or numbers.dtype.kind == "u" else numbers >> (size - 1)
        return np.where(counts >= size, gone, moved).astype(numbers.dtype)

    return shift


def _truncated(quotient: Callable[[Bits, Bits], Bits]) -> Callable[[Bits, Bits], Bits]:
    def divide(a: Bits, b: Bits) -> Bits:
        if a.dtype.kind == "f":
            return a / b
        return quotient(a, np.where(b == 0, 1, b).astype(b.dtype))

    return divide


def _quotient(a: Bits, b: Bits) -> Bits:
    wide_a, wide_b = a.astype(np.int64), b.astype(np.int64)
    return (np.abs(wide_a) // np.abs(wide_b) * np.sign(wide_a) * np.sign(wide_b)).astype(a.dtype)


BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "min": np.fmin,
    "max": np.fmax,
    "min.NaN": np.minimum,
    "max.NaN": np.maximum,
    "shl": _shift(left=True),
    "shr": _shift(left=False),
    "div": _truncated(_quotient),
    "rem": _truncated(lambda a, b: a - _quotient(a, b) * b),
}
UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": operator.neg,
    "not": operator.invert,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda x: 1 / x,
    "rsqrt": lambda x: 1 / np.sqrt(x),
}
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(operator, name) for name in ("eq", "lt", "le", "gt", "ge")},
    "ne": lambda a, b: (a < b) | (a > b),  # not so with NaN, as the others without u
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "neu": lambda a, b: ~(a == b),
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "equ": lambda a, b: ~((a < b) | (a > b)),
}
