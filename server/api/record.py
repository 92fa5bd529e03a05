"""Collects the facts of one HTTP request for the request log, traces, and the limits of API keys."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Tokens(NamedTuple):
    prompt: int = 0
    answer: int = 0


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """Moments (``..._s``) are those of ``time.monotonic``, which rank 0 reads too; None: it did not happen."""

    id: str
    method: str
    path: str
    arrived_s: float = field(default_factory=time.monotonic)
    arrived_unix_s: float = field(default_factory=time.time)
    key: str | None = None  # the API key's name
    status: int | None = None
    asked: Any = None  # the request's body, once it is checked
    model: str | None = None
    response_id: str | None = None
    count_tokens: Callable[[], Tokens] = Tokens
    finish_reasons: list[str] = field(default_factory=list)
    submitted_s: float | None = None  # to the engine
    scheduled_s: float | None = None  # its first step began
    sampled_s: float | None = None  # its first token was chosen
    first_token_s: float | None = None  # the first token arrived in the HTTP process
    last_token_s: float | None = None
    ended_s: float | None = None  # the response was sent

    def unix_s(self, moment_s: float) -> float:
        """The time of day of a moment."""
        return self.arrived_unix_s + moment_s - self.arrived_s


# Receives each record when its response has ended, with the request's headers.
Recorder = Callable[[RequestRecord, Mapping[str, str]], None]
