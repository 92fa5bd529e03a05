"""Slots change hands in order: filled, used, released, filled anew; who breaks the order is told, and the trace shows it."""

import ctypes
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import pytest
import torch

from tightwire.bench.stream.order import OrderCheck
from tightwire.buffers import BufferConflictError, BufferPool, SharedUses, page_aligned

CPU = torch.device("cpu")


def pool_of(num_buffers: int = 2) -> BufferPool:
    return BufferPool(num_buffers, 64, CPU, traced=True)


@pytest.mark.parametrize("num_buffers", [1, 2, 3])
def test_every_piece_arrives_whole_whatever_the_delays(num_buffers: int) -> None:
    pool, draw = pool_of(num_buffers), random.Random(num_buffers)
    delays = [draw.choice([0.0, 0.0, 0.001, 0.003]) for _ in range(80)]

    def fill() -> None:
        for piece in range(40):
            buffer = pool.fill(piece)
            time.sleep(delays[piece])
            buffer.memory.fill_(piece)
            pool.filled(piece)

    thread = threading.Thread(target=fill)
    thread.start()
    for piece in range(40):
        buffer = pool.use(piece, timeout_s=10)
        time.sleep(delays[40 + piece])
        assert buffer.memory.tolist() == [piece] * 64
        pool.release(piece)
    thread.join()
    OrderCheck().check(pool.events)
    assert {buffer.state for buffer in pool.buffers} == {"free"}
    assert [event.buffer for event in pool.events if event.kind == "fill"] == [i % num_buffers for i in range(40)]


def test_pieces_that_wait_for_their_buffers_are_filled_in_order_as_these_become_free() -> None:
    """The caller does so itself, in ``release``: no thread decides when."""
    pool, begun = pool_of(), list[int]()
    for piece in range(4):
        pool.fill_later(piece, piece % 2, lambda piece=piece: begun.append(piece))
    assert begun == [0, 1]
    for piece in (1, 0):  # the buffer of 3 is free first, and 3 comes after 2
        pool.filled(piece)
        pool.use(piece, timeout_s=10)
        pool.release(piece)
        assert begun == ([0, 1] if piece else [0, 1, 2, 3])


def test_the_stream_that_fills_begins_behind_what_is_queued_where_the_buffers_were_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their memory may be that of a tensor whose last use is still queued."""
    order: list[str] = []

    class Stream:
        def wait_stream(self, other: object) -> None:
            order.append(f"waits for {other}")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the caller's")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    thread = pool_of().thread("fill", lambda: order.append("fills"), Stream())  # pyright: ignore[reportArgumentType]
    thread.start()
    thread.join()
    assert order == ["waits for the caller's", "fills"]


def test_a_piece_that_does_not_come_ends_in_an_error_and_one_that_moves_is_waited_for() -> None:
    pool = pool_of()
    pool.fill(7)
    with pytest.raises(TimeoutError, match=r"no bytes arrived for 0\.05 s: buffer 0 is filling for 7"):
        pool.use(7, timeout_s=0.05)

    def move() -> None:
        for _ in range(10):
            time.sleep(0.05)
            pool.moved()
        pool.filled(7)

    thread = threading.Thread(target=move)
    thread.start()
    assert pool.use(7, timeout_s=0.3).number == 0  # takes 0.5 s
    thread.join()


def test_both_ends_get_what_closed_the_pool() -> None:
    pool = pool_of(1)
    pool.fill(0)
    errors: list[BaseException] = []

    def expect(call: str, *arguments: float) -> None:
        try:
            getattr(pool, call)(*arguments)
        except ValueError as error:
            errors.append(error)

    threads = [threading.Thread(target=expect, args=("use", 0, 30)), threading.Thread(target=expect, args=("fill", 1))]
    for thread in threads:
        thread.start()
    cause = ValueError("the source broke")
    pool.close(cause)
    pool.close(ValueError("later"))
    for thread in threads:
        thread.join(timeout=60)
    assert errors == [cause, cause]


def test_what_is_out_of_turn_is_refused() -> None:
    pool = pool_of()
    pool.fill(1)
    with pytest.raises(BufferConflictError, match="1 has a buffer already"):
        pool.fill(1)
    with pytest.raises(BufferConflictError, match="1 has no buffer that is used: buffer 0 is filling for 1"):
        pool.release(1)
    with pytest.raises(BufferConflictError, match="2 has no buffer that is filling"):
        pool.filled(2)


@pytest.mark.parametrize("num_buffers", [1, 2, 3])
def test_what_was_done_to_a_piece_is_saved_whatever_the_delays(num_buffers: int) -> None:
    """Thirty rounds over five pieces, each made one larger every time."""
    pool, draw = BufferPool(num_buffers, 64, CPU, saves=True, traced=True), random.Random(num_buffers)
    kept = [torch.full((64,), piece, dtype=torch.uint8) for piece in range(5)]

    def save(piece: int) -> None:
        buffer = pool.save(piece)
        time.sleep(draw.choice([0.0, 0.0, 0.001]))
        kept[piece].copy_(buffer.memory)
        pool.saved(piece)

    def move() -> None:
        for _ in range(30):
            for piece in range(5):
                if piece >= num_buffers:
                    save(piece - num_buffers)
                pool.fill(piece).memory.copy_(kept[piece])
                time.sleep(draw.choice([0.0, 0.0, 0.001]))
                pool.filled(piece)
            for piece in range(5 - num_buffers, 5):
                save(piece)

    thread = threading.Thread(target=move)
    thread.start()
    for round_ in range(30):
        for piece in range(5):
            buffer = pool.use(piece, timeout_s=10).memory
            assert buffer.tolist() == [piece + round_] * 64
            buffer += 1
            time.sleep(draw.choice([0.0, 0.0, 0.001]))
            pool.release(piece)
    thread.join()
    OrderCheck(saves=True).check(pool.events)
    assert [int(piece[0]) for piece in kept] == [30, 31, 32, 33, 34]


def test_who_waits_to_save_gets_what_closed_the_pool() -> None:
    pool = BufferPool(1, 64, CPU, saves=True, traced=True)
    pool.fill(0)
    pool.close(ValueError("the work broke"))
    with pytest.raises(ValueError, match="the work broke"):
        pool.save(0)
    with pytest.raises(BufferConflictError, match="0 has no buffer that is saving: buffer 0 is filling for 0"):
        pool.saved(0)


def test_buffers_begin_at_a_page() -> None:
    for num_bytes in (1, 4096, 10_000):
        buffer = page_aligned(num_bytes, CPU)
        assert buffer.data_ptr() % 4096 == 0
        assert buffer.nbytes == num_bytes


def test_a_slot_is_named_by_who_fills_it_and_kept_for_later() -> None:
    pool = pool_of(3)

    assert pool.fill(5, 2).number == 2
    pool.filled(5)
    for _ in range(2):
        pool.use(5, timeout_s=1)
        pool.keep(5)
    with pytest.raises(BufferConflictError, match="5 has a buffer already"):
        pool.fill(5, 1)
    assert pool.fill(6, 0).number == 0
    assert pool.fill(7).number == 1  # the one after that
    pool.use(5, timeout_s=1)
    pool.release(5)
    OrderCheck().check(pool.events)


def test_a_named_slot_is_filled_anew_when_its_piece_has_been_used() -> None:
    pool = pool_of(2)
    pool.fill(1, 0)
    pool.filled(1)
    with ThreadPoolExecutor(1) as thread:
        again = thread.submit(pool.fill, 1, 0, 5.0)
        pool.use(1, timeout_s=1)
        pool.release(1)
        assert again.result().state == "filling"
    OrderCheck().check(pool.events)


def test_a_slot_that_stays_taken_ends_in_an_error_when_asked_for() -> None:
    pool = pool_of(2)
    pool.fill(1, 0)
    with pytest.raises(TimeoutError, match=r"buffer 0 was not free after 0\.05 s: buffer 0 is filling for 1"):
        pool.fill(2, 0, timeout_s=0.05)


def test_the_same_owner_waits_for_its_own_slot() -> None:
    pool = pool_of(1)
    pool.fill(1)
    pool.filled(1)
    pool.use(1, timeout_s=1)
    thread = threading.Timer(0.05, pool.release, args=(1,))
    thread.start()
    assert pool.fill(1, 0, timeout_s=10).state == "filling"
    thread.join()


def test_pinned_memory_has_the_size_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own would be rounded up: 172 GB for the 140 GB of a 70B model. It is given back on the device that copies it."""
    pinned: dict[int, int] = {}
    here, used_on = [1], list[int]()

    @contextmanager
    def on_device(device: int) -> Iterator[None]:
        here.append(device)
        yield
        here.pop()

    class Runtime:
        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
            pinned[address] = num_bytes
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            assert ctypes.CDLL(None).msync(ctypes.c_void_p(address), 1, 1) == 0, "it was unmapped before"
            del pinned[address]
            used_on.append(here[-1])
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda status: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: used_on.append(here[-1]))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: here[-1])
    monkeypatch.setattr(torch.cuda, "device", on_device)
    memory = page_aligned(3 * 4096 + 5, CPU, pinned=True)
    assert pinned == {memory.data_ptr(): 3 * 4096 + 5} and memory.data_ptr() % 4096 == 0
    part = memory[4096:].fill_(7)
    del memory
    assert len(pinned) == 1 and int(part.sum()) == 7 * len(part)
    here[:] = [0]  # as in a thread that has set no device
    del part
    assert not pinned and used_on == [1, 1] and here == [0]


def test_a_piece_that_several_passes_use_is_released_by_the_last() -> None:
    pool = BufferPool(1, 64, torch.device("cpu"))
    uses = SharedUses(pool, lambda piece: pool.use(piece, timeout_s=10))
    pool.fill(7)
    pool.filled(7)
    assert uses.use(7) is uses.use(7)
    uses.release(7)
    with pytest.raises(TimeoutError, match="buffer 0 is used for 7"):
        pool.fill(8, timeout_s=0.0)
    uses.release(7)
    pool.fill(8, timeout_s=0.0)
