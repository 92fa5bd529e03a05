"""Programs of several processes waiting for each other inside a kernel, by words in memory that all of them map.

Each process owns a header that all others can write, of 32-bit words, zero at first:

    dead        one word: 1 once a wait of this process was in vain; it waits no more
    calls       for each of its B blocks, the calls it has made
    meetings    for each block, how often it has come to a barrier
    arrivals    for each block and each process, the last meeting that process's block of the same number has come to

Blocks with one number meet each other and nobody else, so all processes must launch the same number of them, and no more
than the device runs at once. A block that comes writes the number of the meeting at every peer, then waits until its own
header shows that number, or a later one, for each. All numbers are counted on the device and nothing that the host passes
changes from call to call, so a captured CUDA graph may be replayed.

Ordering: counting the meeting is an atomic operation that releases what the block wrote before to the whole system; what
is read of the arrivals is acquired. Peers are written by plain stores, because PCIe carries no atomic operation from one
GPU to another's memory, and every process polls its own memory, which costs the link nothing.

Waiting is bounded by a number of polls, not by a clock: there is none that a compiled kernel and the interpreter can both
read. A poll takes about a microsecond on a GPU.
"""

import os

import triton
import triton.language as tl
from triton import knobs

_WORD_BYTES = 4


def _offer_core() -> None:
    os.sched_yield()


@triton.jit
def _nothing():
    pass


# In the interpreter processes may be more than the cores, and those that wait must not keep the others from coming.
_pause = _offer_core if knobs.runtime.interpret else _nothing


def header_bytes(num_blocks: int, world_size: int) -> int:
    """Bytes of the header, to a multiple of 128, so that what follows it lies well for any load."""
    num_words = 1 + 2 * num_blocks + num_blocks * world_size
    return -(-num_words * _WORD_BYTES // 128) * 128


@triton.jit
def begin_call(headers, rank):
    """The number of this block's call, counted from 0, and 1 if a wait was in vain before, else 0."""
    words = _words(headers, rank)
    return tl.load(words + 1 + tl.program_id(0)), tl.load(words)


@triton.jit
def end_call(headers, rank, number, dead, late, failure):
    """Count the call. If somebody was ``late`` for the first time: remember it here and in ``failure``, for the host."""
    words = _words(headers, rank)
    tl.debug_barrier()  # all threads have read the number
    tl.store(words + 1 + tl.program_id(0), number + 1)
    if (late != 0) & (dead == 0):
        tl.store(words, 1)
        tl.store(failure, late)


@triton.jit
def meet(headers, rank, max_polls, WORLD: tl.constexpr):
    """Wait for this block's peers; returns a bit for each that did not come within ``max_polls``.

    ``headers``: addresses of all processes' headers (int64).
    """
    block = tl.program_id(0)
    num_blocks = tl.num_programs(0)
    arrivals = 1 + 2 * num_blocks + block * WORLD
    tl.debug_barrier()  # all threads have written what the peers are to read
    meetings = _words(headers, rank) + 1 + num_blocks + block
    meeting = tl.atomic_add(meetings, 1, sem="acq_rel", scope="sys") + 1
    for peer in range(WORLD):
        tl.store(_words(headers, peer) + arrivals + rank, meeting)
    late = tl.full((), 0, tl.int32)
    for peer in range(WORLD):
        # Once one peer has used up the time, the others are looked at, and not waited for.
        polls = tl.where(late == 0, max_polls, 0)
        late |= _wait(_words(headers, rank) + arrivals + peer, meeting, polls) << peer
    tl.debug_barrier()  # no thread reads before the one that waited has seen all
    return late


@triton.jit
def _wait(arrival, meeting, max_polls):
    """Until ``arrival`` has reached ``meeting``; 1 if it had not in all of 1 + ``max_polls`` looks, else 0."""
    behind = meeting - tl.atomic_add(arrival, 0, sem="acquire", scope="sys")  # may wrap around, as both numbers do
    while (behind > 0) & (max_polls > 0):
        _pause()
        behind = meeting - tl.atomic_add(arrival, 0, sem="acquire", scope="sys")
        max_polls -= 1
    return (behind > 0).to(tl.int32)


@triton.jit
def _words(headers, process):
    return tl.load(headers + process).to(tl.pointer_type(tl.int32))
