"""One-shots that another kernel makes on its way, one after the other, and what is told of them meanwhile.

A program that sums the same buffer again and again, with work in between, need not return to Python for each. Its host
fills a table of the integers below. One thread of the program makes the sums (``make_sum``); others that work on it wait
for them (``await_sum``). Before each sum a note is put where other processes read it, and its first integer counts up: so
one that is stopped tells where. When a peer does not come, the kernel stops with the step that ``one_shot`` returned, for
the host to persist, and to call the program again from behind that sum.
"""

from tightwire.kernels.cpu.shared_all_reduce import DONE, one_shot
from tightwire.kernels.cpu.vector.atomics import clock_ns, load_acquire, store_release, yield_core
from tightwire.kernels.cpu.vector.jit import helper
from tightwire.kernels.cpu.vector.simd import copy_bytes, load_i64, store_i64

(
    BOARD,  # the table of ``shared_all_reduce.board_table``, as are the next four what ``one_shot`` takes
    X,
    OUT,
    NUM_ELEMS,
    KIND,
    NOTE,  # its bytes begin with the number of the sum before the first
    SHOWN,  # where it is put
    NOTE_BYTES,
    STAMPS,  # of each sum, when it was begun and when it was done (``atomics.clock_ns``)
    STATUS,  # DONE, or what the sum that was begun last was left with
    NUM_BEGUN,
    NUM_DONE,
    SUMS_INTS,
) = range(13)

_SPINS = 2000  # some 20 us, as a sum takes when all come at once


@helper
def make_sum(sums: int, index: int) -> bool:
    """Whether sum ``index`` is done; one that is not is the host's to go on with."""
    stamps = load_i64(sums + 8 * STAMPS) + 16 * index
    store_i64(stamps, clock_ns())
    note = load_i64(sums + 8 * NOTE)
    store_i64(note, load_i64(note) + 1)
    copy_bytes(load_i64(sums + 8 * SHOWN), note, load_i64(sums + 8 * NOTE_BYTES))
    store_release(sums + 8 * NUM_BEGUN, index + 1)
    status = one_shot(
        load_i64(sums + 8 * BOARD),
        load_i64(sums + 8 * X),
        load_i64(sums + 8 * OUT),
        load_i64(sums + 8 * NUM_ELEMS),
        load_i64(sums + 8 * KIND),
        0,
    )
    if status != DONE:
        store_release(sums + 8 * STATUS, status)
        return False
    store_i64(stamps + 8, clock_ns())
    store_release(sums + 8 * NUM_DONE, index + 1)
    return True


@helper
def await_sum(sums: int, index: int) -> bool:
    """Whether sum ``index`` is done, in a thread beside the one that makes it; False when that one has left it."""
    spins = 0
    while load_acquire(sums + 8 * NUM_DONE) <= index:
        if load_acquire(sums + 8 * STATUS) != DONE:
            return False
        spins += 1
        if spins > _SPINS:
            yield_core()
    return True
