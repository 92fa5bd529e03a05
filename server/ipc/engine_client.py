"""The interface between HTTP routes and the engine: what routes may call, and the errors it raises."""

import enum
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tightwire.comm.ledger.ledger import Latency
from tightwire.comm.ledger.recording import RankEvents
from tightwire.server.ipc.engine_stats import EngineStats
from tightwire.server.ipc.messages import AddRequest, CommSetup, Output


class Phase(enum.StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"  # SIGTERM received: running requests may finish, new ones are refused
    DEAD = "dead"


_WORDS = {
    Phase.LOADING: "the model is still loading",
    Phase.READY: "ready",
    Phase.DRAINING: "the server is shutting down and takes no new requests",
    Phase.DEAD: "the engine has failed",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineState:
    phase: Phase
    reason: str = ""  # what is loading, why the engine died, or why this process takes no requests though it is ready

    def __str__(self) -> str:
        """The message for a client that is refused."""
        words = _WORDS[self.phase]
        return f"{words}: {self.reason}" if self.reason else words


class EngineUnavailableError(Exception):
    """The engine is loading, draining or dead; the message says which and why. HTTP 503."""


class QueueFullError(Exception):
    """The server has accepted its maximum number of requests. HTTP 429 with Retry-After."""


class RecordingBusyError(Exception):
    """Another client's recording is running. HTTP 409."""


class RankSilentError(Exception):
    """A rank did not answer in time; the message names it. HTTP 504."""


class AdapterRefusedError(Exception):
    """An adapter cannot be loaded; the message says why. HTTP 400."""


class EngineClient(Protocol):
    @property
    def state(self) -> EngineState: ...

    @property
    def stats(self) -> EngineStats | None: ...  # None before the first step

    @property
    def comm_setup(self) -> CommSetup | None: ...  # None until the ranks are ready

    @property
    def comm_latencies(self) -> Sequence[Latency]: ...  # of one rank's newest collectives, at most a second old

    async def record_collectives(self, seconds: float) -> list[RankEvents]:
        """All collectives of all ranks in the next ``seconds``. EngineUnavailableError, RecordingBusyError, RankSilentError."""
        ...

    async def load_adapter(self, adapter: int, folder: str) -> str:
        """Load a LoRA adapter on every rank, and return its digest. ``adapter``: an id that was never used, for requests to carry.

        AdapterRefusedError: a rank refuses it or has other files, and none has it. EngineUnavailableError, RankSilentError: likewise.
        """
        ...

    def unload_adapter(self, adapter: int) -> None:
        """Accept no more sequences with this adapter; those that run finish with it."""

    def submit(self, requests: Sequence[AddRequest]) -> AsyncIterator[Output]:
        """Start all or none of these sequences; yields outputs until each is finished.

        Closing the iterator cancels the sequences that still run.
        QueueFullError: before the first output. EngineUnavailableError: then, or later if the engine dies.
        """
        ...

    def cancel(self, ids: Sequence[str]) -> None:
        """End these sequences; each still sends an ``Output`` with finish_reason ``cancelled``."""
