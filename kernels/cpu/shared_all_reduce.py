"""Sums over processes that share memory, each in one call without the GIL: copy in, publish, wait, add, copy out.

Processes meet at a *board*: memory that all map, of which each owns a line of words and two buffers. A process tells its
progress by the number of its last turn, in its line. In a turn it

    1. waits until all others have published the turn before, so that nobody reads any more what it writes over,
    2. writes into its buffer of this turn (buffers alternate), and in its line what it calls,
    3. publishes the turn: stores its number with release order,
    4. waits for the others' numbers, loading them with acquire order, and reads their buffers.

Each process describes the board to its own kernels by a table of integers (``board_table``), for addresses differ between
processes. Waiting is bounded: a kernel that finds somebody missing after ``num_naps`` sleeps returns the step it stands at,
to be called again with it; no step waits once it has begun to work.

Sums are float32 in the processes' order with one rounding, the bits of ``comm.summing.sum_in_rank_order``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tightwire.kernels.cpu.vector import simd
from tightwire.kernels.cpu.vector.atomics import load_acquire, nap, store_release, yield_core
from tightwire.kernels.cpu.vector.jit import helper, kernel
from tightwire.kernels.cpu.vector.numbers import load_numbers, size_of, store_numbers
from tightwire.kernels.cpu.vector.simd import BFLOAT16, FLOAT32, LANES, copy_bytes, load_i64, store_i64

# Words of a line.
TURN, CALLS = 0, 1  # two calls, which alternate as the buffers do

# What a kernel returns instead of a step.
DONE, MISMATCH = -1, -2

# Operations of a call; a transport may number more, up to 7.
ONE_SHOT, TWO_SHOT = 1, 2
_OPERATION_SHIFT, _KIND_SHIFT, _DETAIL_SHIFT = 60, 56, 40

# Integers of the table before those of the processes.
_OWN, _NUM_PROCESSES, _NUM_SPINS, _NUM_NAPS, _CHUNK_BYTES, _PROCESSES = 0, 1, 2, 3, 4, 5
# Of one process: its line, its two buffers, and a place to note where the numbers lie that are being added.
_LINE, _BUFFERS, _PART, _PROCESS_INTS = 0, 1, 3, 4

# Numbers added at a time. Slices are cut at multiples of it too: they begin on cache lines, whatever the numbers.
_BLOCK_ELEMS = 64

# Offers of the core before a process that waits sleeps, which suits processes of this board that share a core: one has
# what it waits for after a few. Where the core is wanted by strangers an offer costs a time slice of each of them, while
# a sleeper is woken before them: with two cores and a load of 15, alternating calls of 2, 4 and 8 processes took 87 to
# 148, 243 to 430 and 417 to 879 us each with 8 offers, and 388 to 918, 932 to 3205 and 1174 to 5998 us with 256.
_NUM_OFFERS = 8
_NAP_US = 1  # 15 us in truth


@dataclass(frozen=True, slots=True)
class BoardPlace:
    """Where one process's line and buffers lie in the memory of the process that asks."""

    line: int
    buffers: tuple[int, int]


def board_table(own: int, places: Sequence[BoardPlace], *, num_spins: int, num_naps: int, chunk_bytes: int) -> Tensor:
    """The table that kernels take, int64; keep it alive as long as they run.

    Args:
        own: the calling process's index in ``places``.
        num_spins: looks at another's number before the core is offered to others.
        num_naps: sleeps before a kernel returns to say that somebody is missing.
        chunk_bytes: the most that a turn may write into a buffer, a multiple of 64.
    """
    table = [own, len(places), num_spins, num_naps, chunk_bytes]
    for place in places:
        table += [place.line, *place.buffers, 0]
    return torch.tensor(table, dtype=torch.int64)


def compile_all() -> None:
    """Compile the kernels, or load them from the cache: seconds that a first collective's deadline should not pay."""
    words = torch.zeros(8, dtype=torch.int64)
    place = BoardPlace(words.data_ptr(), (words.data_ptr(), words.data_ptr()))
    table = board_table(0, [place], num_spins=1, num_naps=1, chunk_bytes=64)
    publish(table.data_ptr(), 1, 0)
    wait_for(table.data_ptr(), 0, 1)
    wait_for_all(table.data_ptr(), 1)
    one_shot(table.data_ptr(), 0, 0, 0, FLOAT32, 0)
    two_shot(table.data_ptr(), 0, 0, 0, FLOAT32, 0)


def call_word(operation: int, kind: int = 0, num_elems: int = 0, detail: int = 0) -> int:
    """What a process calls, as all must call alike: compared when a turn is read.

    Args:
        operation: 1 to 7. kind: of the numbers, 0 to 15. num_elems: below 2^40. detail: any 16 bits.
    """
    return operation << _OPERATION_SHIFT | kind << _KIND_SHIFT | detail << _DETAIL_SHIFT | num_elems


def call_of(word: int) -> tuple[int, int, int]:
    """(operation, kind, number of elements) of a ``call_word``."""
    return word >> _OPERATION_SHIFT, word >> _KIND_SHIFT & 15, word & (1 << _DETAIL_SHIFT) - 1


@helper
def _line(table: int, process: int) -> int:
    return load_i64(table + 8 * (_PROCESSES + _PROCESS_INTS * process + _LINE))


@helper
def _buffer(table: int, process: int, turn: int) -> int:
    return load_i64(table + 8 * (_PROCESSES + _PROCESS_INTS * process + _BUFFERS + (turn & 1)))


@helper
def _own_turn(table: int) -> int:
    return load_i64(_line(table, load_i64(table + 8 * _OWN)) + 8 * TURN)


@helper
def _is_at(table: int, process: int, turn: int) -> bool:
    """Whether ``process`` has published ``turn``, after waiting for it within bounds."""
    word = _line(table, process) + 8 * TURN
    for _ in range(load_i64(table + 8 * _NUM_SPINS)):
        if load_acquire(word) >= turn:
            return True
    for _ in range(_NUM_OFFERS):
        if load_acquire(word) >= turn:
            return True
        yield_core()
    for _ in range(load_i64(table + 8 * _NUM_NAPS)):
        if load_acquire(word) >= turn:
            return True
        nap(_NAP_US)
    return load_acquire(word) >= turn


@helper
def _all_at(table: int, turn: int) -> bool:
    for process in range(load_i64(table + 8 * _NUM_PROCESSES)):  # noqa: SIM110, numba has no all()
        if not _is_at(table, process, turn):
            return False
    return True


@helper
def _all_call(table: int, turn: int, call: int) -> bool:
    """Whether every process published this turn of the same call."""
    for process in range(load_i64(table + 8 * _NUM_PROCESSES)):
        if load_i64(_line(table, process) + 8 * (CALLS + (turn & 1))) != call:
            return False
    return True


@helper
def _publish(table: int, turn: int, call: int) -> None:
    line = _line(table, load_i64(table + 8 * _OWN))
    store_i64(line + 8 * (CALLS + (turn & 1)), call)
    store_release(line + 8 * TURN, turn)


@helper
def _part(table: int, process: int) -> int:
    return load_i64(table + 8 * (_PROCESSES + _PROCESS_INTS * process + _PART))


@helper
def _set_parts(table: int, turn: int, offset: int, own: int) -> None:
    """What is added next lies ``offset`` bytes into every buffer of ``turn``; this process's part at ``own``."""
    own_process = load_i64(table + 8 * _OWN)
    for process in range(load_i64(table + 8 * _NUM_PROCESSES)):
        part = own if process == own_process else _buffer(table, process, turn) + offset
        store_i64(table + 8 * (_PROCESSES + _PROCESS_INTS * process + _PART), part)


@helper
def _add_vector(table: int, at: int, kind: int, out: int, count: int) -> None:
    """Sums of up to sixteen numbers, ``at`` bytes into the parts."""
    total = load_numbers(_part(table, 0) + at, kind, count)
    for process in range(1, load_i64(table + 8 * _NUM_PROCESSES)):
        total = simd.add(total, load_numbers(_part(table, process) + at, kind, count))
    store_numbers(out + at, total, kind, count)


@helper
def _add_blocks(table: int, kind: int, out: int, num_blocks: int) -> None:
    """Sums of blocks of 64 numbers: a look at the table serves four vectors."""
    step = LANES * size_of(kind)
    num_processes = load_i64(table + 8 * _NUM_PROCESSES)
    for block in range(num_blocks):
        at = 4 * step * block
        part = _part(table, 0) + at
        a = load_numbers(part, kind, LANES)
        b = load_numbers(part + step, kind, LANES)
        c = load_numbers(part + 2 * step, kind, LANES)
        d = load_numbers(part + 3 * step, kind, LANES)
        for process in range(1, num_processes):
            part = _part(table, process) + at
            a = simd.add(a, load_numbers(part, kind, LANES))
            b = simd.add(b, load_numbers(part + step, kind, LANES))
            c = simd.add(c, load_numbers(part + 2 * step, kind, LANES))
            d = simd.add(d, load_numbers(part + 3 * step, kind, LANES))
        store_numbers(out + at, a, kind, LANES)
        store_numbers(out + at + step, b, kind, LANES)
        store_numbers(out + at + 2 * step, c, kind, LANES)
        store_numbers(out + at + 3 * step, d, kind, LANES)


@helper
def _add_parts(table: int, kind: int, out: int, count: int) -> None:
    num_blocks = count // _BLOCK_ELEMS
    if kind == BFLOAT16:
        _add_blocks(table, BFLOAT16, out, num_blocks)
    elif kind == FLOAT32:
        _add_blocks(table, FLOAT32, out, num_blocks)
    else:
        _add_blocks(table, kind, out, num_blocks)
    for start in range(num_blocks * _BLOCK_ELEMS, count, LANES):
        _add_vector(table, start * size_of(kind), kind, out, count - start)


@kernel
def wait_for(table: int, process: int, turn: int) -> bool:
    """Whether ``process`` has published ``turn``, after a bounded wait."""
    return _is_at(table, process, turn)


@kernel
def wait_for_all(table: int, turn: int) -> bool:
    """Whether all have published ``turn``, after a bounded wait."""
    return _all_at(table, turn)


@kernel
def publish(table: int, turn: int, call: int) -> None:
    """Say that this process has written its buffer of ``turn``."""
    _publish(table, turn, call)


@kernel
def one_shot(table: int, x: int, out: int, num_elems: int, kind: int, step: int) -> int:
    """``out`` becomes the sum of all processes' ``x``: each reads every other's numbers, chunk by chunk.

    Steps of a chunk: write it and publish; read and add. Returns the step to go on from, DONE or MISMATCH.
    """
    number_bytes = size_of(kind)
    chunk = load_i64(table + 8 * _CHUNK_BYTES) // number_bytes
    call = ONE_SHOT << _OPERATION_SHIFT | kind << _KIND_SHIFT | num_elems
    own = load_i64(table + 8 * _OWN)
    while step < 2 * ((num_elems + chunk - 1) // chunk):
        turn = _own_turn(table)
        if not _all_at(table, turn):
            return step
        start = (step >> 1) * chunk
        count = min(chunk, num_elems - start)
        if step & 1 == 0:
            copy_bytes(_buffer(table, own, turn + 1), x + start * number_bytes, count * number_bytes)
            _publish(table, turn + 1, call)
        elif not _all_call(table, turn, call):
            return MISMATCH
        else:
            _set_parts(table, turn, 0, x + start * number_bytes)
            _add_parts(table, kind, out + start * number_bytes, count)
        step += 1
    return DONE


@kernel
def two_shot(table: int, x: int, out: int, num_elems: int, kind: int, step: int) -> int:
    """``out`` becomes the sum of all processes' ``x``: each adds a slice of every chunk and reads the others' sums.

    Steps of a chunk: write the others' slices and publish; add the own slice in the buffer of the next turn and publish;
    read the others' sums. Returns the step to go on from, DONE or MISMATCH.
    """
    number_bytes = size_of(kind)
    num_processes = load_i64(table + 8 * _NUM_PROCESSES)
    chunk = load_i64(table + 8 * _CHUNK_BYTES) // number_bytes
    call = TWO_SHOT << _OPERATION_SHIFT | kind << _KIND_SHIFT | num_elems
    own = load_i64(table + 8 * _OWN)
    while step < 3 * ((num_elems + chunk - 1) // chunk):
        turn = _own_turn(table)
        if not _all_at(table, turn):
            return step
        start = step // 3 * chunk
        count = min(chunk, num_elems - start)
        length = -(-count // (num_processes * _BLOCK_ELEMS)) * _BLOCK_ELEMS
        own_from = min(count, own * length)
        own_to = min(count, own_from + length)
        source = x + start * number_bytes
        target = out + start * number_bytes
        phase = step % 3
        if phase == 0:
            buffer = _buffer(table, own, turn + 1)
            copy_bytes(buffer, source, own_from * number_bytes)
            copy_bytes(buffer + own_to * number_bytes, source + own_to * number_bytes, (count - own_to) * number_bytes)
            _publish(table, turn + 1, call)
        elif not _all_call(table, turn, call):
            return MISMATCH
        elif phase == 1:
            sums = _buffer(table, own, turn + 1)
            _set_parts(table, turn, own_from * number_bytes, source + own_from * number_bytes)
            _add_parts(table, kind, sums, own_to - own_from)
            _publish(table, turn + 1, call)
            copy_bytes(target + own_from * number_bytes, sums, (own_to - own_from) * number_bytes)
        else:
            for process in range(num_processes):
                at = min(count, process * length)
                size = min(count, at + length) - at
                if process != own and size > 0:
                    copy_bytes(target + at * number_bytes, _buffer(table, process, turn), size * number_bytes)
        step += 1
    return DONE
