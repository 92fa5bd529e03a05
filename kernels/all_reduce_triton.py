"""AllReduces as one kernel per process, over memory that the processes map of each other.

Every process owns a *peer buffer*: the header of ``barrier``, two buffers to send from, one for its sums. A kernel

    one-shot    copies its numbers into its send buffer | waits | adds all processes' numbers
    two-shot    copies them, one slot for each process  | waits | adds its own slot and publishes the sums | waits |
                collects all sums. With a format for either leg its slots and sums are ``block_quant``'s bytes: flash

Sums are float32 in the processes' order, rounded once; a quantized slice goes through its owner's bytes too. So all
processes get the same bits, those of the generic algorithms (comm/all_reduce).

No wait at the end: call n sends from buffer n % 2, and this process's kernel n + 1 has met the peers' kernels n + 1, which
began after their kernels n were done, before kernel n + 2 writes that buffer again. Likewise a slot of sums is written
after the first meeting of a call, when the peers have done with the call before. For this every block takes part in every
call, with nothing to do when the message is short, and one stream runs all calls of a process. The number of the call is
counted on the device, so a captured CUDA graph can be replayed among other calls.

Everything that is read was written by the block of the same number, at most on another process; blocks do not wait for
other blocks. The longest message of a launch is what the buffers hold; ``comm.transport.peer_all_reduce`` cuts longer ones.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from tightwire.kernels.backend import on_device
from tightwire.kernels.barrier import begin_call, end_call, header_bytes, meet
from tightwire.kernels.block_format import BlockFormat
from tightwire.kernels.block_quant_triton import TilePlan
from tightwire.kernels.block_tiles import (
    add_tiles,
    decode_row,
    encode_row,
    load_tiles,
    stays_rotated,
    store_tiles,
)

_ALIGNMENT = 128  # of slots, in bytes
_NUM_WARPS = 4
# Numbers per block and turn of its loop: few while a message is short and would not occupy all blocks otherwise.
_SHORT_ELEMS, _LONG_ELEMS = 1024, 4096


@dataclass(frozen=True, slots=True)
class PeerBuffers:
    """What a process knows of all processes' peer buffers.

    Args:
        addresses: (W,) int64 on the kernels' device: where each process's buffer begins, as this process maps it.
        rank: which of them is this process's.
        send_bytes: size of a send buffer; the buffer for the sums holds a W-th of it.
        num_blocks: of every launch; at most what the device runs at once.
        failure: one int32 that the kernels write and the host reads without asking the device (pinned memory): 0, or a
            bit for each process that did not come in time.
        memory: whatever must live as long as the addresses.
    """

    addresses: Tensor
    rank: int
    send_bytes: int
    num_blocks: int
    failure: Tensor
    memory: object

    @property
    def world_size(self) -> int:
        return self.addresses.numel()

    @property
    def sums_bytes(self) -> int:
        return self.send_bytes // self.world_size // _ALIGNMENT * _ALIGNMENT


def buffer_bytes(send_bytes: int, num_blocks: int, world_size: int) -> int:
    """Size of one process's peer buffer. It must be zero before the first call of any process."""
    return header_bytes(num_blocks, world_size) + 2 * send_bytes + send_bytes // world_size


def one_shot(x_N: Tensor, out_N: Tensor, peers: PeerBuffers, max_polls: int) -> None:
    """``out_N`` = the sum of all processes' contiguous ``x_N``, at most ``peers.send_bytes`` long; all call alike."""
    assert 0 < x_N.nbytes <= peers.send_bytes, f"{x_N.nbytes} B in a buffer of {peers.send_bytes}"
    plan = _plan(x_N.numel(), peers.num_blocks)
    header = header_bytes(peers.num_blocks, peers.world_size)
    with on_device(x_N):
        _one_shot[(peers.num_blocks,)](
            x_N,
            out_N,
            peers.addresses,
            peers.failure,
            x_N.numel(),
            peers.rank,
            header,
            peers.send_bytes,
            max_polls,
            peers.world_size,
            plan.rows,
            plan.elems,
            plan.num_tiles,
            **plan.options,
        )


@dataclass(frozen=True, slots=True)
class Part:
    """What one launch takes of every process's slice: numbers ``start`` to ``start + num_elems`` of each.

    Slice j is numbers j * ``slice_elems`` to (j + 1) * ``slice_elems`` of the message, as far as there are any.
    """

    slice_elems: int
    start: int
    num_elems: int


def max_part_elems(peers: PeerBuffers, elem_bytes: int, fmt: BlockFormat | None, out_fmt: BlockFormat | None) -> int:
    """The longest part that the buffers hold, in whole groups of both formats and whole vectors; may be 0."""
    multiple = 128
    slot_bytes = peers.send_bytes // peers.world_size // _ALIGNMENT * _ALIGNMENT
    return multiple * min(
        slot_bytes // _message_bytes(multiple, elem_bytes, fmt),
        peers.sums_bytes // _message_bytes(multiple, elem_bytes, out_fmt),
    )


def two_shot(
    x_N: Tensor,
    out_N: Tensor,
    peers: PeerBuffers,
    part: Part,
    fmt: BlockFormat | None,
    out_fmt: BlockFormat | None,
    max_polls: int,
) -> None:
    """Fill one ``part`` of every slice of ``out_N`` with the sums of all processes' contiguous ``x_N``; all call alike.

    Args:
        fmt: how the slots are sent; None: as they are.
        out_fmt: how the sums are shared; None: rounded to the numbers' type.
    """
    assert part.num_elems <= max_part_elems(peers, x_N.element_size(), fmt, out_fmt), f"{part} is too long"
    plan = _plan(part.num_elems, peers.num_blocks, fmt, out_fmt)
    slot_bytes = _message_bytes(part.num_elems, x_N.element_size(), fmt)
    header = header_bytes(peers.num_blocks, peers.world_size)
    with on_device(x_N):
        _two_shot[(peers.num_blocks,)](
            x_N,
            out_N,
            peers.addresses,
            peers.failure,
            x_N.numel(),
            part.slice_elems,
            part.start,
            part.num_elems,
            peers.rank,
            header,
            peers.send_bytes,
            -(-slot_bytes // _ALIGNMENT) * _ALIGNMENT,
            max_polls,
            fmt,
            out_fmt,
            peers.world_size,
            plan.rows,
            plan.elems,
            plan.num_tiles,
            **plan.options,
        )


def _plan(num_elems: int, num_blocks: int, *formats: BlockFormat | None) -> TilePlan:
    given = [fmt for fmt in formats if fmt is not None]
    return TilePlan(*given, program_elems=_LONG_ELEMS if num_elems >= num_blocks * _LONG_ELEMS else _SHORT_ELEMS)


def _message_bytes(num_elems: int, elem_bytes: int, fmt: BlockFormat | None) -> int:
    return num_elems * elem_bytes if fmt is None else fmt.encoded_bytes(num_elems)


@triton.constexpr_function
def _stays_rotated(fmt, out_fmt):
    return fmt is not None and out_fmt is not None and stays_rotated(fmt, out_fmt)


@triton.jit
def _one_shot(
    x,
    out,
    headers,
    failure,
    num_elems,
    rank,
    header_bytes,
    send_bytes,
    max_polls,
    WORLD: tl.constexpr,
    ROWS: tl.constexpr,
    ELEMS: tl.constexpr,
    TILES: tl.constexpr,
):
    number, dead = begin_call(headers, rank)
    max_polls = tl.where(dead == 0, max_polls, 0)
    send = header_bytes + (number & 1) * send_bytes
    first = tl.program_id(0) * ROWS
    step = tl.num_programs(0) * ROWS
    num_rows = tl.cdiv(num_elems, ELEMS)
    for row in range(first, num_rows, step):
        if (row + ROWS) * ELEMS <= num_elems:
            _share(x, headers, rank, send, row, num_elems, None, ROWS, ELEMS, TILES, True)
        else:
            _share(x, headers, rank, send, row, num_elems, None, ROWS, ELEMS, TILES, False)
    late = meet(headers, rank, max_polls, WORLD)
    valid = (late == 0) & (dead == 0)
    for row in range(first, num_rows, step):
        if (row + ROWS) * ELEMS <= num_elems:
            _add(x, out, headers, send, row, num_elems, valid, None, None, WORLD, ROWS, ELEMS, TILES, True)
        else:
            _add(x, out, headers, send, row, num_elems, valid, None, None, WORLD, ROWS, ELEMS, TILES, False)
    end_call(headers, rank, number, dead, late, failure)


@triton.jit
def _two_shot(
    x,
    out,
    headers,
    failure,
    num_elems,
    slice_elems,
    part_start,
    part_elems,
    rank,
    header_bytes,
    send_bytes,
    slot_bytes,
    max_polls,
    fmt: tl.constexpr,
    out_fmt: tl.constexpr,
    WORLD: tl.constexpr,
    ROWS: tl.constexpr,
    ELEMS: tl.constexpr,
    TILES: tl.constexpr,
):
    number, dead = begin_call(headers, rank)
    max_polls = tl.where(dead == 0, max_polls, 0)
    send = header_bytes + (number & 1) * send_bytes
    sums = header_bytes + 2 * send_bytes
    first = tl.program_id(0) * ROWS
    step = tl.num_programs(0) * ROWS

    for owner in range(WORLD):
        slot_start, slot_elems = _slot(owner, num_elems, slice_elems, part_start, part_elems)
        slot = send + owner * slot_bytes
        for row in range(first, tl.cdiv(slot_elems, ELEMS), step):
            if (row + ROWS) * ELEMS <= slot_elems:
                _share(x + slot_start, headers, rank, slot, row, slot_elems, fmt, ROWS, ELEMS, TILES, True)
            else:
                _share(x + slot_start, headers, rank, slot, row, slot_elems, fmt, ROWS, ELEMS, TILES, False)
    late = meet(headers, rank, max_polls, WORLD)

    slot_start, slot_elems = _slot(rank, num_elems, slice_elems, part_start, part_elems)
    slot = send + rank * slot_bytes
    own_sums = _at(headers, rank, sums)
    for row in range(first, tl.cdiv(slot_elems, ELEMS), step):
        if (row + ROWS) * ELEMS <= slot_elems:
            _add(x, own_sums, headers, slot, row, slot_elems, True, fmt, out_fmt, WORLD, ROWS, ELEMS, TILES, True)
        else:
            _add(x, own_sums, headers, slot, row, slot_elems, True, fmt, out_fmt, WORLD, ROWS, ELEMS, TILES, False)
    late |= meet(headers, rank, tl.where(late == 0, max_polls, 0), WORLD)

    valid = (late == 0) & (dead == 0)
    for owner in range(WORLD):
        slot_start, slot_elems = _slot(owner, num_elems, slice_elems, part_start, part_elems)
        for row in range(first, tl.cdiv(slot_elems, ELEMS), step):
            source = _at(headers, owner, sums)
            if (row + ROWS) * ELEMS <= slot_elems:
                _collect(source, out + slot_start, row, slot_elems, valid, out_fmt, ROWS, ELEMS, TILES, True)
            else:
                _collect(source, out + slot_start, row, slot_elems, valid, out_fmt, ROWS, ELEMS, TILES, False)
    end_call(headers, rank, number, dead, late, failure)


# --- what a block does with one of its rows; ``whole`` rows need no comparisons with the end -------------------------------


@triton.jit
def _share(
    x,
    headers,
    rank,
    at,
    row,
    num_elems,
    fmt: tl.constexpr,
    ROWS: tl.constexpr,
    ELEMS: tl.constexpr,
    TILES: tl.constexpr,
    whole: tl.constexpr,
):
    """Own numbers to the own buffer."""
    row_B = row + tl.arange(0, ROWS).to(tl.int64)
    tiles = load_tiles(x, row_B * ELEMS, num_elems, ELEMS, TILES, whole)
    _put(_at(headers, rank, at), x, row_B, num_elems, tiles, fmt, False, ELEMS, whole)


@triton.jit
def _add(
    like,
    target,
    headers,
    at,
    row,
    num_elems,
    valid,
    fmt: tl.constexpr,
    out_fmt: tl.constexpr,
    WORLD: tl.constexpr,
    ROWS: tl.constexpr,
    ELEMS: tl.constexpr,
    TILES: tl.constexpr,
    whole: tl.constexpr,
):
    """The sum of what all processes have ``at`` one place of their buffers to ``target``; NaN unless ``valid``."""
    row_B = row + tl.arange(0, ROWS).to(tl.int64)
    rotated: tl.constexpr = _stays_rotated(fmt, out_fmt)
    total = _take(_at(headers, 0, at), like, row_B, num_elems, fmt, rotated, ELEMS, TILES, whole)
    for process in tl.static_range(1, WORLD):
        part = _take(_at(headers, process, at), like, row_B, num_elems, fmt, rotated, ELEMS, TILES, whole)
        total = add_tiles(total, part)
    _put(target, like, row_B, num_elems, _only_if(valid, total), out_fmt, rotated, ELEMS, whole)


@triton.jit
def _collect(
    source,
    out,
    row,
    num_elems,
    valid,
    fmt: tl.constexpr,
    ROWS: tl.constexpr,
    ELEMS: tl.constexpr,
    TILES: tl.constexpr,
    whole: tl.constexpr,
):
    """One owner's sums to the result; NaN unless ``valid``."""
    row_B = row + tl.arange(0, ROWS).to(tl.int64)
    tiles = _take(source, out, row_B, num_elems, fmt, False, ELEMS, TILES, whole)
    store_tiles(out, row_B * ELEMS, num_elems, _only_if(valid, tiles), whole)


@triton.jit
def _slot(owner, num_elems, slice_elems, part_start, part_elems):
    """Where this launch's part of an owner's slice begins in the message, and how long it is, maybe 0."""
    start = tl.cast(owner, tl.int64) * slice_elems + part_start
    left = tl.minimum(slice_elems - part_start, num_elems - start)
    return start, tl.maximum(tl.minimum(left, part_elems), 0).to(tl.int32)


@triton.jit
def _put(
    target,
    like,
    row_B,
    num_elems,
    tiles,
    fmt: tl.constexpr,
    rotated: tl.constexpr,
    ELEMS: tl.constexpr,
    whole: tl.constexpr,
):
    if fmt is None:
        store_tiles(target.to(like.dtype), row_B * ELEMS, num_elems, tiles, whole)
    else:
        encode_row(target.to(tl.pointer_type(tl.uint8)), row_B, num_elems, tiles, fmt, rotated, ELEMS, whole)


@triton.jit
def _take(
    source,
    like,
    row_B,
    num_elems,
    fmt: tl.constexpr,
    rotated: tl.constexpr,
    ELEMS: tl.constexpr,
    TILES: tl.constexpr,
    whole: tl.constexpr,
):
    if fmt is None:
        return load_tiles(source.to(like.dtype), row_B * ELEMS, num_elems, ELEMS, TILES, whole)
    else:
        return decode_row(source, row_B, num_elems, fmt, rotated, ELEMS, TILES, whole)


@triton.jit
def _only_if(valid, tiles):
    kept = ()
    for r in tl.static_range(len(tiles)):
        kept = kept + (tl.where(valid, tiles[r], float("nan")),)
    return kept


@triton.jit
def _at(headers, process, offset):
    return tl.multiple_of((tl.load(headers + process) + offset).to(tl.pointer_type(tl.uint8)), 16)
