"""A pool of preallocated buffers: one thread fills buffers, another uses them, and each waits for the other.

It streams pieces that do not fit in memory at once, such as a layer's weights or gradients. A piece holds a buffer from
the request until its last user releases it; a piece that changes is saved before its buffer is free again. Three
conditions hold, and `bench stream` and tests verify them in a trace (``bench.stream.order``):

    C1  a piece is used only after it has arrived completely
    C2  a buffer is refilled only after the use of its piece has ended, and the piece has been saved if it must be
    C3  a piece is fetched again only after its changes from the last use have been saved

On CUDA both threads only queue work: the buffer's events make the queues wait for each other, and the trace has the
times of queueing. Source: YaFSDP, whose buffers have owners too (github.com/yandex/YaFSDP).
"""

import math
import mmap
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from tightwire.large_file import PAGE_BYTES

_TRACED_EVENTS = 1 << 16


class BufferConflictError(RuntimeError):
    """A buffer was used out of order: a bug in the caller, which would otherwise have computed with wrong data."""


def page_aligned(num_bytes: int, device: torch.device, *, pinned: bool = False) -> Tensor:
    """(num_bytes,) uint8 at a page boundary, as direct disk I/O needs. ``pinned``: on the host, for copies to CUDA devices.

    CUDA pins what is mapped here, because torch's allocator of pinned memory rounds sizes up to powers of two.
    """
    if pinned:
        mapped = mmap.mmap(-1, max(1, num_bytes))
        memory = torch.frombuffer(view := memoryview(mapped), dtype=torch.uint8)
        address = memory.data_ptr()  # of all of it: an empty tensor's is 0
        torch.cuda.check_error(cast(Any, torch.cuda.cudart()).cudaHostRegister(address, len(mapped), 0))
        weakref.finalize(view, _unpin, mapped, address, torch.cuda.current_device()).atexit = False
        return memory[:num_bytes]
    room = torch.empty(num_bytes + PAGE_BYTES, dtype=torch.uint8, device=device)
    start = -room.data_ptr() % PAGE_BYTES
    return room[start : start + num_bytes]


def _unpin(_mapped: mmap.mmap, address: int, device: int) -> None:
    """Unpin what stays mapped until then. A finalizer runs in any thread, whose device may be another rank's."""
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # queued copies still use the memory
        torch.cuda.check_error(cast(Any, torch.cuda.cudart()).cudaHostUnregister(address))


def make_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a CUDA stream for a thread that fills buffers; None on a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


class LayerSource(ABC):
    """Provides the layers of a model to passes, which go through them in order.

    Each call of ``layer(i)`` needs one call of ``release(i)``; the result is valid until the last one. Several passes
    may hold the same layer.
    """

    @abstractmethod
    def layer(self, index: int) -> object:
        """Wait until the layer is on the device, and return it."""

    def release(self, index: int) -> None:
        """End a pass's use of the layer."""

    def close(self) -> None:
        """Stop the threads that fetch layers, if there are any. May be called twice."""


class BufferEvent(NamedTuple):
    """One event of a buffer. ``kind``: fill, filled, ask, use, keep, release, save, saved; ``ask`` has no buffer (-1)."""

    at_s: float  # perf_counter
    kind: str
    owner: int
    buffer: int


class PoolBuffer:
    """One buffer and its state: free, filling, filled, used, then free; with saving, released and saving before free."""

    def __init__(self, number: int, num_bytes: int, device: torch.device, *, pinned: bool) -> None:
        self.number = number
        self.memory = page_aligned(num_bytes, device, pinned=pinned)
        self.owner: int | None = None
        self.state = "free"
        cuda = device.type == "cuda"
        self.was_filled = torch.cuda.Event() if cuda else None
        self.was_released = torch.cuda.Event() if cuda else None


def close_pools(pools: "Iterable[BufferPool]", reason: BaseException) -> None:
    for pool in pools:
        pool.close(reason)


def _record(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.record(torch.cuda.current_stream())


def _wait_for(event: torch.cuda.Event | None) -> None:
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


class BufferPool:
    """Buffers shared by one thread that fills and saves, and one that uses. A piece's number is its buffer's owner.

    ``saves``: a released piece must be saved (``save``, ``saved``) before its buffer is free. ``traced``: record
    ``events``.

    Cost: ``num_buffers * buffer_bytes`` on ``device``, from the start; a lock and a clock reading per call.
    """

    def __init__(
        self,
        num_buffers: int,
        buffer_bytes: int,
        device: torch.device,
        *,
        pinned: bool = False,
        saves: bool = False,
        traced: bool = False,
    ) -> None:
        self.buffers = tuple(PoolBuffer(number, buffer_bytes, device, pinned=pinned) for number in range(num_buffers))
        self.events: deque[BufferEvent] = deque(maxlen=_TRACED_EVENTS)
        self._saves, self._traced = saves, traced
        self._next = 0  # the buffer to fill next
        self._changed = threading.Condition()
        self.num_moves = 0  # rises while a piece receives bytes
        self._closed: BaseException | None = None
        self._waiting = deque[tuple[int, int, Callable[[], object]]]()  # of ``fill_later``

    def fill(self, owner: int, number: int | None = None, timeout_s: float = math.inf) -> PoolBuffer:
        """Reserve buffer ``number`` (default: the one after the buffer filled last) for ``owner`` once it is free.

        Raises BufferConflictError if ``owner`` holds a buffer and waiting for this one cannot free it; TimeoutError
        after ``timeout_s`` (by default never, because the worker may be idle); the error given to ``close``.
        """
        with self._changed:
            buffer = self.buffers[self._next if number is None else number]
            # A buffer taken by number may be requested while its piece still waits for use: gradients wait for a slow lane.
            patient = buffer.state == "used" or (number is not None and buffer.state == "filled")
            if any(other.owner == owner and not (other is buffer and patient) for other in self.buffers):
                raise BufferConflictError(f"{owner} has a buffer already: {self._describe()}")
            deadline = time.monotonic() + timeout_s
            while buffer.state != "free":
                self.check_open()
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"buffer {buffer.number} was not free after {timeout_s:g} s: {self._describe()}")
                self._changed.wait(None if timeout_s == math.inf else max(0.0, deadline - time.monotonic()))
            self.check_open()
            self._next = (buffer.number + 1) % len(self.buffers)
            buffer.owner, buffer.state = owner, "filling"
            self._note("fill", owner, buffer.number)
        _wait_for(buffer.was_released)
        return buffer

    def fill_later(self, owner: int, number: int, begin: Callable[[], object]) -> None:
        """Reserve buffer ``number`` for ``owner`` once it is free, and call ``begin``: now or in a ``release``, in the order of these calls."""
        self._waiting.append((owner, number, begin))
        self._fill_waiting()

    def _fill_waiting(self) -> None:
        while self._waiting and self.buffers[self._waiting[0][1]].state == "free":
            owner, number, begin = self._waiting.popleft()
            self.fill(owner, number)
            begin()

    def moved(self) -> None:
        """Extend the deadline of a waiting ``use``, because more bytes have arrived."""
        self.num_moves += 1

    def filled(self, owner: int) -> None:
        """Mark ``owner`` as arrived completely (on CUDA: its transfer is in the caller's queue)."""
        with self._changed:
            _record(self._buffer_of(owner, "filling").was_filled)
            self._advance("filled", owner, "filling", "filled")

    def use(self, owner: int, timeout_s: float) -> PoolBuffer:
        """Wait for ``owner``'s buffer. Raises TimeoutError: no byte for ``timeout_s``; the error given to ``close``."""
        with self._changed:
            self._note("ask", owner, -1)
            seen, deadline = self.num_moves, time.monotonic() + timeout_s
            while not any(buffer.owner == owner and buffer.state == "filled" for buffer in self.buffers):
                self.check_open()
                self._changed.wait(max(0.0, min(1.0, deadline - time.monotonic())))
                if self.num_moves != seen:
                    seen, deadline = self.num_moves, time.monotonic() + timeout_s
                elif time.monotonic() >= deadline:
                    raise TimeoutError(f"no bytes arrived for {timeout_s:g} s: {self._describe()}")
            buffer = self._advance("use", owner, "filled", "used")
        _wait_for(buffer.was_filled)
        return buffer

    def keep(self, owner: int) -> None:
        """End the use of ``owner`` for now; its buffer stays filled for another use."""
        with self._changed:
            self._advance("keep", owner, "used", "filled")

    def release(self, owner: int) -> None:
        """End the use of ``owner`` (on CUDA: the work is in the caller's queue)."""
        with self._changed:
            _record(self._buffer_of(owner, "used").was_released)
            self._advance("release", owner, "used", "released" if self._saves else "free")
        self._fill_waiting()

    def save(self, owner: int) -> PoolBuffer:
        """Return the buffer with ``owner``, to be saved, once its use has ended. No deadline, as for ``fill``."""
        with self._changed:
            while not any(buffer.owner == owner and buffer.state == "released" for buffer in self.buffers):
                self.check_open()
                self._changed.wait()
            buffer = self._advance("save", owner, "released", "saving")
        _wait_for(buffer.was_released)
        return buffer

    def saved(self, owner: int) -> None:
        """Mark ``owner`` as saved (on CUDA: its transfer is in the caller's queue)."""
        with self._changed:
            self._advance("saved", owner, "saving", "free")

    def close(self, reason: BaseException) -> None:
        """Make all waiting and later calls raise ``reason``. The first reason stays."""
        with self._changed:
            self._closed = self._closed or reason
            self._changed.notify_all()

    def thread(self, name: str, work: Callable[[], object], stream: torch.cuda.Stream | None) -> threading.Thread:
        """Make a thread that runs ``work``, on ``stream`` concurrently with the computation. Its error closes the pool."""

        def run() -> None:
            try:
                with torch.inference_mode(), nullcontext() if stream is None else torch.cuda.stream(stream):
                    work()
            except BaseException as error:  # noqa: BLE001 - raised in the pass that waits for a piece
                self.close(error)

        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())  # the buffers' memory may still be in use there
        return threading.Thread(target=run, name=name, daemon=True)

    def check_open(self) -> None:
        """Raise the error given to ``close``, if it was called."""
        if self._closed is not None:
            raise self._closed

    def _advance(self, kind: str, owner: int, before: str, after: str) -> PoolBuffer:
        """Record event ``kind``: the buffer with ``owner`` goes from state ``before`` to ``after``."""
        buffer = self._buffer_of(owner, before)
        buffer.owner, buffer.state = None if after == "free" else owner, after
        self._note(kind, owner, buffer.number)
        self._changed.notify_all()
        return buffer

    def _buffer_of(self, owner: int, state: str) -> PoolBuffer:
        for buffer in self.buffers:
            if buffer.owner == owner and buffer.state == state:
                return buffer
        raise BufferConflictError(f"{owner} has no buffer that is {state}: {self._describe()}")

    def _describe(self) -> str:
        return ", ".join(
            f"buffer {buffer.number} is {buffer.state}" + ("" if buffer.owner is None else f" for {buffer.owner}")
            for buffer in self.buffers
        )

    def _note(self, kind: str, owner: int, buffer: int) -> None:
        if self._traced:
            self.events.append(BufferEvent(time.perf_counter(), kind, owner, buffer))


class SharedUses:
    """Uses of a pool's pieces by several passes at once: the first pass takes a piece, and the last one releases it."""

    def __init__(self, pool: BufferPool, take: Callable[[int], PoolBuffer]) -> None:
        """``take``: waits for a piece as ``pool.use`` does."""
        self._pool, self._take = pool, take
        self._held: dict[int, tuple[int, PoolBuffer]] = {}  # by piece: the passes that use it, and its buffer

    def use(self, owner: int) -> PoolBuffer:
        """Return the buffer with ``owner``. Each call needs one of ``release``."""
        count, buffer = self._held.get(owner) or (0, self._take(owner))
        self._held[owner] = count + 1, buffer
        return buffer

    def release(self, owner: int) -> None:
        """End one use."""
        count, buffer = self._held.pop(owner)
        if count > 1:
            self._held[owner] = count - 1, buffer
        else:
            self._pool.release(owner)
