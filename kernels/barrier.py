"""Programs of several processes waiting for each other inside a kernel, by words in memory that all of them map.

Each process owns a header that all others can write, of 32-bit words, zero at first:

    word 0                          1 once a wait of this process was in vain: it waits no more
    words 1 .. B                    calls that each of its B blocks has made
    words 1 + B + b W + p           1 while process p has come to block b's barrier and the owner has not noticed

Blocks with one number meet each other and nobody else, so all processes must launch the same number of them, and no more
than the device runs at once. To come, a block turns its word at each peer from 0 to 1; to go on, it turns each peer's
word in its own header from 1 to 0. Every word is zero again afterwards and nothing is passed in by the host that changes
from call to call, so a captured CUDA graph may be replayed. A word that is still 1 belongs to the barrier before, and the
block waits until the peer has left that one.

Ordering: what a block wrote before it came (release) is seen by those that waited for it (acquire).

Waiting is bounded by a number of polls, not by a clock: there is none that both a compiled kernel and the interpreter can
read. A poll of another GPU's memory takes about a microsecond.
"""

import triton
import triton.language as tl

_WORD_BYTES = 4


def header_bytes(num_blocks: int, world_size: int) -> int:
    """Bytes of the header, to a multiple of 128, so that what follows it lies well for any load."""
    num_words = 1 + num_blocks + num_blocks * world_size
    return -(-num_words * _WORD_BYTES // 128) * 128


@triton.jit
def begin_call(headers, rank):
    """The number of this block's call, counted from the start, and 1 if a wait was in vain before, else 0."""
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
    first = 1 + tl.num_programs(0) + tl.program_id(0) * WORLD
    late = tl.full((), 0, tl.int32)
    tl.debug_barrier()  # all threads have written what the peers are to read
    for peer in range(WORLD):
        # Once one peer has used up the time, the others are looked at, and not waited for.
        polls = tl.where(late == 0, max_polls, 0)
        late |= _turn(_words(headers, peer) + first + rank, 0, 1, polls) << peer
    for peer in range(WORLD):
        polls = tl.where(late == 0, max_polls, 0)
        late |= _turn(_words(headers, rank) + first + peer, 1, 0, polls) << peer
    tl.debug_barrier()  # no thread reads before the one that waited has seen all
    return late


@triton.jit
def _turn(word, before: tl.constexpr, after: tl.constexpr, max_polls):
    """Set ``word`` from ``before`` to ``after``; 1 if it was not ``before`` in all of 1 + ``max_polls`` looks, else 0."""
    seen = tl.atomic_cas(word, before, after, sem="acq_rel", scope="sys")
    polls = max_polls
    while (seen != before) & (polls > 0):
        seen = tl.atomic_cas(word, before, after, sem="acq_rel", scope="sys")
        polls -= 1
    return (seen != before).to(tl.int32)


@triton.jit
def _words(headers, process):
    return tl.load(headers + process).to(tl.pointer_type(tl.int32))
