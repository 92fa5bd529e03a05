"""Reading and writing a tensor's numbers as float32 lanes, whatever they are stored as; for CPU kernels."""

from tightwire.kernels.cpu.vector import simd
from tightwire.kernels.cpu.vector.jit import helper
from tightwire.kernels.cpu.vector.simd import BFLOAT16, FLOAT32, LANES

# One instruction in place of seven, where the CPU has it.
_HAS_BF16 = simd.bf16_products_usable()
_round_bf16 = simd.bf16_narrowed if _HAS_BF16 else simd.bf16_rounded
store_narrow = simd.store_rounded if _HAS_BF16 else simd.store_bf16


@helper
def size_of(kind: int) -> int:
    return 4 if kind == FLOAT32 else 2


@helper
def load_numbers(address: int, kind: int, count: int) -> simd.Vector:
    """Up to sixteen numbers; lanes from ``count`` on are zero, and nothing past the last number is read."""
    if kind == BFLOAT16:
        return simd.load_bf16(address) if count >= LANES else simd.load_part_bf16(address, count)
    if kind == FLOAT32:
        return simd.load(address) if count >= LANES else simd.load_part(address, count)
    return simd.load_f16(address) if count >= LANES else simd.load_part_f16(address, count)


@helper
def store_numbers(address: int, value: simd.Vector, kind: int, count: int) -> None:
    """Up to sixteen numbers, rounded to nearest even; nothing past ``count`` is written."""
    if kind == BFLOAT16:
        if count >= LANES:
            simd.store_bf16(address, value)
        else:
            simd.store_part_bf16(address, value, count)
    elif kind == FLOAT32:
        if count >= LANES:
            simd.store(address, value)
        else:
            simd.store_part(address, value, count)
    elif count >= LANES:
        simd.store_f16(address, value)
    else:
        simd.store_part_f16(address, value, count)


@helper
def rounded(value: simd.Vector, kind: int) -> simd.Vector:
    """What storing and loading would give: torch rounds after every operation on a 16-bit tensor.

    For activations: of bfloat16, numbers below the least normal one (1e-38) may become zero.
    """
    if kind == BFLOAT16:
        return _round_bf16(value)
    if kind == FLOAT32:
        return value
    return simd.f16_rounded(value)


@helper
def store_rounded(address: int, value: simd.Vector, kind: int, count: int) -> None:
    """``store_numbers`` of what ``rounded`` gives, at once."""
    if kind == BFLOAT16 and count >= LANES:
        store_narrow(address, value)
    else:
        store_numbers(address, rounded(value, kind), kind, count)
