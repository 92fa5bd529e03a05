"""Sums that a kernel makes on its way, with threads as processes and threads beside them."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from tightwire.kernels.cpu import shared_sums as place
from tightwire.kernels.cpu.shared_all_reduce import DONE, BoardPlace, board_table, one_shot
from tightwire.kernels.cpu.shared_sums import OUT, X, await_sum, make_sum
from tightwire.kernels.cpu.vector.jit import kernel
from tightwire.kernels.cpu.vector.numbers import load_numbers, store_numbers
from tightwire.kernels.cpu.vector.simd import FLOAT32, LANES, load_i64

_NUM_SUMS, _NUM_ELEMS, _NOTE_BYTES = 40, LANES, 32


@kernel
def _sum_again_and_again(sums: int, first: int, stop: int) -> None:
    """Each sum is of the one before: what ``OUT`` holds is put into ``X``."""
    for index in range(first, stop):
        if not make_sum(sums, index):
            return
        total = load_numbers(load_i64(sums + 8 * OUT), FLOAT32, LANES)
        store_numbers(load_i64(sums + 8 * X), total, FLOAT32, LANES)


@kernel
def _follow(sums: int, stop: int) -> int:
    """How many sums were seen done."""
    for index in range(stop):
        if not await_sum(sums, index):
            return index
    return stop


class _Process:
    """One of those at a board: its table of sums, with what stays alive behind it."""

    def __init__(self, own: int, places: list[BoardPlace]) -> None:
        self.board = board_table(own, places, num_spins=10, num_naps=20, chunk_bytes=1024)
        self.x, self.out = torch.full((_NUM_ELEMS,), 1.0 + own), torch.zeros(_NUM_ELEMS)
        self.note = np.frombuffer(bytearray(b"\0" * 8 + b"what it is about, in 24 B"[:24]), dtype=np.int64).copy()
        self.note[0] = 7
        self.shown = np.zeros(_NOTE_BYTES // 8, dtype=np.int64)
        self.stamps_ns = np.zeros((_NUM_SUMS, 2), dtype=np.int64)
        self.table = np.zeros(place.SUMS_INTS, dtype=np.int64)
        for field, value in {
            place.BOARD: self.board.data_ptr(),
            place.X: self.x.data_ptr(),
            place.OUT: self.out.data_ptr(),
            place.NUM_ELEMS: _NUM_ELEMS,
            place.KIND: FLOAT32,
            place.NOTE: self.note.ctypes.data,
            place.SHOWN: self.shown.ctypes.data,
            place.NOTE_BYTES: _NOTE_BYTES,
            place.STAMPS: self.stamps_ns.ctypes.data,
            place.STATUS: DONE,
        }.items():
            self.table[field] = value

    @property
    def address(self) -> int:
        return self.table.ctypes.data

    @property
    def num_done(self) -> int:
        return int(self.table[place.NUM_DONE])


def _processes(num: int) -> tuple[list[_Process], Any]:
    lines = torch.zeros(num, 64, dtype=torch.int64)
    buffers = torch.zeros(num, 2, 1024, dtype=torch.uint8)
    places = [
        BoardPlace(line.data_ptr(), (even.data_ptr(), odd.data_ptr()))
        for line, (even, odd) in zip(lines, buffers, strict=True)
    ]
    return [_Process(own, places) for own in range(num)], (lines, buffers)


def _compile() -> None:
    [alone], _kept = _processes(1)
    _sum_again_and_again(alone.address, 0, 1)
    assert _follow(alone.address, 1) == 1


def test_sums_follow_each_other_and_are_noted_and_timed() -> None:
    _compile()
    processes, _kept = _processes(3)
    before_ns = time.perf_counter_ns()
    with ThreadPoolExecutor(6) as pool:
        makers = [pool.submit(_make_all, process) for process in processes]
        followers = [pool.submit(_follow_all, process) for process in processes]
        for future in (*makers, *followers):
            future.result(timeout=120)
    after_ns = time.perf_counter_ns()
    for process in processes:
        # 1 + 2 + 3, and then three times the last, until float32 holds no more of it
        want = torch.tensor(6.0).double() * 3 ** (_NUM_SUMS - 1)
        assert torch.allclose(process.out.double(), want, rtol=1e-5)
        assert torch.equal(process.out, processes[0].out)
        assert process.shown[0] == process.note[0] == 7 + _NUM_SUMS
        assert process.shown[1:].tobytes() == b"what it is about, in 24 "
        stamps = [before_ns, *process.stamps_ns.flatten().tolist(), after_ns]
        assert stamps == sorted(stamps)


def _make_all(process: _Process) -> None:
    """As a host does it: goes on with a sum that was left, then behind it."""
    table = process.table
    while process.num_done < _NUM_SUMS:
        _sum_again_and_again(process.address, process.num_done, _NUM_SUMS)
        if (status := int(table[place.STATUS])) == DONE:
            continue
        while status != DONE:
            status = one_shot(*(int(given) for given in table[place.BOARD : place.KIND + 1]), status)
        process.x.copy_(process.out)
        process.stamps_ns[process.num_done, 1] = time.perf_counter_ns()
        table[place.STATUS] = DONE
        table[place.NUM_DONE] += 1


def _follow_all(process: _Process) -> None:
    while _follow(process.address, _NUM_SUMS) < _NUM_SUMS:
        time.sleep(0.0001)


def test_a_sum_that_a_rank_misses_is_left_by_all_threads() -> None:
    _compile()
    processes, _kept = _processes(2)
    process = processes[0]
    with ThreadPoolExecutor(1) as pool:
        follower = pool.submit(_follow, process.address, _NUM_SUMS)
        _sum_again_and_again(process.address, 0, _NUM_SUMS)
        assert follower.result(timeout=120) == 0
    begun, done, status = (int(process.table[field]) for field in (place.NUM_BEGUN, place.NUM_DONE, place.STATUS))
    assert (begun, done, status) == (1, 0, 1), "published its turn and found nobody"
    assert process.shown[0] == 8
    assert process.stamps_ns[0, 0] > 0 and process.stamps_ns[0, 1] == 0
