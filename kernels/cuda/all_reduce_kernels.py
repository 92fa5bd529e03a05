"""The Triton kernels of ``cuda.all_reduce``, which documents them and their arguments."""

import triton
import triton.language as tl

from tightwire.kernels.cuda.barrier import begin_call, end_call, wait_for_peers
from tightwire.kernels.cuda.block_tiles import decode_row, encode_row, stays_rotated
from tightwire.kernels.cuda.launch import wait_for_last
from tightwire.kernels.cuda.numbers import add_tiles, load_tiles, store_tiles


# One kernel for every rank: otherwise rank 1, which Triton would specialize, compiles again while the others wait.
@triton.jit(do_not_specialize=["rank", "max_polls"])
def one_shot_kernel(
    x, out, headers, failure, num_elems, rank, send_at, send_bytes, max_polls, WORLD: tl.constexpr, tiling: tl.constexpr
):
    wait_for_last(STARTS_NEXT=False)  # it would take room that a sum of another process may need
    number, dead = begin_call(headers, rank)
    max_polls = tl.where(dead == 0, max_polls, 0)
    send = send_at + (number & 1) * send_bytes
    _share(x, headers, rank, send, num_elems, None, None, tiling)
    late = wait_for_peers(headers, rank, max_polls, WORLD)
    valid = (late == 0) & (dead == 0)
    _add(x, out, headers, send, num_elems, valid, None, None, None, WORLD, tiling)
    end_call(headers, rank, number, dead, late, failure)


@triton.jit(do_not_specialize=["rank", "max_polls"])
def two_shot_kernel(
    x,
    out,
    headers,
    failure,
    carried,
    sums_carried,
    cut,
    rank,
    sizes,
    max_polls,
    fmt: tl.constexpr,
    out_fmt: tl.constexpr,
    WORLD: tl.constexpr,
    tiling: tl.constexpr,
):
    wait_for_last(STARTS_NEXT=False)  # it would take room that a sum of another process may need
    number, dead = begin_call(headers, rank)
    max_polls = tl.where(dead == 0, max_polls, 0)
    header_bytes, send_bytes, entry_bytes = sizes
    send = header_bytes + (number & 1) * send_bytes
    sums = header_bytes + 2 * send_bytes

    for owner in range(WORLD):
        entry_start, entry_elems = _entry(owner, cut)
        entry = send + owner * entry_bytes
        lost = None if carried is None else carried + entry_start
        _share(x + entry_start, headers, rank, entry, entry_elems, lost, fmt, tiling)
    late = wait_for_peers(headers, rank, max_polls, WORLD)

    entry_start, entry_elems = _entry(rank, cut)
    entry = send + rank * entry_bytes
    own_sums = _at(headers, rank, sums)
    own_lost = None if sums_carried is None else sums_carried + entry_start
    _add(x, own_sums, headers, entry, entry_elems, True, own_lost, fmt, out_fmt, WORLD, tiling)
    # A process that missed the first barrier is the late one; the others may still be waiting there.
    late_again = wait_for_peers(headers, rank, tl.where(late == 0, max_polls, 0), WORLD)
    late = tl.where(late == 0, late_again, late)

    valid = (late == 0) & (dead == 0)
    for owner in range(WORLD):
        entry_start, entry_elems = _entry(owner, cut)
        _add(out, out + entry_start, headers + owner, sums, entry_elems, valid, None, out_fmt, None, 1, tiling)
    end_call(headers, rank, number, dead, late, failure)


@triton.jit
def _share(x, headers, rank, at, num_elems, carried, fmt: tl.constexpr, tiling: tl.constexpr):
    """Copy or encode this process's numbers to its own buffer; ``carried`` as in ``encode_row``."""
    row = tl.program_id(0) * tiling.rows
    # No range(), here and below: the interpreter of Triton 3.6 fails on it with NumPy 2.4.
    while row < tl.cdiv(num_elems, tiling.elems):
        row_B = row + tl.arange(0, tiling.rows).to(tl.int64)
        tiles = load_tiles(x, row_B * tiling.elems, num_elems, tiling)
        _put(_at(headers, rank, at), x, row_B, num_elems, tiles, carried, fmt, False, tiling)
        row += tl.num_programs(0) * tiling.rows


@triton.jit
def _add(
    like,
    target,
    headers,
    at,
    num_elems,
    valid,
    carried,
    fmt: tl.constexpr,
    out_fmt: tl.constexpr,
    WORLD: tl.constexpr,
    tiling: tl.constexpr,
):
    """Sum the numbers at ``at`` of WORLD buffers, the first in ``headers``, to ``target``; NaN unless ``valid``."""
    rotated: tl.constexpr = stays_rotated(fmt, out_fmt)
    row = tl.program_id(0) * tiling.rows
    while row < tl.cdiv(num_elems, tiling.elems):
        row_B = row + tl.arange(0, tiling.rows).to(tl.int64)
        if fmt is None or out_fmt is None:
            total = _take(_at(headers, 0, at), like, row_B, num_elems, fmt, tiling)
            for process in tl.static_range(1, WORLD):
                total = add_tiles(total, _take(_at(headers, process, at), like, row_B, num_elems, fmt, tiling))
        else:
            sources = ()
            for process in tl.static_range(WORLD):
                sources = sources + (_at(headers, process, at),)
            total = decode_row(sources, row_B, num_elems, fmt, True, rotated, tiling)
        total = [tl.where(valid, tile, float("nan")) for tile in total]
        _put(target, like, row_B, num_elems, total, carried, out_fmt, rotated, tiling)
        row += tl.num_programs(0) * tiling.rows


@triton.jit
def _entry(owner, cut):
    """Return the start in the message of this launch's part of an owner's slice, and its length, which may be 0."""
    num_elems, slice_elems, part_start, part_elems = cut
    start = tl.cast(owner, tl.int64) * slice_elems + part_start
    left = tl.minimum(slice_elems - part_start, num_elems - start)
    return start, tl.maximum(tl.minimum(left, part_elems), 0).to(tl.int32)


@triton.jit
def _put(
    target, like, row_B, num_elems, tiles, carried, fmt: tl.constexpr, rotated: tl.constexpr, tiling: tl.constexpr
):
    if fmt is None:
        store_tiles(target.to(like.dtype), row_B * tiling.elems, num_elems, tiles, tiling)
    else:
        encode_row(target.to(tl.pointer_type(tl.uint8)), row_B, num_elems, tiles, carried, fmt, rotated, tiling)


@triton.jit
def _take(source, like, row_B, num_elems, fmt: tl.constexpr, tiling: tl.constexpr):
    if fmt is None:
        return load_tiles(source.to(like.dtype), row_B * tiling.elems, num_elems, tiling)
    else:
        return decode_row((source,), row_B, num_elems, fmt, False, False, tiling)


@triton.jit
def _at(headers, process, offset):
    return tl.multiple_of((tl.load(headers + process) + offset).to(tl.pointer_type(tl.uint8)), 16)
