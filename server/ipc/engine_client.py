"""The seam between HTTP routes and the engine: what a route may ask, and the ways the engine says no.

``client`` implements it over zmq; tests implement it in a dozen lines.
"""

import enum
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tightwire.comm.ledger.ledger import Latency
from tightwire.comm.ledger.trace import RankEvents
from tightwire.server.ipc.engine_stats import EngineStats
from tightwire.server.ipc.messages import AddRequest, CommSetup, Output


class Phase(enum.StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"  # SIGTERM came: what runs may finish, nothing new starts
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
    reason: str = ""  # what is loading, or why it died

    def __str__(self) -> str:
        """For a client that is refused."""
        words = _WORDS[self.phase]
        return f"{words}: {self.reason}" if self.reason else words


class EngineUnavailableError(Exception):
    """Loading, draining or dead; the message says which and why. HTTP 503."""


class QueueFullError(Exception):
    """As many requests wait or run as the server accepts. HTTP 429 with Retry-After."""


class RecordingBusyError(Exception):
    """Collectives are being recorded for another client already. HTTP 409."""


class RankSilentError(Exception):
    """A rank did not send what it was asked for in time; the message names it. HTTP 504."""


class EngineClient(Protocol):
    """What routes see of the engine."""

    @property
    def state(self) -> EngineState: ...

    @property
    def stats(self) -> EngineStats | None:
        """The newest counters; None before the first step."""
        ...

    @property
    def comm_setup(self) -> CommSetup | None:
        """How ranks meet; None until they are ready."""
        ...

    @property
    def comm_latencies(self) -> Sequence[Latency]:
        """How long the newest collectives of rank 0 took, by kind; at most a second old."""
        ...

    async def record_collectives(self, seconds: float) -> list[RankEvents]:
        """Every collective that ends in the next ``seconds``, of all ranks.

        Raises:
            EngineUnavailableError: there is no engine, or it died meanwhile.
            RecordingBusyError, RankSilentError
        """
        ...

    def submit(self, requests: Sequence[AddRequest]) -> AsyncIterator[Output]:
        """Start these sequences (n > 1, or several prompts) and yield their outputs as they come, interleaved.

        All are accepted or none. The iterator ends when each has had its ``finish_reason``. Closing it early
        (``aclose``, client gone) cancels what still runs.

        Raises:
            EngineUnavailableError: before the first output, or in the middle when the engine dies.
            QueueFullError: before the first output.
        """
        ...

    def cancel(self, ids: Sequence[str]) -> None:
        """End these; their ``Output`` with finish_reason ``cancelled`` still comes."""
        ...
