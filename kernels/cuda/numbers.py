"""Converts tensors of the project's types to float32 registers and back inside a Triton kernel, exactly rounded.

A kernel holds rows of consecutive numbers as a tuple of tiles of one shape (B, W), cut as its ``Tiling`` says.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from tightwire.kernels.spec.block_format import BlockFormat

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

_NAN_BF16 = tl.constexpr(0x7FC0)

# Numbers of a kernel's rows that may be beyond the end of the message: none, whole rows, or any. More cases need more
# comparisons, and vectors stay whole only with whole rows.
NOTHING, ROWS, ANY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# Numbers of one program: with 4 warps each thread has 32, enough loads in flight to fill the memory bus, and each tile
# has at least 8 for every thread, which is one vector load of 16-bit numbers. Encoding, twice as many: then a group of 128
# has two threads, and what each thread computes for it costs a number a quarter less.
_PROGRAM_ELEMS = 4096
_TILE_ELEMS = 1024
_PLAIN_ELEMS = 128  # numbers of a row without a format


@dataclass(frozen=True, slots=True)
class Tiling:
    """The cut of messages into programs of ``rows`` times ``elems`` numbers, in tiles; a constant of compiled kernels."""

    rows: int
    elems: int
    num_tiles: int
    beyond: int  # NOTHING, ROWS or ANY

    def num_programs(self, num_elems: int) -> int:
        return -(-num_elems // (self.rows * self.elems))


def make_tiling(num_elems: int, *formats: BlockFormat, encodes: bool = False, program_elems: int = 0) -> Tiling:
    """Cut a message for a kernel that uses all ``formats``. The default of ``program_elems`` suits long messages."""
    elems = max((fmt.group_elems for fmt in formats), default=_PLAIN_ELEMS)
    # Narrow enough for the narrowest plane and the smallest group of any of the formats.
    width = min((min(fmt.plane_bytes) for fmt in formats), default=_PLAIN_ELEMS)
    if not program_elems:
        # Few threads share a group of 128, so what is computed once a group costs little; and rotations need few shuffles.
        width = min(width, 16 if any(fmt.hadamard for fmt in formats) else 32)
        program_elems = max(_PROGRAM_ELEMS * (1 + encodes), _TILE_ELEMS * elems // width)
    elif formats:
        width = min(width, max(32, _TILE_ELEMS * elems // program_elems))
    rows = program_elems // elems
    beyond = ROWS if num_elems % (rows * elems) else NOTHING
    if num_elems % elems:
        beyond = ANY
    return Tiling(rows, elems, elems // width, beyond.value)


@triton.jit
def load_tiles(source, first_B, end, tiling: tl.constexpr):
    """Load float32 tiles of a row of numbers from each place in ``first_B``; 0 for places from ``end`` on."""
    num_tiles: tl.constexpr = tiling.num_tiles
    width: tl.constexpr = tiling.elems // num_tiles
    tiles = ()
    for r in tl.static_range(num_tiles):
        places_BW = (first_B + r * width)[:, None] + tl.arange(0, width)[None, :]
        kept = None if tiling.beyond == NOTHING else _inside(first_B, places_BW, end, tiling)
        stored = tl.load(raw(source) + places_BW, mask=kept, other=None if kept is None else 0)
        tiles = tiles + (widened(stored),)
    return tiles


@triton.jit
def store_tiles(target, first_B, end, tiles, tiling: tl.constexpr):
    """Round each number to ``target``'s type and store it; the inverse of ``load_tiles``."""
    width: tl.constexpr = tiles[0].shape[1]
    for r in tl.static_range(len(tiles)):
        places_BW = (first_B + r * width)[:, None] + tl.arange(0, width)[None, :]
        kept = None if tiling.beyond == NOTHING else _inside(first_B, places_BW, end, tiling)
        tl.store(raw(target) + places_BW, narrowed(tiles[r], target.dtype.element_ty), mask=kept)


@triton.jit
def _inside(first_B, places_BW, end, tiling: tl.constexpr):
    return (first_B < end)[:, None] if tiling.beyond == ROWS else places_BW < end


@triton.jit
def raw(pointer):
    """Reinterpret a bfloat16 pointer as 16-bit integers, because the interpreter's conversions are not exact."""
    is_raw: tl.constexpr = pointer.dtype.element_ty == tl.bfloat16
    return pointer.to(tl.pointer_type(tl.int16), bitcast=True) if is_raw else pointer


@triton.jit
def widened(stored):
    """Convert numbers loaded through ``raw`` to float32."""
    return from_bf16(stored.to(tl.int32)) if stored.dtype == tl.int16 else stored.to(tl.float32)


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """Round float32 to nearest even, in the form that is stored through ``raw``."""
    if dtype == tl.bfloat16:  # the interpreter's conversion truncates
        return bf16_bits(x).to(tl.int16) if INTERPRETED else x.to(tl.bfloat16).to(tl.int16, bitcast=True)
    else:  # a kernel function has one return type, including code after a return
        return x.to(dtype)


@triton.jit
def load_operand(source, places, mask):
    """Load numbers in a type that ``tl.dot`` takes; ``mask`` may be None. The interpreter's dot has no bfloat16."""
    pointers = raw(source) + places if INTERPRETED else source + places
    stored = tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0)
    return widened(stored) if INTERPRETED else stored


@triton.jit
def add_tiles(a, b):
    total = ()
    for r in tl.static_range(len(a)):
        total = total + (a[r] + b[r],)
    return total


# --- bfloat16 as the upper half of float32's bits, in int32 ---------------------------------------------------------


@triton.jit
def from_bf16(bits):
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def bf16_above(x):
    """Return the smallest bfloat16 not below a number >= 0."""
    return (x.to(tl.int32, bitcast=True) + 0xFFFF) >> 16


@triton.jit
def bf16_below(x):
    """Return the largest bfloat16 not above: rounds positive numbers towards zero, negative ones away from it."""
    bits = x.to(tl.int32, bitcast=True)
    return (tl.where(bits < 0, bits + 0xFFFF, bits) >> 16) & 0xFFFF


@triton.jit
def bf16_bits(x):
    """Return bfloat16 bits, rounded to nearest even; every NaN gives the same bits."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where((bits & 0x7FFFFFFF) <= 0x7F800000, rounded, _NAN_BF16)


# --- float8 as the bits of e4m3 in int32 ------------------------------------------------------------------------------


@triton.jit
def to_float8(x):
    """Round a number of at most 448 to nearest even."""
    if not INTERPRETED and tl.target_info.cuda_capability_geq(8, 9):
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        bits = x.to(tl.int32, bitcast=True)
        magnitude_bits = bits & 0x7FFFFFFF
        normal = ((magnitude_bits + 0x7FFFF + ((magnitude_bits >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 codes are multiples of 2^-9, the unit of float32 numbers from 2^14 on.
        magnitude = magnitude_bits.to(tl.float32, bitcast=True)
        small = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        return tl.where(magnitude < 2.0**-6, small, normal) | ((bits >> 24) & 0x80)


@triton.jit
def from_float8(code):
    """Convert to float32; 0x7F and 0xFF are NaN."""
    if not INTERPRETED and tl.target_info.cuda_capability_geq(8, 9):
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        bits = code.to(tl.int32)
        # The exponent counts from 7 instead of 127: a factor of 2^120, which makes normal numbers of subnormal ones too.
        magnitude = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 2.0**120
        value = (magnitude.to(tl.int32, bitcast=True) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
