"""Sums over shared buffers, with threads as processes: kernels hold no GIL, so they really run at once."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tightwire.kernels.cpu.library import lib, struct
from tightwire.kernels.cpu.run import NUMBER_KIND
from tightwire.kernels.cpu.shared_sums import DONE, MISMATCH, call_of, call_word, make_board

CHUNK_BYTES = 1024
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KERNELS = ("tw_one_shot", "tw_two_shot")


class Board:
    """Lines and buffers of ``num_processes`` in this process's memory, and each process's view of them."""

    def __init__(self, num_processes: int, num_naps: int = 1) -> None:
        self._lines = torch.zeros(num_processes, 64, dtype=torch.int64)
        self._buffers = torch.zeros(num_processes, 2, CHUNK_BYTES, dtype=torch.uint8)
        places = [
            (line.data_ptr(), (even.data_ptr(), odd.data_ptr()))
            for line, (even, odd) in zip(self._lines, self._buffers, strict=True)
        ]
        self.views = [
            make_board(own, places, num_spins=10, num_naps=num_naps, chunk_bytes=CHUNK_BYTES)
            for own in range(num_processes)
        ]
        self._pool = ThreadPoolExecutor(num_processes)

    def call(self, process: int, kernel: str, x: Tensor, step: int = 0) -> tuple[Tensor, int]:
        """One call of a kernel: what it has written, and the step or status it returned."""
        out = torch.full_like(x, torch.nan)
        return out, self.go_on(process, kernel, x, out, step)

    def go_on(self, process: int, kernel: str, x: Tensor, out: Tensor, step: int) -> int:
        given = self.views[process], x.data_ptr(), out.data_ptr(), x.numel(), NUMBER_KIND[x.dtype]
        return getattr(lib, kernel)(*given, step)

    def run(self, calls: list[tuple[str, Tensor]]) -> list[tuple[Tensor, int]]:
        """Each process makes its call, again and again until it is over."""

        def persist(process: int) -> tuple[Tensor, int]:
            kernel, x = calls[process]
            out, step = self.call(process, kernel, x)
            while step >= 0:
                step = self.go_on(process, kernel, x, out, step)
            return out, step

        return list(self._pool.map(persist, range(len(calls)), timeout=120))

    def close(self) -> None:
        self._pool.shutdown()


@pytest.fixture
def open_board() -> Iterator[Callable[[int], Board]]:
    boards: list[Board] = []

    def make(num_processes: int) -> Board:
        boards.append(Board(num_processes))
        return boards[-1]

    yield make
    for board in boards:
        board.close()


def _inputs(num_processes: int, num_elems: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_elems)
    scales = torch.exp2(torch.randint(-6, 7, (num_processes, num_elems), generator=generator).float())
    return list((torch.randn(num_processes, num_elems, generator=generator) * scales).to(dtype))


def _sum(inputs: list[Tensor]) -> Tensor:
    total = inputs[0].float()
    for x in inputs[1:]:
        total = total + x.float()
    return total.to(inputs[0].dtype)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("num_processes", [1, 2, 3, 5])
def test_sums_in_order_whatever_the_length(open_board: Callable[[int], Board], kernel: str, num_processes: int) -> None:
    """Below a vector, around blocks and slices of 64, around chunks, and several chunks: to the bit."""
    board = open_board(num_processes)
    for dtype in DTYPES:
        for num_elems in (1, 7, 16, 63, 64, 65, 130, 255, 256, 257, 511, 512, 513, 2000):
            inputs = _inputs(num_processes, num_elems, dtype)
            before = [x.clone() for x in inputs]
            results = board.run([(kernel, x) for x in inputs])
            for out, status in results:
                assert status == DONE
                assert torch.equal(out, _sum(before)), f"{num_elems} {dtype}"
            assert all(map(torch.equal, inputs, before))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_at_the_edges(open_board: Callable[[int], Board], kernel: str, dtype: torch.dtype) -> None:
    """Infinities, NaN, zeros of both signs, denormals and overflow come out as torch's float32 sum rounded once."""
    info = torch.finfo(dtype)
    values = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, info.max, -info.max, info.tiny, info.smallest_normal / 4]
    a, b = torch.cartesian_prod(torch.tensor(values), torch.tensor(values)).to(dtype).unbind(1)
    inputs = [a.contiguous(), b.contiguous()]

    results = open_board(2).run([(kernel, x) for x in inputs])

    want = _sum(inputs)
    for out, _ in results:
        assert torch.equal(out.isnan(), want.isnan())
        assert torch.equal(out.nan_to_num(0.0).view(torch.uint8), want.nan_to_num(0.0).view(torch.uint8))
    assert torch.equal(results[0][0].view(torch.uint8), results[1][0].view(torch.uint8))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_wait_is_bounded_and_goes_on_where_it_stopped(open_board: Callable[[int], Board], kernel: str) -> None:
    board = open_board(2)
    inputs = _inputs(2, 3 * CHUNK_BYTES // 4, torch.float32)

    out, step = board.call(0, kernel, inputs[0])
    assert step == 1, "published its first turn and found nobody"
    assert board.go_on(0, kernel, inputs[0], out, step) == 1, "still nobody"
    other, other_step = board.call(1, kernel, inputs[1])
    assert other_step > 1, "found the first one's turn"
    while step >= 0 or other_step >= 0:  # each in turn, in this one thread
        step = board.go_on(0, kernel, inputs[0], out, step) if step >= 0 else step
        other_step = board.go_on(1, kernel, inputs[1], other, other_step) if other_step >= 0 else other_step

    assert step == other_step == DONE
    assert torch.equal(out, _sum(inputs)) and torch.equal(other, out)


@pytest.mark.parametrize(
    ("kernel", "x"),
    [
        ("tw_one_shot", torch.ones(9)),
        ("tw_one_shot", torch.ones(8, dtype=torch.bfloat16)),
        ("tw_two_shot", torch.ones(8)),
        ("tw_one_shot", torch.ones(CHUNK_BYTES)),
    ],
    ids=["length", "dtype", "algorithm", "chunks"],
)
def test_mismatching_calls_are_detected_by_all(open_board: Callable[[int], Board], kernel: str, x: Tensor) -> None:
    results = open_board(3).run([("tw_one_shot", torch.ones(8)), (kernel, x), ("tw_one_shot", torch.ones(8))])
    assert [status for _, status in results] == [MISMATCH] * 3


def test_calls_of_different_kinds_follow_each_other(open_board: Callable[[int], Board]) -> None:
    board = open_board(3)
    for call in range(300):
        kernel, dtype = KERNELS[call % 2], DTYPES[call % 3]
        inputs = [torch.full((1 + 37 * call % 700,), float(call % 11 + process), dtype=dtype) for process in range(3)]
        for out, status in board.run([(kernel, x) for x in inputs]):
            assert status == DONE and torch.equal(out, _sum(inputs)), f"call {call}"


def test_a_call_word_tells_what_was_called() -> None:
    word = call_word(7, 15, (1 << 40) - 1, 0xFFFF)
    assert 0 < word < 1 << 63
    assert call_of(word) == (7, 15, (1 << 40) - 1)


# --- sums that a kernel makes on its way ----------------------------------------------------------------------------------

_NUM_SUMS, _NUM_ELEMS, _NOTE_BYTES = 40, 16, 32


class _Process:
    """One process at a board: its sums, each of what the one before gave, and what they write."""

    def __init__(self, own: int, board: Any) -> None:
        self._board = board
        self.x, self.out = torch.full((_NUM_ELEMS,), 1.0 + own), torch.zeros(_NUM_ELEMS)
        self.note = np.frombuffer(bytearray(b"\0" * 8 + b"what it is about, in 24 B"[:24]), dtype=np.int64).copy()
        self.note[0] = 7
        self.shown = np.zeros(_NOTE_BYTES // 8, dtype=np.int64)
        self.stamps_ns = np.zeros((_NUM_SUMS, 2), dtype=np.int64)
        self.given = board, self.x.data_ptr(), self.out.data_ptr(), _NUM_ELEMS, NUMBER_KIND[torch.float32]
        note = self.note.ctypes.data, self.shown.ctypes.data, _NOTE_BYTES, self.stamps_ns.ctypes.data
        self.sums = struct("tw_sums", (*self.given, *note, DONE, 0, 0))

    def make_sums(self) -> None:
        """Make sums, as a kernel does, until one is left."""
        for index in range(self.sums.num_done, _NUM_SUMS):
            if not lib.tw_make_sum(self.sums, index):
                return
            self.x.copy_(self.out)

    def make_all(self) -> None:
        """Make all sums: as a host does, go on with each that was left."""
        sums = self.sums
        while sums.num_done < _NUM_SUMS:
            self.make_sums()
            if (status := sums.status) == DONE:
                continue
            while status != DONE:
                status = lib.tw_one_shot(*self.given, status)
            self.x.copy_(self.out)
            self.stamps_ns[sums.num_done, 1] = time.perf_counter_ns()
            sums.status = DONE
            sums.num_done += 1

    def num_seen(self) -> int:
        """Follow the sums in a thread beside; return how many were seen done."""
        return next((i for i in range(_NUM_SUMS) if not lib.tw_await_sum(self.sums, i)), _NUM_SUMS)

    def follow_all(self) -> None:
        while self.num_seen() < _NUM_SUMS:
            time.sleep(0.0001)


def _processes(num: int) -> tuple[list[_Process], Board]:
    board = Board(num, num_naps=20)
    return [_Process(own, view) for own, view in enumerate(board.views)], board


def test_sums_follow_each_other_and_are_noted_and_timed() -> None:
    processes, _kept = _processes(3)
    before_ns = time.perf_counter_ns()
    with ThreadPoolExecutor(6) as pool:
        makers = [pool.submit(process.make_all) for process in processes]
        followers = [pool.submit(process.follow_all) for process in processes]
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


def test_a_sum_that_a_rank_misses_is_left_by_all_threads() -> None:
    processes, _kept = _processes(2)
    process = processes[0]
    with ThreadPoolExecutor(1) as pool:
        follower = pool.submit(process.num_seen)
        process.make_sums()
        assert follower.result(timeout=120) == 0
    begun, done, status = process.sums.num_begun, process.sums.num_done, process.sums.status
    assert (begun, done, status) == (1, 0, 1), "published its turn and found nobody"
    assert process.shown[0] == 8
    assert process.stamps_ns[0, 0] > 0 and process.stamps_ns[0, 1] == 0
