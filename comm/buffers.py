"""A pool of preallocated buffers: one thread fills slots, another uses them, and each waits for the other.

It streams pieces that do not fit in memory at once, such as a layer's weights or gradients. A piece holds a slot from the
request until its last user releases it. Slots are taken in turn, or by number; with two slots one is filled while the other
is used, and memory is constant. A piece that changes is saved before its slot is free again. Three conditions hold, and
``check_order`` verifies them in a trace:

    C1  a piece is used only after it has arrived completely
    C2  a slot is refilled only after the use of its piece has ended, and the piece has been saved if it must be
    C3  a piece is fetched again only after its changes from the last use have been saved

On CUDA both threads only queue work: the slot's events make the queues wait for each other, and the trace has the times of
queueing. Source: YaFSDP, whose buffers have owners too (github.com/yandex/YaFSDP).
"""

import math
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

PAGE_BYTES = 4096
_TRACED_EVENTS = 1 << 16


class BufferConflictError(RuntimeError):
    """A slot was used out of order: a bug in the caller, which would otherwise have computed with wrong data."""


def page_aligned(num_bytes: int, device: torch.device, *, pinned: bool = False) -> Tensor:
    """(num_bytes,) uint8 at a page boundary, as direct disk I/O needs."""
    room = torch.empty(num_bytes + PAGE_BYTES, dtype=torch.uint8, device=device, pin_memory=pinned)
    start = -room.data_ptr() % PAGE_BYTES
    return room[start : start + num_bytes]


class SlotEvent(NamedTuple):
    """One event of a slot. ``kind``: fill, filled, ask, use, keep, release, save, saved; ``ask`` has no slot (-1)."""

    at_s: float  # perf_counter
    kind: str
    owner: int
    slot: int


class Slot:
    """One buffer and its state: free, filling, filled, used, then free; with saving, released and saving before free."""

    def __init__(self, number: int, num_bytes: int, device: torch.device, *, pinned: bool) -> None:
        self.number = number
        self.buffer = page_aligned(num_bytes, device, pinned=pinned)
        self.owner: int | None = None
        self.state = "free"
        cuda = device.type == "cuda"
        self._filled = torch.cuda.Event() if cuda else None
        self._released = torch.cuda.Event() if cuda else None

    def mark_filled(self) -> None:
        if self._filled is not None:
            self._filled.record(torch.cuda.current_stream())

    def mark_released(self) -> None:
        if self._released is not None:
            self._released.record(torch.cuda.current_stream())

    def await_filled(self) -> None:
        if self._filled is not None:
            torch.cuda.current_stream().wait_event(self._filled)

    def await_released(self) -> None:
        if self._released is not None:
            torch.cuda.current_stream().wait_event(self._released)


class BufferPool:
    """Slots shared by one thread that fills and one that uses. A piece's number is its slot's owner.

    The filling thread also saves, on CUDA in the same queue.

    Cost: ``num_slots * slot_bytes`` on ``device``, from the start; a lock and a clock reading per call.
    """

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        device: torch.device,
        *,
        pinned: bool = False,
        saves: bool = False,
        traced: bool = False,
    ) -> None:
        """
        Args:
            saves: a released piece must be saved (``save``, ``saved``) before its slot is free.
            traced: record ``events`` for ``check_order``; otherwise they stay empty.
        """
        self._saves = saves
        self.slots = tuple(Slot(number, slot_bytes, device, pinned=pinned) for number in range(num_slots))
        self._traced = traced
        self.events: deque[SlotEvent] = deque(maxlen=_TRACED_EVENTS)
        self._next = 0  # the slot to fill next
        self._changed = threading.Condition()
        self.num_moves = 0  # rises while a piece receives bytes
        self._closed: BaseException | None = None

    def fill(self, owner: int, number: int | None = None, timeout_s: float = math.inf) -> Slot:
        """Reserve slot ``number`` (default: the one after the slot filled last) for ``owner`` once it is free.

        Raises:
            BufferConflictError: ``owner`` already holds a slot, and waiting for this one cannot free it.
            TimeoutError: the slot was not free after ``timeout_s``. (No deadline by default: the worker may be idle.)
            Exception: the error given to ``close``.
        """
        with self._changed:
            slot = self.slots[self._next if number is None else number]
            # A slot taken by number may be requested while its piece still waits for use: gradients wait for a slow lane.
            patient = slot.state == "used" or (number is not None and slot.state == "filled")
            if any(other.owner == owner and not (other is slot and patient) for other in self.slots):
                raise BufferConflictError(f"{owner} has a slot already: {self._describe()}")
            deadline = time.monotonic() + timeout_s
            while slot.state != "free":
                self._check_open()
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"slot {slot.number} was not free after {timeout_s:g} s: {self._describe()}")
                self._changed.wait(None if timeout_s == math.inf else max(0.0, deadline - time.monotonic()))
            self._check_open()
            self._next = (slot.number + 1) % len(self.slots)
            slot.owner, slot.state = owner, "filling"
            self._note("fill", owner, slot.number)
        slot.await_released()
        return slot

    def moved(self) -> None:
        """Record that more bytes have arrived; this extends the deadline of a waiting ``use``."""
        self.num_moves += 1

    def filled(self, owner: int) -> None:
        """Mark ``owner`` as arrived completely (on CUDA: its transfer is in the caller's queue)."""
        with self._changed:
            slot = self._slot_of(owner, "filling")
            slot.mark_filled()
            slot.state = "filled"
            self._note("filled", owner, slot.number)
            self._changed.notify_all()

    def use(self, owner: int, timeout_s: float) -> Slot:
        """Return the slot with ``owner`` once it has arrived.

        Raises:
            TimeoutError: no byte has arrived for ``timeout_s``.
            Exception: the error given to ``close``.
        """
        with self._changed:
            self._note("ask", owner, -1)
            seen, deadline = self.num_moves, time.monotonic() + timeout_s
            while not any(slot.owner == owner and slot.state == "filled" for slot in self.slots):
                self._check_open()
                self._changed.wait(max(0.0, min(1.0, deadline - time.monotonic())))
                if self.num_moves != seen:
                    seen, deadline = self.num_moves, time.monotonic() + timeout_s
                elif time.monotonic() >= deadline:
                    raise TimeoutError(f"nothing has come for {timeout_s:g} s: {self._describe()}")
            slot = self._slot_of(owner, "filled")
            slot.state = "used"
            self._note("use", owner, slot.number)
        slot.await_filled()
        return slot

    def keep(self, owner: int) -> None:
        """End the use of ``owner`` for now; its slot stays filled for another use."""
        with self._changed:
            slot = self._slot_of(owner, "used")
            slot.state = "filled"
            self._note("keep", owner, slot.number)
            self._changed.notify_all()

    def release(self, owner: int) -> None:
        """End the use of ``owner`` (on CUDA: the work is in the caller's queue)."""
        with self._changed:
            slot = self._slot_of(owner, "used")
            slot.mark_released()
            slot.owner, slot.state = (owner, "released") if self._saves else (None, "free")
            self._note("release", owner, slot.number)
            self._changed.notify_all()

    def save(self, owner: int) -> Slot:
        """Return the slot with ``owner``, to be saved, once its use has ended. No deadline, as for ``fill``."""
        with self._changed:
            while not any(slot.owner == owner and slot.state == "released" for slot in self.slots):
                self._check_open()
                self._changed.wait()
            slot = self._slot_of(owner, "released")
            slot.state = "saving"
            self._note("save", owner, slot.number)
        slot.await_released()
        return slot

    def saved(self, owner: int) -> None:
        """Mark ``owner`` as saved (on CUDA: its transfer is in the caller's queue)."""
        with self._changed:
            slot = self._slot_of(owner, "saving")
            slot.owner, slot.state = None, "free"
            self._note("saved", owner, slot.number)
            self._changed.notify_all()

    def close(self, reason: BaseException) -> None:
        """Make all waiting and later calls raise ``reason``. The first reason stays."""
        with self._changed:
            self._closed = self._closed or reason
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed

    def _slot_of(self, owner: int, state: str) -> Slot:
        for slot in self.slots:
            if slot.owner == owner and slot.state == state:
                return slot
        raise BufferConflictError(f"{owner} has no slot that is {state}: {self._describe()}")

    def _describe(self) -> str:
        return ", ".join(
            f"slot {slot.number} is {slot.state}" + ("" if slot.owner is None else f" for {slot.owner}")
            for slot in self.slots
        )

    def _note(self, kind: str, owner: int, slot: int) -> None:
        if self._traced:
            self.events.append(SlotEvent(time.perf_counter(), kind, owner, slot))


_BEFORE = {  # the allowed previous events of a slot; that of "fill" depends on whether the pool saves
    "filled": ("fill",),
    "use": ("filled", "keep"),
    "keep": ("use",),
    "release": ("use",),
    "save": ("release",),
    "saved": ("save",),
}


def check_order(events: Iterable[SlotEvent], *, saves: bool = False) -> None:
    """Check C1, C2 and C3 in a trace that begins with free slots.

    Args:
        saves: whether the pool saves.
    Raises:
        BufferConflictError: a condition does not hold; names it and the owner.
    """
    OrderCheck(saves=saves).go_on(events)


class OrderCheck:
    """An incremental ``check_order``: each part of a trace costs only its own length."""

    def __init__(self, *, saves: bool = False) -> None:
        self._end = "saved" if saves else "release"
        self._before = {**_BEFORE, "fill": (self._end,)}
        self._inside: dict[int, tuple[int, str]] = {}  # by slot: the owner and its last event

    def go_on(self, events: Iterable[SlotEvent]) -> None:
        """Check the next part. Raises as ``check_order`` does; do not continue after an error."""
        for event in events:
            if event.kind != "ask":
                self._check(event)
                self._inside[event.slot] = (event.owner, event.kind)

    def _check(self, event: SlotEvent) -> None:
        owner, last = self._inside.get(event.slot, (event.owner, self._end))
        if event.kind == "fill" and last != self._end:
            raise BufferConflictError(
                f"C2: slot {event.slot} was filled for {event.owner} when {owner} had come to {last!r}"
            )
        for slot, (other, kind) in self._inside.items():
            if event.kind == "fill" and slot != event.slot and other == event.owner and kind != self._end:
                raise BufferConflictError(
                    f"C3: slot {event.slot} was filled for {event.owner}, which had come to {kind!r} in slot {slot}"
                )
        if last not in self._before[event.kind] or (event.kind != "fill" and owner != event.owner):
            raise BufferConflictError(
                f"C1: {event.kind!r} of {event.owner} in slot {event.slot}, where {owner} had come to {last!r}"
            )
