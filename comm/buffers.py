"""Buffers that are allocated once and change hands: whoever fills one and whoever works with it wait for each other.

What is too large to have at once comes piece by piece: weights of a layer, or its gradients. A piece has a slot from the
moment it is asked for until its last user has released it. Slots are taken in turns, or named by whoever fills them; with
two of them one is filled while the other is worked with, and memory is a constant. Where the work changes a piece, it is
saved before its slot is free again. Three conditions hold, and ``check_order`` proves them from a trace:

    C1  a piece is worked with only after it has come whole
    C2  a slot is filled anew only after the work with what was in it has ended, and after that has been saved
    C3  a piece is fetched anew only after what was done to it the last time has been saved

On CUDA both ends queue work and go on: there the slot's events make the queues wait for each other, and the trace has the
times at which work was queued. Source: YaFSDP, whose buffers have owners too (github.com/yandex/YaFSDP).
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
    """A slot was used out of turn: an error of the program, which would otherwise have worked with wrong numbers."""


def page_aligned(num_bytes: int, device: torch.device, *, pinned: bool = False) -> Tensor:
    """(num_bytes,) uint8 at the address of a page: what a disk can write to around the page cache."""
    room = torch.empty(num_bytes + PAGE_BYTES, dtype=torch.uint8, device=device, pin_memory=pinned)
    start = -room.data_ptr() % PAGE_BYTES
    return room[start : start + num_bytes]


class SlotEvent(NamedTuple):
    """What happened to a slot. ``kind``: fill, filled, ask, use, keep, release, save, saved; ``ask`` is of no slot (-1)."""

    at_s: float  # perf_counter
    kind: str
    owner: int
    slot: int


class Slot:
    """One buffer and whose it is: from free by filling and filled to used; then, maybe by released and saving, to free."""

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
    """Slots between one thread that fills and one that works. Pieces are known by a number, their owner's.

    The thread that fills also saves, on CUDA in the same queue.

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
            saves: a piece that is released is to be saved (``save``, ``saved``) before its slot is free.
            traced: whether ``events`` has what happens, for ``check_order``; else it stays empty.
        """
        self._saves = saves
        self.slots = tuple(Slot(number, slot_bytes, device, pinned=pinned) for number in range(num_slots))
        self._traced = traced
        self.events: deque[SlotEvent] = deque(maxlen=_TRACED_EVENTS)
        self._next = 0  # the slot that is filled next
        self._changed = threading.Condition()
        self.num_moves = 0  # grows while what is being filled gets more of its bytes
        self._closed: BaseException | None = None

    def fill(self, owner: int, number: int | None = None, timeout_s: float = math.inf) -> Slot:
        """Slot ``number`` (default: the one after the slot filled last), to be filled for ``owner``, once it is free.

        Raises:
            BufferConflictError: ``owner`` has a slot already, and not this one until it is released.
            TimeoutError: it was not free after ``timeout_s``. (By default there is no deadline: the worker may be idle.)
            Exception: what ``close`` was given.
        """
        with self._changed:
            slot = self.slots[self._next if number is None else number]
            # By name a slot may be asked for while its piece still waits to be used, as gradients do for a slow lane.
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

    def keep(self, owner: int) -> None:
        """The work with ``owner`` has ended for now: its slot stays, to be used again or by another."""
        with self._changed:
            slot = self._slot_of(owner, "used")
            slot.state = "filled"
            self._note("keep", owner, slot.number)
            self._changed.notify_all()

    def release(self, owner: int) -> None:
        """The work with ``owner`` has ended (on CUDA: is in the caller's queue)."""
        with self._changed:
            slot = self._slot_of(owner, "used")
            slot.mark_released()
            slot.owner, slot.state = (owner, "released") if self._saves else (None, "free")
            self._note("release", owner, slot.number)
            self._changed.notify_all()

    def save(self, owner: int) -> Slot:
        """The slot with ``owner``, to be saved, once the work with it has ended. There is no deadline, as for ``fill``."""
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
        """What was done to ``owner`` is where it comes from (on CUDA: what takes it there is in the caller's queue)."""
        with self._changed:
            slot = self._slot_of(owner, "saving")
            slot.owner, slot.state = None, "free"
            self._note("saved", owner, slot.number)
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
        if self._traced:
            self.events.append(SlotEvent(time.perf_counter(), kind, owner, slot))


_BEFORE = {  # what may have happened last to a slot; the first, once it is free, depends on whether its pool saves
    "filled": ("fill",),
    "use": ("filled", "keep"),
    "keep": ("use",),
    "release": ("use",),
    "save": ("release",),
    "saved": ("save",),
}


def check_order(events: Iterable[SlotEvent], *, saves: bool = False) -> None:
    """Whether C1, C2 and C3 hold in a trace that begins with free slots.

    Args:
        saves: of a pool that saves.
    Raises:
        BufferConflictError: one does not; says which, for whom.
    """
    OrderCheck(saves=saves).go_on(events)


class OrderCheck:
    """``check_order`` of a trace that is told in parts: what it costs is of the part alone."""

    def __init__(self, *, saves: bool = False) -> None:
        self._end = "saved" if saves else "release"
        self._before = {**_BEFORE, "fill": (self._end,)}
        self._inside: dict[int, tuple[int, str]] = {}  # by slot: whose piece, and the last that happened to it

    def go_on(self, events: Iterable[SlotEvent]) -> None:
        """Raises as ``check_order`` does; after that no part is worth telling."""
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
