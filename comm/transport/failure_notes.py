"""Notes in the store by which ranks find out, after a collective failed, which ranks are at fault.

A socket says at most which neighbour fell silent. In a ring that neighbour may itself have waited for another rank. So
each rank that fails leaves a note (what it was doing, whom it missed) and reads the others' notes: the ranks at fault
are those that left none. Nothing is written while all goes well.
"""

import json
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Note:
    """``timed_out`` tells a silent peer from a broken connection; ``missed`` are the ranks waited for, if known."""

    timed_out: bool
    missed: tuple[int, ...]
    doing: str


class FailureNotes:
    """The notes of one group. ``store`` is the group's own (already prefixed)."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._others = [other for other in range(world_size) if other != rank]

    def exchange(self, note: Note, *, grace_s: float) -> dict[int, Note]:
        """Leave this rank's note and return those of the others that come within ``grace_s``.

        Returns early when only the ranks that somebody missed have left none after half of the time. A store that
        cannot be reached (it may live in the dead process, or in a stopped one) gives no notes, never an error.
        """
        found: dict[int, Note] = {}
        # The store's own wait is minutes long when its host is stopped; a thread can be left behind.
        thread = threading.Thread(target=self._exchange, args=(note, grace_s, found), daemon=True)
        thread.start()
        thread.join(grace_s + 0.1)
        return dict(found)

    def _exchange(self, note: Note, grace_s: float, found: dict[int, Note]) -> None:
        start = time.monotonic()
        try:
            self._store.set(f"failed/{self._rank}", json.dumps(asdict(note)))
            while time.monotonic() - start < grace_s:
                for rank in self._others:
                    if rank not in found and self._store.check([f"failed/{rank}"]):
                        found[rank] = _parse(self._store.get(f"failed/{rank}"))
                silent = set(self._others) - set(found)
                if not silent or (time.monotonic() - start > grace_s / 2 and silent <= missed_by(note, found)):
                    return
                time.sleep(_POLL_S)
        except RuntimeError:
            return  # torch's store errors are all RuntimeErrors


def missed_by(own: Note, notes: dict[int, Note]) -> set[int]:
    """All ranks that some note's writer waited for."""
    return {rank for note in (own, *notes.values()) for rank in note.missed}


def ranks_at_fault(own: Note, notes: dict[int, Note], others: Iterable[int]) -> set[int]:
    """Those of ``others`` to blame: the ones that left no note; failing that, the ones that were waited for.

    A rank with a note was in the collective and failed for want of another.
    """
    silent = set(others) - set(notes)
    missed = missed_by(own, notes)
    if own.timed_out or any(note.timed_out for note in notes.values()):
        return silent or missed
    return (missed & silent) or silent or missed


def _parse(raw: bytes) -> Note:
    fields = json.loads(raw)
    return Note(timed_out=fields["timed_out"], missed=tuple(fields["missed"]), doing=fields["doing"])
