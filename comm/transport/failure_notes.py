"""Notes in the store that ranks exchange after a collective failed, to find the ranks at fault.

A socket reports at most which neighbor stopped responding. In a ring that neighbor may itself have waited for another rank.
So each rank that fails leaves a note (its collective and the ranks it waited for) and reads the others' notes: the ranks
at fault are those without a note. Nothing is written unless a collective fails.
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
        """Leave this rank's note and return the notes of other ranks that arrive within ``grace_s``.

        Returns after half of the time when every rank without a note is one that some note missed. An unreachable store
        (its process may be dead or stopped) yields no notes and no error.
        """
        found: dict[int, Note] = {}
        # The store's own wait takes minutes when its host is stopped, so a daemon thread runs it.
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
    """All ranks that the writer of some note waited for."""
    return {rank for note in (own, *notes.values()) for rank in note.missed}


def ranks_at_fault(own: Note, notes: dict[int, Note], others: Iterable[int]) -> set[int]:
    """Those of ``others`` to blame: the ranks without a note; if there are none, the ranks that others waited for.

    A rank with a note was in the collective and failed because another rank failed.
    """
    silent = set(others) - set(notes)
    missed = missed_by(own, notes)
    if own.timed_out or any(note.timed_out for note in notes.values()):
        return silent or missed
    return (missed & silent) or silent or missed


def _parse(raw: bytes) -> Note:
    fields = json.loads(raw)
    return Note(timed_out=fields["timed_out"], missed=tuple(fields["missed"]), doing=fields["doing"])
