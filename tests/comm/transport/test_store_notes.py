"""Whom to blame, from what each rank noted, and a store that does not answer."""

import time

import pytest
from torch.distributed import HashStore, Store  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.transport.store_notes import FailureNotes, Note, ranks_at_fault


def _note(*missed: int, timed_out: bool = True) -> Note:
    return Note(timed_out=timed_out, missed=missed, doing="")


@pytest.mark.parametrize(
    ("own", "notes", "want"),
    [
        # A ring of four (this is rank 0): rank 3 waited for rank 2, so this rank waited for rank 3.
        (_note(3), {1: _note(2), 3: _note(2)}, {2}),
        (_note(3, timed_out=False), {1: _note(2, timed_out=False), 3: _note(2, timed_out=False)}, {2}),
        # Two never came; only one of them was waited for first.
        (_note(1), {3: _note(1)}, {1, 2}),
        # One died, and another has not noticed yet.
        (_note(2, timed_out=False), {3: _note(2, timed_out=False)}, {2}),
        # Nobody knows whom the library waited for.
        (_note(), {1: _note(), 3: _note()}, {2}),
        # The link between ranks 1 and 2 is cut, seen by rank 2's neighbors; rank 3 waits for nobody.
        (_note(2, timed_out=False), {1: _note(2, timed_out=False), 2: _note(1, timed_out=False)}, {1, 2}),
        # The store is gone: only what this rank saw.
        (_note(3, timed_out=False), {}, {3}),
        # All are there and wait for each other: they called different collectives.
        (_note(1), {1: _note(2), 2: _note(3), 3: _note(0)}, {0, 1, 2, 3}),
    ],
)
def test_blames_the_silent(own: Note, notes: dict[int, Note], want: set[int]) -> None:
    assert ranks_at_fault(own, notes, [1, 2, 3]) == want


def test_notes_travel_through_the_store() -> None:
    store = HashStore()
    note = Note(timed_out=True, missed=(2,), doing="rank 1 in all_reduce ring 8 B, #1, 2.0 s")
    FailureNotes(store, 1, 2).exchange(note, grace_s=0.05)
    start = time.monotonic()

    notes = FailureNotes(store, 0, 2).exchange(_note(1), grace_s=5.0)

    assert notes == {1: note}
    assert time.monotonic() - start < 2, "all have spoken, so there is nothing to wait for"


class _StoppedStore(Store):
    """A store whose host does not answer."""

    def set(self, key: str, value: str) -> None:
        time.sleep(3)


def test_does_not_wait_for_a_store_that_hangs() -> None:
    start = time.monotonic()
    assert FailureNotes(_StoppedStore(), 0, 2).exchange(_note(1), grace_s=0.2) == {}
    assert time.monotonic() - start < 2
