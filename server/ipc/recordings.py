"""Collects a recording in the HTTP process: asks every rank for its collectives and merges the answers."""

import asyncio
import itertools
from collections.abc import Callable

from tightwire.comm.ledger.recording import Event, RankEvents
from tightwire.server.ipc.engine_client import EngineUnavailableError, RankSilentError, RecordingBusyError
from tightwire.server.ipc.messages import Record, Recorded

# Wait after the recording's end: threads of the rank may hold the interpreter and delay its reporter for long.
_PATIENCE_S = 10.0


class Recordings:
    """``ask`` sends to all ranks' reporters; call ``heard`` with each part they send."""

    def __init__(self, num_ranks: int, ask: Callable[[Record], None], patience_s: float = _PATIENCE_S) -> None:
        self._num_ranks, self._ask, self._patience_s = num_ranks, ask, patience_s
        self._ids = itertools.count()
        self._current: _Recording | None = None

    async def record(self, seconds: float) -> list[RankEvents]:
        """See ``EngineClient.record_collectives``."""
        if self._current is not None:
            raise RecordingBusyError(
                f"another client is recording the collectives, for {self._current.seconds:g} s in all; try again when that "
                "has ended"
            )
        recording = self._current = _Recording(next(self._ids), seconds, self._num_ranks)
        try:
            self._ask(Record(id=recording.id, seconds=seconds))
            await asyncio.wait_for(recording.over.wait(), seconds + self._patience_s)
        except TimeoutError:
            missing = ", ".join(f"rank {rank}" for rank in sorted(recording.missing))
            raise RankSilentError(
                f"{missing} did not send what it recorded within {self._patience_s:g} s after its {seconds:g} s; "
                "/health shows the state of the ranks"
            ) from None
        finally:
            self._current = None
        if recording.failure is not None:
            raise EngineUnavailableError(recording.failure)
        return [
            RankEvents(rank=rank, clock=recording.clocks[rank], events=events)
            for rank, events in enumerate(recording.events)
        ]

    def heard(self, part: Recorded) -> None:
        """Add a part. Parts of an abandoned recording are ignored."""
        recording = self._current
        if recording is None or recording.id != part.id:
            return
        recording.events[part.rank].extend(part.events)
        if part.last:
            recording.clocks[part.rank] = part.clock
            recording.missing.discard(part.rank)
        if not recording.missing:
            recording.over.set()

    def fail(self, reason: str) -> None:
        """End the recording with an error: the engine died."""
        if self._current is not None:
            self._current.failure = reason
            self._current.over.set()


class _Recording:
    def __init__(self, id: int, seconds: float, num_ranks: int) -> None:
        self.id, self.seconds = id, seconds
        self.events: list[list[Event]] = [[] for _ in range(num_ranks)]
        self.clocks: dict[int, str] = {}
        self.missing = set(range(num_ranks))
        self.over = asyncio.Event()
        self.failure: str | None = None
