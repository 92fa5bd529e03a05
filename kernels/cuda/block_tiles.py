"""Block quantization inside a Triton kernel: converts numbers in registers to bytes in memory, and back.

A kernel holds B groups of g numbers as R tiles of shape (B, W), W = g / R: number e of a group is in column e % W of
tile e // W. R is 8 / (the narrowest plane's bits), or a multiple. Then the numbers that share a byte are at the same
place of different tiles, so a plane is packed and unpacked by shifts within each thread, without moves between threads.

The same source runs compiled and in Triton's interpreter, so there is no inline assembly, and divisions use ``div_rn``.
"""

import triton
import triton.language as tl

from tightwire.kernels.cuda.block_sections import TO_WHOLE, load_bf16, load_levels, store_bits, store_plane, to_codes
from tightwire.kernels.cuda.launch import NUM_WARPS
from tightwire.kernels.cuda.numbers import (
    ANY,
    INTERPRETED,
    NOTHING,
    add_tiles,
    bf16_above,
    bf16_below,
    from_bf16,
    from_float8,
    load_tiles,
    store_tiles,
)
from tightwire.kernels.spec import block_format

MIN_SCALE = tl.constexpr(block_format.MIN_SCALE)
FLOAT8_MAX = tl.constexpr(block_format.FLOAT8_MAX)
_NAN_BF16 = tl.constexpr(0x7FC0)
_SIGN_BF16 = tl.constexpr(0x8000)


@triton.constexpr_function
def stays_rotated(fmt, out_fmt):
    """Return True if a sum of messages in ``fmt``, encoded as ``out_fmt``, is computed from rotated numbers."""
    return None not in (fmt, out_fmt) and fmt.hadamard and out_fmt.hadamard and fmt.group_elems == out_fmt.group_elems


@triton.constexpr_function
def _of_groups(tiling, fmt):
    """Return the tiling of a message's whole groups, one a row."""
    num_tiles = tiling.num_tiles * fmt.group_elems // tiling.elems
    return type(tiling)(tiling.rows, fmt.group_elems, num_tiles, min(tiling.beyond, 1))


# --- rows: one or more whole groups of a format side by side -----------------------------------------------------------


@triton.jit
def decode_row(
    sources, row_B, num_elems, fmt: tl.constexpr, SUMS: tl.constexpr, rotated: tl.constexpr, tiling: tl.constexpr
):
    """Decode rows ``row_B`` of a message to tiles, with SUMS the sum of several: still rotated if ``rotated``. Undefined beyond the end."""
    num_groups = tl.cast(tl.cdiv(num_elems, fmt.group_elems), tl.int64)
    per_row: tl.constexpr = tiling.elems // fmt.group_elems
    per_group: tl.constexpr = tiling.num_tiles // per_row
    tiles = []
    for i in tl.static_range(per_row):
        group_B = row_B * per_row + i
        kept_B = None if tiling.beyond == NOTHING else group_B < num_groups
        if SUMS:
            tiles = tiles + _sum(sources, group_B, num_groups, kept_B, fmt, rotated, per_group)
        else:
            tiles = tiles + _decode(sources[0], group_B, num_groups, kept_B, fmt, per_group)
    return tiles


@triton.jit
def encode_row(
    target, row_B, num_elems, tiles, carried, fmt: tl.constexpr, rotated: tl.constexpr, tiling: tl.constexpr
):
    """Encode tiles, which are already rotated if ``rotated``; inverse of ``decode_row``. Pads the last group.

    ``carried`` is None, or points to the errors of the message's previous encoding: added before encoding, then overwritten.
    """
    num_groups = tl.cast(tl.cdiv(num_elems, fmt.group_elems), tl.int64)
    per_row: tl.constexpr = tiling.elems // fmt.group_elems
    per_group: tl.constexpr = len(tiles) // per_row
    if tiling.beyond == ANY and not rotated:
        tiles = _filled(tiles, row_B * tiling.elems, num_elems)
    for i in tl.static_range(per_row):
        group = tiles[i * per_group : (i + 1) * per_group]
        if fmt.hadamard and not rotated:
            group = _rotated(group)
        _encode(target, row_B * per_row + i, num_groups, group, carried, fmt, tiling)


@triton.jit
def _filled(tiles, first_B, num_elems):
    """Copy number ``num_elems - 1`` to all places after it."""
    width: tl.constexpr = tiles[0].shape[1]
    last_B = tl.zeros(first_B.shape, tl.float32)
    for r in tl.static_range(len(tiles)):
        places_BW = (first_B + r * width)[:, None] + tl.arange(0, width)[None, :]
        last_B += tl.sum(tl.where(places_BW == num_elems - 1, tiles[r], 0.0), 1)
    filled = ()
    for r in tl.static_range(len(tiles)):
        places_BW = (first_B + r * width)[:, None] + tl.arange(0, width)[None, :]
        filled = filled + (tl.where(places_BW < num_elems, tiles[r], last_B[:, None]),)
    return filled


@triton.jit
def _encode(target, group_B, num_groups, tiles, carried, fmt: tl.constexpr, tiling: tl.constexpr):
    """Write groups ``group_B`` below ``num_groups`` of the message at ``target``. Their numbers are already rotated."""
    top: tl.constexpr = FLOAT8_MAX if fmt.float8 else fmt.num_levels or fmt.max_code
    own: tl.constexpr = len(fmt.plane_bits)  # the start of the sections of the groups' own numbers: the scales
    kept_B = None if tiling.beyond == NOTHING else group_B < num_groups
    if carried is not None:
        groups: tl.constexpr = _of_groups(tiling, fmt)
        tiles = add_tiles(tiles, load_tiles(carried, group_B * fmt.group_elems, num_groups * fmt.group_elems, groups))
    low_B, high_B, finite_B = _extremes(tiles)
    if fmt.has_zeros:
        zero_bits_B = bf16_below(low_B + 0.0)
        zero_B = from_bf16(zero_bits_B)
        span_B = high_B - zero_B
    else:
        zero_B = tl.zeros_like(low_B)
        span_B = tl.maximum(tl.abs(low_B), tl.abs(high_B))
    quotient_B = tl.div_rn(span_B, tl.full(span_B.shape, top, tl.float32))
    scale_bits_B = bf16_above(tl.maximum(quotient_B, MIN_SCALE))
    scale_B = from_bf16(scale_bits_B)
    finite_B = finite_B & (top * scale_B + zero_B < float("inf"))
    if fmt.symmetric:
        scale_bits_B = scale_bits_B | tl.where(high_B > -low_B, _SIGN_BF16, 0)
        scale_B = from_bf16(scale_bits_B)
    inverse_B = tl.div_rn(tl.full(scale_B.shape, 1.0, tl.float32), scale_B)
    codes = to_codes(tiles, zero_B[:, None], inverse_B[:, None], fmt)
    for p in tl.static_range(len(fmt.plane_bits)):
        store_plane(target, p, group_B, num_groups, codes, kept_B, finite_B, fmt)
    scale_bits_B = tl.where(finite_B, scale_bits_B, _NAN_BF16)
    store_bits(target, own, group_B, num_groups, scale_bits_B, kept_B, fmt)
    if carried is not None:
        whole: tl.constexpr = TO_WHOLE + fmt.num_levels
        levels = [from_float8(code) if fmt.float8 else code.to(tl.float32, bitcast=True) - whole for code in codes]
        decoded = _scaled(levels, from_bf16(scale_bits_B)[:, None], zero_B[:, None], fmt.has_zeros)
        lost = add_tiles(tiles, [number * -1.0 for number in decoded])
        lost = [tl.where(tl.abs(each) < MIN_SCALE, each * 0.0, each) for each in lost]  # no subnormal numbers
        store_tiles(carried, group_B * fmt.group_elems, num_groups * fmt.group_elems, lost, groups)
    if fmt.has_zeros:
        store_bits(target, own + 1, group_B, num_groups, tl.where(finite_B, zero_bits_B, 0), kept_B, fmt)


@triton.jit
def _decode(source, group_B, num_groups, kept_B, fmt: tl.constexpr, num_tiles: tl.constexpr):
    """Read groups ``group_B`` of the message at ``source`` (bytes) as float32 tiles."""
    own: tl.constexpr = len(fmt.plane_bits)
    scale_B1 = load_bf16(source, own, group_B, num_groups, kept_B, fmt)[:, None]
    zero_B1 = load_bf16(source, own + 1, group_B, num_groups, kept_B, fmt)[:, None] if fmt.has_zeros else scale_B1
    levels = load_levels(source, group_B, num_groups, kept_B, fmt, num_tiles, 0)
    tiles = _scaled(levels, scale_B1, zero_B1, fmt.has_zeros)
    return [tile * (1.0 / fmt.group_elems) for tile in _rotated(tiles)] if fmt.hadamard else tiles


@triton.jit
def _sum(sources, group_B, num_groups, kept_B, fmt: tl.constexpr, rotated: tl.constexpr, num_tiles: tl.constexpr):
    """Add groups ``group_B`` of several messages."""
    own: tl.constexpr = len(fmt.plane_bits)
    scales, start_B1 = (), 0.0
    for i in tl.static_range(len(sources)):
        scale_B1 = load_bf16(sources[i], own, group_B, num_groups, kept_B, fmt)[:, None]
        scales = scales + (scale_B1,)
        zero_B1 = load_bf16(sources[i], own + 1, group_B, num_groups, kept_B, fmt)[:, None] if fmt.has_zeros else 0.0
        start_B1 += zero_B1 - scale_B1 * fmt.sum_offset
    total = start_B1
    for i in tl.static_range(len(sources)):
        levels = load_levels(sources[i], group_B, num_groups, kept_B, fmt, num_tiles, fmt.sum_offset)
        before, total = total, []
        for r in tl.static_range(num_tiles):
            total = total + [tl.fma(levels[r], scales[i], before[r] if i else before)]
    turns_back: tl.constexpr = fmt.hadamard and not rotated
    return [tile * (1.0 / fmt.group_elems) for tile in _rotated(total)] if turns_back else total


@triton.jit
def _scaled(levels, scale_B1, zero_B1, HAS_ZEROS: tl.constexpr):
    """Levels times the scale, exact because both are short, plus the zero: rounded once, fused or not."""
    return [tl.fma(level, scale_B1, zero_B1) if HAS_ZEROS else level * scale_B1 for level in levels]


@triton.constexpr_function
def _log2(power_of_two):
    return power_of_two.bit_length() - 1


@triton.constexpr_function
def _cut(rows, width):
    """Return the shape of a tile as its rows, threads of a row, and a thread's numbers, 8 or fewer, as a cube."""
    each = max(1, min(8, width, rows * width // (32 * NUM_WARPS)))
    return [rows, width // each, *[2] * (each.bit_length() - 1)]


@triton.jit
def _rotated(tiles):
    """Multiply each group by the Hadamard matrix of its size g: rounds of a + b, a - b over strides 1, 2, 4, ... Twice is times g."""
    shape: tl.constexpr = _cut(tiles[0].shape[0], tiles[0].shape[1])
    threads: tl.constexpr = shape[1]
    in_thread: tl.constexpr = _log2(tiles[0].shape[1] // threads)
    parts = [tl.reshape(tile, shape) for tile in tiles]
    for _ in tl.static_range(in_thread):  # numbers of a thread
        before, parts = parts, ()
        for i in tl.static_range(len(before)):
            a, b = tl.split(before[i])
            parts = parts + (a + b, a - b)
    thread_BL = tl.broadcast_to(tl.arange(0, threads)[None, :], (shape[0], threads))
    for half in tl.static_range(_log2(threads)):  # of threads of a row
        sign_BL = 1.0 - 2.0 * ((thread_BL >> half) & 1)
        parts = [tl.fma(part, sign_BL, tl.gather(part, thread_BL ^ (1 << half), 1)) for part in parts]
    for level in tl.static_range(in_thread, _log2(len(parts))):  # of tiles
        before, parts = parts, ()
        for i in tl.static_range(len(before)):
            other = before[i ^ (1 << level)]
            parts = parts + (other - before[i] if i & (1 << level) else before[i] + other,)
    for _ in tl.static_range(in_thread):
        before, parts = parts, ()
        for i in tl.static_range(0, len(before), 2):
            parts = parts + (tl.join(before[i], before[i + 1]),)
    return [tl.reshape(part, tiles[0].shape) for part in parts]


@triton.jit
def _extremes(tiles):
    """Return (B,) each group's smallest and largest number, NaN if it has one, and whether all are finite."""
    low_BW, high_BW = tiles[0], tiles[0]
    for r in tl.static_range(1, len(tiles)):
        low_BW, high_BW = _wider(low_BW, high_BW, tiles[r], tiles[r])
    if INTERPRETED:  # takes far too long for functions that are not its own, and those ignore NaNs
        low_B = tl.min(tl.where(low_BW < float("inf"), low_BW, float("inf")), 1)
        high_B = tl.max(tl.where(high_BW < float("inf"), high_BW, float("inf")), 1)
    else:
        low_B, high_B = tl.reduce((low_BW, high_BW), 1, _wider)
    return low_B, high_B, (low_B > -float("inf")) & (high_B < float("inf"))


@triton.jit
def _wider(low, high, other_low, other_high):
    every: tl.constexpr = tl.PropagateNan.ALL
    return tl.minimum(low, other_low, propagate_nan=every), tl.maximum(high, other_high, propagate_nan=every)
