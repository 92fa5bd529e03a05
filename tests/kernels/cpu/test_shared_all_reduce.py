"""The kernels over shared buffers, with threads as processes: kernels hold no GIL, so they really run at once."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from tightwire.kernels.cpu import shared_all_reduce as shared
from tightwire.kernels.cpu.shared_all_reduce import DONE, MISMATCH, BoardPlace
from tightwire.kernels.cpu.vector.simd import NUMBER_KIND

CHUNK_BYTES = 1024
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KERNELS = (shared.one_shot, shared.two_shot)


class Board:
    """Lines and buffers of ``num_processes`` in this process's memory."""

    def __init__(self, num_processes: int) -> None:
        self._lines = torch.zeros(num_processes, 64, dtype=torch.int64)
        self._buffers = torch.zeros(num_processes, 2, CHUNK_BYTES, dtype=torch.uint8)
        places = [
            BoardPlace(line.data_ptr(), (even.data_ptr(), odd.data_ptr()))
            for line, (even, odd) in zip(self._lines, self._buffers, strict=True)
        ]
        self._tables = [
            shared.board_table(own, places, num_spins=10, num_naps=1, chunk_bytes=CHUNK_BYTES)
            for own in range(num_processes)
        ]
        self._pool = ThreadPoolExecutor(num_processes)

    def call(self, process: int, kernel: Any, x: Tensor, step: int = 0) -> tuple[Tensor, int]:
        """One call of a kernel: what it has written, and the step or status it returned."""
        out = torch.full_like(x, torch.nan)
        return out, self.go_on(process, kernel, x, out, step)

    def go_on(self, process: int, kernel: Any, x: Tensor, out: Tensor, step: int) -> int:
        table = self._tables[process].data_ptr()
        return kernel(table, x.data_ptr(), out.data_ptr(), x.numel(), NUMBER_KIND[x.dtype], step)

    def run(self, calls: list[tuple[Any, Tensor]]) -> list[tuple[Tensor, int]]:
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
def make_board() -> Iterator[Callable[[int], Board]]:
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


@pytest.mark.parametrize("kernel", KERNELS, ids=["one_shot", "two_shot"])
@pytest.mark.parametrize("num_processes", [1, 2, 3, 5])
def test_sums_in_order_whatever_the_length(make_board: Callable[[int], Board], kernel: Any, num_processes: int) -> None:
    """Below a vector, around blocks and slices of 64, around chunks, and several chunks: to the bit."""
    board = make_board(num_processes)
    for dtype in DTYPES:
        for num_elems in (1, 7, 16, 63, 64, 65, 130, 255, 256, 257, 511, 512, 513, 2000):
            inputs = _inputs(num_processes, num_elems, dtype)
            before = [x.clone() for x in inputs]
            results = board.run([(kernel, x) for x in inputs])
            for out, status in results:
                assert status == DONE
                assert torch.equal(out, _sum(before)), f"{num_elems} {dtype}"
            assert all(map(torch.equal, inputs, before))


@pytest.mark.parametrize("kernel", KERNELS, ids=["one_shot", "two_shot"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_at_the_edges(make_board: Callable[[int], Board], kernel: Any, dtype: torch.dtype) -> None:
    """Infinities, NaN, zeros of both signs, denormals and overflow come out as torch's float32 sum rounded once."""
    info = torch.finfo(dtype)
    values = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, info.max, -info.max, info.tiny, info.smallest_normal / 4]
    a, b = torch.cartesian_prod(torch.tensor(values), torch.tensor(values)).to(dtype).unbind(1)
    inputs = [a.contiguous(), b.contiguous()]

    results = make_board(2).run([(kernel, x) for x in inputs])

    want = _sum(inputs)
    for out, _ in results:
        assert torch.equal(out.isnan(), want.isnan())
        assert torch.equal(out.nan_to_num(0.0).view(torch.uint8), want.nan_to_num(0.0).view(torch.uint8))
    assert torch.equal(results[0][0].view(torch.uint8), results[1][0].view(torch.uint8))


@pytest.mark.parametrize("kernel", KERNELS, ids=["one_shot", "two_shot"])
def test_a_wait_is_bounded_and_goes_on_where_it_stopped(make_board: Callable[[int], Board], kernel: Any) -> None:
    board = make_board(2)
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
        (shared.one_shot, torch.ones(9)),
        (shared.one_shot, torch.ones(8, dtype=torch.bfloat16)),
        (shared.two_shot, torch.ones(8)),
        (shared.one_shot, torch.ones(CHUNK_BYTES)),
    ],
    ids=["length", "dtype", "algorithm", "chunks"],
)
def test_mismatching_calls_are_detected_by_all(make_board: Callable[[int], Board], kernel: Any, x: Tensor) -> None:
    results = make_board(3).run([(shared.one_shot, torch.ones(8)), (kernel, x), (shared.one_shot, torch.ones(8))])
    assert [status for _, status in results] == [MISMATCH] * 3


def test_calls_of_different_kinds_follow_each_other(make_board: Callable[[int], Board]) -> None:
    board = make_board(3)
    for call in range(300):
        kernel, dtype = KERNELS[call % 2], DTYPES[call % 3]
        inputs = [torch.full((1 + 37 * call % 700,), float(call % 11 + process), dtype=dtype) for process in range(3)]
        for out, status in board.run([(kernel, x) for x in inputs]):
            assert status == DONE and torch.equal(out, _sum(inputs)), f"call {call}"


def test_a_call_word_tells_what_was_called() -> None:
    word = shared.call_word(7, 15, (1 << 40) - 1, 0xFFFF)
    assert 0 < word < 1 << 63
    assert shared.call_of(word) == (7, 15, (1 << 40) - 1)
