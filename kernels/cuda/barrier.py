"""A barrier inside a kernel among programs of several processes, through memory that all processes map.

Each process owns a header of 32-bit words, initially zero, that all others can write:

    dead        one word: 1 after a wait of this process has failed; it does not wait again
    calls       for each of its B blocks, the number of calls it has made
    barriers    for each block, the number of barriers it has reached
    arrivals    for each block and each process, the last barrier of the process's block of this number

Blocks wait only for blocks with the same number, so all processes must launch the same number of blocks, and no more than the
device runs at once. A block writes the barrier's number to every peer's header, then waits until its own header has that number,
or a later one, from each peer. The device counts all numbers, so a captured CUDA graph may be replayed.

Ordering: a store of an arrival releases the block's earlier writes to the whole system; reads of the arrivals acquire. It is a
store because PCIe carries no atomic operations between GPUs. Every process polls its own memory. Waiting is bounded by a number of
polls, each about a microsecond on a GPU, because no clock is available both to a compiled kernel and to the interpreter.
"""

import os

import triton
import triton.language as tl
from triton import knobs

from tightwire.kernels.cuda.numbers import INTERPRETED


@triton.jit
def _nothing():
    pass


# In the interpreter there may be more processes than cores, and those that wait must yield to the others.
_pause = os.sched_yield if knobs.runtime.interpret else _nothing


def header_bytes(num_blocks: int, world_size: int) -> int:
    """Return the bytes of the header, a multiple of 128, which aligns the bytes after it for any load."""
    num_words = 1 + 2 * num_blocks + num_blocks * world_size
    return -(-num_words * 4 // 128) * 128


@triton.jit
def begin_call(headers, rank):
    """Return the number of this block's call, counted from 0, and 1 if a wait has failed before, else 0."""
    words = _words(headers, rank)
    return tl.load(words + 1 + tl.program_id(0)), tl.load(words)


@triton.jit
def end_call(headers, rank, number, dead, late, failure):
    """Count the call. If a process was ``late`` for the first time, record it in the header and in ``failure``."""
    words = _words(headers, rank)
    tl.debug_barrier()  # all threads have read the number
    tl.store(words + 1 + tl.program_id(0), number + 1)
    if (late != 0) & (dead == 0):
        tl.store(words, 1)
        tl.store(failure, late)


@triton.jit
def wait_for_peers(headers, rank, max_polls, WORLD: tl.constexpr):
    """Wait for this block's peers; returns a bit for each peer that did not arrive within ``max_polls``."""
    block = tl.program_id(0)
    num_blocks = tl.num_programs(0)
    arrivals = 1 + 2 * num_blocks + block * WORLD
    tl.debug_barrier()  # all threads have written the bytes that the peers read
    barriers = _words(headers, rank) + 1 + num_blocks + block
    barrier = tl.atomic_add(barriers, 1, sem="acq_rel", scope="sys") + 1
    for peer in range(WORLD):
        _release(_words(headers, peer) + arrivals + rank, barrier)
    late = tl.full((), 0, tl.int32)
    for peer in range(WORLD):
        # After one peer has used up the time, the others are checked once, without waiting.
        polls = tl.where(late == 0, max_polls, 0)
        late |= _wait(_words(headers, rank) + arrivals + peer, barrier, polls) << peer
    tl.debug_barrier()  # no thread reads before the waiting thread has seen all
    return late


@triton.jit
def _release(arrival, barrier):
    """Store ``barrier`` after all earlier writes of the block, which the caller's ``debug_barrier`` has collected."""
    if INTERPRETED:
        tl.store(arrival, barrier)  # the processors that it runs on keep the order of stores
    else:  # by one thread; Triton has no store with an order, and its plain ones may overtake each other
        tl.inline_asm_elementwise(
            """{ .reg .pred first; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0;
            @first st.release.sys.global.b32 [$1], $2; mov.b32 $0, 0; }""",
            "=r,l,r",
            [arrival.to(tl.int64), barrier],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _wait(arrival, barrier, max_polls):
    """Wait until ``arrival`` reaches ``barrier``; returns 1 if it does not within 1 + ``max_polls`` polls, else 0."""
    behind = barrier - tl.atomic_add(arrival, 0, sem="acquire", scope="sys")  # may wrap around, as both numbers do
    while (behind > 0) & (max_polls > 0):
        _pause()
        behind = barrier - tl.atomic_add(arrival, 0, sem="acquire", scope="sys")
        max_polls -= 1
    return (behind > 0).to(tl.int32)


@triton.jit
def _words(headers, process):
    return tl.load(headers + process).to(tl.pointer_type(tl.int32))
