"""Buffers that are allocated once and change hands: whoever fills one and whoever works with it wait for each other.

What is too large to have at once comes piece by piece: weights of a layer, later its gradients. A piece has a slot from the
moment it is asked for until its last user has released it. Slots are taken in turns, so with two of them one is filled
while the other is worked with, and memory is a constant. Two conditions hold, and ``check_order`` proves them from a trace:

    C1  a piece is worked with only after it has come whole
    C2  a slot is filled anew only after the work with what was in it has ended

On CUDA both ends queue work and go on: there the slot's events make the queues wait for each other, and the trace has the
times at which work was queued. Source: YaFSDP, whose buffers have owners too (github.com/yandex/YaFSDP).
"""

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
    """A slot was used out of turn: an error of the program, which would otherwise have worked with wrong numbers."""


def page_aligned(num_bytes: int, device: torch.device, *, pinned: bool = False) -> Tensor:
    """(num_bytes,) uint8 at the address of a page: what a disk can write to around the page cache."""
    room = torch.empty(num_bytes + PAGE_BYTES, dtype=torch.uint8, device=device, pin_memory=pinned)
    start = -room.data_ptr() % PAGE_BYTES
    return room[start : start + num_bytes]


class SlotEvent(NamedTuple):
    """What happened to a slot. ``kind``: fill, filled, ask, use, release; ``ask`` is of no slot (-1)."""

    at_s: float  # perf_counter
    kind: str
    owner: int
    slot: int


class Slot:
    """One buffer and whose it is: state goes from free by filling and filled to used, and back."""

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
    """Slots in rotation, between one thread that fills and one that works. Pieces are known by a number, their owner's.

    Cost: ``num_slots * slot_bytes`` on ``device``, from the start; a lock and two clock readings per call.
    """

    def __init__(self, num_slots: int, slot_bytes: int, device: torch.device, *, pinned: bool = False) -> None:
        self.slots = tuple(Slot(number, slot_bytes, device, pinned=pinned) for number in range(num_slots))
        self.events: deque[SlotEvent] = deque(maxlen=_TRACED_EVENTS)
        self._next = 0  # the slot that is filled next
        self._changed = threading.Condition()
        self.num_moves = 0  # grows while what is being filled gets more of its bytes
        self._closed: BaseException | None = None

    def fill(self, owner: int) -> Slot:
        """The next slot, to be filled for ``owner``, once it is free. There is no deadline: the worker may be idle.

        Raises:
            BufferConflictError: ``owner`` has a slot already.
        """
        with self._changed:
            if any(slot.owner == owner for slot in self.slots):
                raise BufferConflictError(f"{owner} has a slot already: {self._describe()}")
            slot = self.slots[self._next]
            while slot.state != "free":
                self._check_open()
                self._changed.wait()
            self._check_open()
            self._next = (self._next + 1) % len(self.slots)
            slot.owner, slot.state = owner, "filling"
            self._note("fill", owner, slot.number)
        slot.await_released()
        return slot

    def moved(self) -> None:
        """Some more bytes have come; whoever waits for them has reason to wait on."""
        self.num_moves += 1

    def filled(self, owner: int) -> None:
        """``owner`` has come whole (on CUDA: what brings it is in the caller's queue)."""
        with self._changed:
            slot = self._slot_of(owner, "filling")
            slot.mark_filled()
            slot.state = "filled"
            self._note("filled", owner, slot.number)
            self._changed.notify_all()

    def use(self, owner: int, timeout_s: float) -> Slot:
        """The slot with ``owner``, once it has come.

        Raises:
            TimeoutError: no byte has come for ``timeout_s``.
            Exception: what ``close`` was given.
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

    def release(self, owner: int) -> None:
        """The work with ``owner`` has ended (on CUDA: is in the caller's queue)."""
        with self._changed:
            slot = self._slot_of(owner, "used")
            slot.mark_released()
            slot.owner, slot.state = None, "free"
            self._note("release", owner, slot.number)
            self._changed.notify_all()

    def close(self, reason: BaseException) -> None:
        """Nobody waits any more: whoever does, or comes, gets ``reason``. The first reason stays."""
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
        self.events.append(SlotEvent(time.perf_counter(), kind, owner, slot))


def check_order(events: Iterable[SlotEvent]) -> None:
    """Whether C1 and C2 hold in a trace that begins with free slots.

    Raises:
        BufferConflictError: one does not; says which, for whom.
    """
    inside: dict[int, tuple[int, str]] = {}  # by slot: whose piece, and the last that happened to it
    for event in events:
        if event.kind == "ask":
            continue
        owner, last = inside.get(event.slot, (event.owner, "release"))
        if event.kind == "fill" and last != "release":
            raise BufferConflictError(
                f"C2: slot {event.slot} was filled for {event.owner} when {owner} had come to {last!r}"
            )
        wanted = {"fill": "release", "filled": "fill", "use": "filled", "release": "use"}[event.kind]
        if last != wanted or (event.kind != "fill" and owner != event.owner):
            raise BufferConflictError(
                f"C1: {event.kind!r} of {event.owner} in slot {event.slot}, where {owner} had come to {last!r}"
            )
        inside[event.slot] = (event.owner, event.kind)
