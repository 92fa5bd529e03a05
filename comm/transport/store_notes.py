"""Notes that ranks exchange through the store they join over: facts before a decision, reasons after a failure.

A socket reports at most which neighbor stopped responding, and in a ring that neighbor may itself have waited for
another rank. So each rank that fails leaves a note (its collective, the ranks it waited for) and reads the others'
notes: the ranks at fault are those without a note. Nothing is written unless a collective fails.
"""

import contextlib
import threading
import time
from collections.abc import Iterable
from datetime import timedelta

import msgspec
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.errors import CollectiveTimeoutError, name_ranks


class FactExchange:
    """Shares small facts between ranks over a store, so that all decide alike. Errors name the purpose, ``doing``."""

    def __init__(
        self, store: Store, *, rank: int, world_size: int, timeout_s: float, doing: str = "set up peer memory"
    ) -> None:
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self._store, self._doing = store, doing

    def share(self, topic: str, fact: bytes) -> list[bytes]:
        """All ranks' facts on a new ``topic``, in rank order; raises CollectiveTimeoutError with the missing ranks."""
        keys = [f"{topic}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], fact)  # pyright: ignore[reportArgumentType]: bytes are taken too
        try:
            self._store.wait(keys, timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            absent: list[int] = []
            with contextlib.suppress(RuntimeError):  # the store is unreachable
                absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise CollectiveTimeoutError(
                f"rank {self.rank} waited {self.timeout_s:g} s for all ranks to {self._doing} ({topic}); "
                f"{name_ranks(absent)} of {self.world_size} did not. Were they started, with the same store and world size?",
                absent,
            ) from error
        return [self._store.get(key) for key in keys]

    def first_objection(self, topic: str, objection: str | None) -> str | None:
        objections = [told.decode() for told in self.share(topic, (objection or "").encode())]
        return next((f"rank {rank}: {text}" for rank, text in enumerate(objections) if text), None)


_POLL_S = 0.02
_GRACE_SHARE = 0.2  # share of a collective's deadline


class Note(msgspec.Struct, frozen=True):
    """A failure: ``timed_out`` tells a silent peer from a broken connection; ``missed`` are the ranks waited for, if known."""

    timed_out: bool
    missed: tuple[int, ...]
    doing: str


class FailureNotes:
    """The notes of one group. ``store`` is the group's own (already prefixed)."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._rank = store, rank
        self._others = [other for other in range(world_size) if other != rank]

    def blame(self, own: Note, timeout_s: float, most_s: float = 1.0) -> tuple[set[int], dict[int, Note]]:
        """Exchange notes for a fifth of ``timeout_s``, at most ``most_s``; return the ranks at fault, and the notes."""
        notes = self.exchange(own, grace_s=min(most_s, _GRACE_SHARE * timeout_s))
        return ranks_at_fault(own, notes, self._others), notes

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
            self._store.set(f"failed/{self._rank}", msgspec.json.encode(note))  # pyright: ignore[reportArgumentType]: bytes are taken too
            while time.monotonic() - start < grace_s:
                for rank in self._others:
                    if rank not in found and self._store.check([f"failed/{rank}"]):
                        found[rank] = msgspec.json.decode(self._store.get(f"failed/{rank}"), type=Note)
                silent = set(self._others) - set(found)
                if not silent or (time.monotonic() - start > grace_s / 2 and silent <= missed_by(note, found)):
                    return
                time.sleep(_POLL_S)
        except RuntimeError:
            return  # torch's store errors are all RuntimeErrors


def missed_by(own: Note, notes: dict[int, Note]) -> set[int]:
    return {rank for note in (own, *notes.values()) for rank in note.missed}


def ranks_at_fault(own: Note, notes: dict[int, Note], others: Iterable[int]) -> set[int]:
    """The ranks of ``others`` to blame: those without a note; if there are none, those that a rank waited for."""
    silent = set(others) - set(notes)
    missed = missed_by(own, notes)
    if own.timed_out or any(note.timed_out for note in notes.values()):
        return silent or missed
    return (missed & silent) or (missed & set(others)) or silent or missed  # a cut link is lost on both sides
