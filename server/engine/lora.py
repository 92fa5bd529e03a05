"""Assigns adapters to the ranks' slots, and keeps a slot until the last sequence that uses it has ended."""

from collections.abc import Mapping


class SlotsFullError(Exception):
    """Every slot holds an adapter, or one that sequences still use; the message says how many."""


class AdapterTable:
    """The slots of adapters by id. An id is never used twice, so it also names a version of an adapter."""

    def __init__(self, num_slots: int, loaded: Mapping[int, int] | None = None) -> None:
        """``loaded``: slots by id of the adapters that the ranks loaded at start."""
        self._num_slots, self._slots = num_slots, dict(loaded or {})
        self._num_live = dict.fromkeys(self._slots, 0)  # sequences by id, also of unloaded adapters
        self._unloaded: set[int] = set()

    def assign(self, adapter: int) -> int:
        """Return a free slot for a new adapter. SlotsFullError: there is none."""
        free = set(range(self._num_slots)) - set(self._slots.values())
        if not free:
            waiting = f"; {len(self._unloaded)} of them still answer requests" if self._unloaded else ""
            advice = "unload an adapter, or start the server with a larger --max-loras"
            raise SlotsFullError(f"all {self._num_slots} adapter slots are in use{waiting}: {advice}")
        slot = min(free)
        self._slots[adapter], self._num_live[adapter] = slot, 0
        return slot

    def unload(self, adapter: int) -> None:
        """Accept no more sequences of an adapter; unknown ids are ignored. Those that run keep its slot until they end."""
        if adapter in self._slots:
            self._unloaded.add(adapter)
            self._free_unused(adapter)

    def begin(self, adapter: int) -> int | None:
        """Count a new sequence, and return its slot; None if the adapter is not loaded."""
        if adapter not in self._slots or adapter in self._unloaded:
            return None
        self._num_live[adapter] += 1
        return self._slots[adapter]

    def end(self, adapter: int) -> None:
        self._num_live[adapter] -= 1
        self._free_unused(adapter)

    def _free_unused(self, adapter: int) -> None:
        if adapter in self._unloaded and not self._num_live[adapter]:
            del self._slots[adapter], self._num_live[adapter]
            self._unloaded.discard(adapter)
