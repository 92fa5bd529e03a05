"""Questions of the HTTP process that every rank answers: recordings of collectives, and loads of LoRA adapters."""

import asyncio
import itertools
from collections.abc import Callable

from tightwire.comm.ledger.recording import Event, RankEvents
from tightwire.server.ipc import engine_client
from tightwire.server.ipc.messages import AdapterLoaded, LoadAdapter, Record, Recorded, UnloadAdapter

# Wait after the recording's end: threads of the rank may hold the interpreter and delay its reporter for long.
_RECORD_PATIENCE_S = 10.0
# Ranks load between two steps, which may take long, from a disk that may be slow.
_LOAD_PATIENCE_S = 300.0


class _Answers:
    """The ranks that have not answered yet, and the end of the wait for them."""

    def __init__(self, ranks: range) -> None:
        self._missing = set(ranks)
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait(self, timeout_s: float, did_not: str) -> None:
        """Wait for all. RankSilentError: who ``did_not`` answer in time; the error given to ``fail``."""
        try:
            await asyncio.wait_for(self._over, timeout_s)
        except TimeoutError:
            missing = ", ".join(f"rank {rank}" for rank in sorted(self._missing))
            raise engine_client.RankSilentError(f"{missing} did not {did_not}; /health says what ranks do") from None

    def heard(self, rank: int) -> None:
        self._missing.discard(rank)
        if not self._missing and not self._over.done():
            self._over.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self._over.done():
            self._over.set_exception(error)


class Recordings:
    """``ask`` sends to the reporters of this host's ``ranks``; call ``heard`` with each part they send."""

    def __init__(self, ranks: range, ask: Callable[[Record], None], patience_s: float = _RECORD_PATIENCE_S) -> None:
        self._ranks, self._ask, self._patience_s = ranks, ask, patience_s
        self._ids = itertools.count()
        self._current: _Recording | None = None

    async def record(self, seconds: float) -> list[RankEvents]:
        """See ``EngineClient.record_collectives``."""
        if self._current is not None:
            busy = f"another client is recording the collectives, for {self._current.asked.seconds:g} s in all"
            raise engine_client.RecordingBusyError(f"{busy}; try again when that has ended")
        recording = self._current = _Recording(Record(id=next(self._ids), seconds=seconds), self._ranks)
        try:
            self._ask(recording.asked)
            late = f"send what it recorded within {self._patience_s:g} s after its {seconds:g} s"
            await recording.answers.wait(seconds + self._patience_s, late)
        finally:
            self._current = None
        rows, clocks = sorted(recording.events.items()), recording.clocks
        return [RankEvents(rank=rank, row=row, clock=clocks[rank], events=own) for (rank, row), own in rows]

    def heard(self, part: Recorded) -> None:
        """Add a part. Parts of an abandoned recording are ignored."""
        recording = self._current
        if recording is None or recording.asked.id != part.id:
            return
        recording.events.setdefault((part.rank, part.row), []).extend(part.events)
        if part.last:
            recording.clocks[part.rank] = part.clock
            recording.answers.heard(part.rank)

    def fail(self, reason: str) -> None:
        """End the recording with an error: the engine died, or ends."""
        if self._current is not None:
            self._current.answers.fail(engine_client.EngineUnavailableError(reason))


class _Recording:
    def __init__(self, asked: Record, ranks: range) -> None:
        self.asked, self.answers = asked, _Answers(ranks)
        self.events: dict[tuple[int, int], list[Event]] = {}  # by rank and row
        self.clocks: dict[int, str] = {}


class AdapterLoads:
    """``send`` sends to rank 0; call ``heard`` with each rank's answer."""

    def __init__(self, num_ranks: int, send: Callable[[LoadAdapter | UnloadAdapter], None]) -> None:
        self._num_ranks, self._send = num_ranks, send
        self._waiting: dict[int, tuple[_Answers, list[AdapterLoaded]]] = {}

    async def load(self, adapter: int, folder: str) -> str:
        """See ``EngineClient.load_adapter``. A load that fails on one rank is undone on all."""
        answers, heard = self._waiting[adapter] = _Answers(range(self._num_ranks)), list[AdapterLoaded]()
        try:
            self._send(LoadAdapter(id=adapter, folder=folder))
            await answers.wait(_LOAD_PATIENCE_S, f"load the adapter within {_LOAD_PATIENCE_S:g} s")
            return heard[0].digest
        except BaseException:
            self._send(UnloadAdapter(id=adapter))
            raise
        finally:
            del self._waiting[adapter]

    def heard(self, answer: AdapterLoaded) -> None:
        """Note a rank's answer. Answers to abandoned loads are ignored."""
        if answer.id not in self._waiting:
            return
        answers, heard = self._waiting[answer.id]
        heard.append(answer)
        unlike = f"has other files of the adapter than rank {heard[0].rank}; copy them to all hosts"
        if refusal := answer.refusal or ("" if answer.digest == heard[0].digest else unlike):
            answers.fail(engine_client.AdapterRefusedError(f"rank {answer.rank}: {refusal}"))
        answers.heard(answer.rank)

    def fail(self, reason: str) -> None:
        """End all loads with an error: the engine died, or ends."""
        for answers, _ in self._waiting.values():
            answers.fail(engine_client.EngineUnavailableError(reason))
