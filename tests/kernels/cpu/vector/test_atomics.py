"""Ordered words: what is written before a release is there after the acquire that reads it; and the clock."""

import threading
import time

import torch

from tightwire.kernels.cpu.vector.atomics import clock_ns, load_acquire, store_release, yield_core
from tightwire.kernels.cpu.vector.jit import kernel
from tightwire.kernels.cpu.vector.simd import load_i64, store_i64


@kernel
def _write(data: int, word: int, first: int, last: int) -> None:
    """Number by number: the data, then the word that says so, when the other has answered the one before."""
    for number in range(first, last):
        while load_acquire(word + 64) < number - 1:
            yield_core()
        for at in range(0, 512, 8):
            store_i64(data + at, number)
        store_release(word, number)


@kernel
def _read(data: int, word: int, first: int, last: int) -> int:
    """How many of the data were not yet there when the word said so."""
    num_missing = 0
    for number in range(first, last):
        while load_acquire(word) < number:
            yield_core()
        for at in range(0, 512, 8):
            num_missing += load_i64(data + at) != number
        store_release(word + 64, number)
    return num_missing


def test_data_is_there_when_its_number_is() -> None:
    data, words = torch.zeros(64, dtype=torch.int64), torch.zeros(16, dtype=torch.int64)
    _write(data.data_ptr(), words.data_ptr(), 1, 1)  # compile outside the thread
    writer = threading.Thread(target=_write, args=(data.data_ptr(), words.data_ptr(), 1, 4_001))
    writer.start()
    assert _read(data.data_ptr(), words.data_ptr(), 1, 4_001) == 0
    writer.join()


@kernel
def _now_ns() -> int:
    return clock_ns()


def test_the_clock_is_that_of_python() -> None:
    _now_ns()  # compiled
    for _ in range(100):
        before_ns = time.perf_counter_ns()
        now_ns = _now_ns()
        assert before_ns <= now_ns <= time.perf_counter_ns()
