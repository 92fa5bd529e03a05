"""Records the times and collectives of one request: for /metrics, the ``tightwire`` field, the request log, traces, key limits."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import asdict

from tightwire.comm.ledger.ledger import GATHERING, Count
from tightwire.server.api.metrics import Metrics
from tightwire.server.ipc.engine_client import EngineClient
from tightwire.server.ipc.engine_stats import DraftReport
from tightwire.server.ipc.messages import FirstToken, Output, PromptProgress


class Tokens(NamedTuple):
    prompt: int = 0
    answer: int = 0


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """The facts of one HTTP request for the request log, traces and the limits of API keys.

    Moments (``..._s``) are those of ``time.monotonic``, which rank 0 reads too; None: it did not happen.
    """

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


# Receives each record when its response has ended, with the request's headers.
Recorder = Callable[[RequestRecord, Mapping[str, str]], None]


class Timing(Struct, frozen=True):
    """The parts of the time to the first token inside the server; they add up to ``ttft_s``. Times are the host's.

    It begins with the request's headers, and ends when the first text is handed to the socket; without ``stream``, when
    the first token reaches the HTTP process. ``http_s``: reading and checking the body. ``queue_s``: from the HTTP process
    to the sequence's first step. From there to the first token, steps of other sequences included: ``compute_s``, forward
    passes without collectives; ``allreduce_s``, collectives on rank 0 with waiting for slower ranks; ``codec_s``, encoding
    and decoding for them (null: inside a fused kernel, so in ``allreduce_s``); ``sampling_s``, on CUDA with waiting for the
    device; ``engine_s``, the rest. ``send_s``: from the token on rank 0 to the end.
    """

    ttft_s: float
    http_s: float
    tokenize_s: float
    queue_s: float
    compute_s: float
    allreduce_s: float
    codec_s: float | None
    sampling_s: float
    engine_s: float
    send_s: float


class CommTotals(Struct, frozen=True):
    """Collectives of one kind on rank 0.

    ``exact_bytes``: the bytes with nothing quantized. ``message_bytes``: the bytes of the tensors given to them.
    ``seconds`` includes waiting for slower ranks; ``codec_seconds``: encoding and decoding (null: inside a fused kernel).
    """

    op: str
    algorithm: str
    phase: str
    calls: int
    bytes_sent: int
    exact_bytes: int
    seconds: float
    message_bytes: int
    codec_seconds: float | None


class CommSpan(Struct, frozen=True):
    """A part of the request's time, and how much of it rank 0 spent in collectives."""

    seconds: float
    comm_seconds: float
    comm_share: float


class CommReport(Struct, frozen=True):
    """The collectives of rank 0 while this request ran.

    ``bytes_sent`` and ``exact_bytes`` are sums over ``counters``; ``saved_bytes`` is their difference. ``shared`` is always
    true: a step serves all running requests, so these numbers include other requests' tokens.
    """

    ttft: CommSpan
    decode: CommSpan
    bytes_sent: int
    exact_bytes: int
    saved_bytes: int
    counters: list[CommTotals]
    shared: bool = True


class TightwireExtra(Struct, frozen=True):
    """The parts that were asked for. ``timing`` is null without a first token; ``token_ids`` are by choice.

    ``drafts`` comes with ``timing`` if there were any; its sums are also those of other requests' steps (``CommReport.shared``).
    ``progress`` comes alone, in the chunks before a choice's first token.
    """

    comm: CommReport | UnsetType = UNSET
    timing: Timing | UnsetType | None = UNSET
    drafts: DraftReport | UnsetType = UNSET
    token_ids: list[list[int]] | UnsetType = UNSET
    progress: PromptProgress | UnsetType = UNSET


Extra = TightwireExtra | UnsetType
_CommCounts = dict[tuple[str, str, str], Count]


class RequestTrace:
    """Records each event as it happens. Only the first call of ``sent`` and of ``ended`` per sequence counts.

    Without ``streamed``, ``timing`` ends with the first token. ``clock``: the one that rank 0 reads (``FirstToken``).
    """

    def __init__(
        self,
        engine: EngineClient,
        metrics: Metrics,
        record: RequestRecord,
        *,
        streamed: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._metrics, self.record, self._clock = engine, metrics, record, clock
        self._streamed, self._tokenize_s = streamed, 0.0
        self._last_token_s: dict[str, float | None] = {}  # of the sequences that still run
        self._first_output_s: float | None = None
        self._first_token: FirstToken | None = None
        self._comm_at_submit: _CommCounts = {}
        self._comm_at_first: _CommCounts = {}
        self.timing: Timing | None = None  # set once the first text is sent
        self._drafts = Counter[str]()

    @contextmanager
    def tokenizing(self) -> Iterator[None]:
        start_s = self._clock()
        yield
        self._tokenize_s = self._clock() - start_s

    def submitted(self, ids: Iterable[str]) -> None:
        self._last_token_s = dict.fromkeys(ids)
        self.record.submitted_s, self._comm_at_submit = self._clock(), self._read_comm()

    def saw(self, output: Output) -> None:
        now_s = self._clock()
        if self._first_output_s is None:
            self._first_output_s, self._comm_at_first = now_s, self._read_comm()
        if output.queue_s is not None:
            self._metrics.queue_time.observe(output.queue_s)
        if output.num_drafted:
            self._drafts.update(steps=1, tokens=output.num_drafted, accepted=output.num_right)
        if output.token_ids:
            self._drafts["chosen"] += len(output.token_ids) if self._first_token else 0
            self._observe_tokens(output, now_s)
        if self._first_token is None and (first := output.first_token) is not None:
            self._first_token = first
            self.record.scheduled_s, self.record.sampled_s = first.scheduled_s, first.sampled_s
        if not self._streamed:
            self.sent()

    def sent(self) -> None:
        """Record that text was handed to the socket."""
        if self.timing is None and self._first_token is not None:
            self.timing = self._split(self._first_token, self._clock())
            self._metrics.observe_ttft(asdict(self.timing))

    def ended(self, id_: str, outcome: str) -> None:
        if id_ not in self._last_token_s:
            return
        del self._last_token_s[id_]
        self._metrics.requests.labels(outcome).inc()
        self.record.finish_reasons.append(outcome)
        if outcome in ("stop", "length"):
            self._metrics.e2e_latency.observe(self._clock() - self.record.arrived_s)

    def comm_report(self) -> CommReport:
        """Changes of the engine's counters from submission to the first output, and from there to now."""
        start, end, end_s = self._comm_at_submit, self._read_comm(), self._clock()
        first, first_s = self._comm_at_first, self._first_output_s
        if first_s is None:
            first, first_s = end, end_s
        differences = [CommTotals(*now.since(start.get(key))) for key, now in end.items()]
        counters = [difference for difference in differences if difference.calls]
        bytes_sent = sum(counter.bytes_sent for counter in counters)
        exact_bytes = sum(counter.exact_bytes for counter in counters)
        ttft = _span(first_s - self.record.arrived_s, _seconds(first) - _seconds(start))
        decode = _span(end_s - first_s, _seconds(end) - _seconds(first))
        return CommReport(ttft, decode, bytes_sent, exact_bytes, exact_bytes - bytes_sent, counters)

    def draft_report(self) -> DraftReport | UnsetType:
        """The drafts of this request's sequences, and their tokens after the first for each sum since then."""
        if not (drafts := self._drafts)["steps"]:
            return UNSET
        comm = [now.since(self._comm_at_first.get(key)) for key, now in self._read_comm().items()]
        return DraftReport.of(drafts["steps"], drafts["tokens"], drafts["accepted"], drafts["chosen"], comm)

    def _observe_tokens(self, output: Output, now_s: float) -> None:
        last_s, num_later = self._last_token_s[output.id], len(output.token_ids)
        self.record.first_token_s, self.record.last_token_s = self.record.first_token_s or now_s, now_s
        if last_s is None:
            self._metrics.time_to_first_token.observe(now_s - self.record.arrived_s)
            last_s, num_later = now_s, num_later - 1
        for _ in range(num_later):  # a step may bring several tokens: drafted ones, or forced by a grammar
            self._metrics.inter_token_latency.observe((now_s - last_s) / num_later)
        self._last_token_s[output.id] = now_s

    def _split(self, first: FirstToken, sent_s: float) -> Timing:
        arrived_s, submitted_s = self.record.arrived_s, self.record.submitted_s or self.record.arrived_s
        on_rank_s = first.compute_s + first.allreduce_s + (first.codec_s or 0.0) + first.sampling_s
        # Rounding may make a difference of two moments negative, and no part may be negative.
        parts = {
            "http_s": max(0.0, submitted_s - arrived_s - self._tokenize_s),
            "tokenize_s": self._tokenize_s,
            "queue_s": max(0.0, first.scheduled_s - submitted_s),
            "compute_s": first.compute_s,
            "allreduce_s": first.allreduce_s,
            "codec_s": first.codec_s,
            "sampling_s": first.sampling_s,
            "engine_s": max(0.0, first.sampled_s - first.scheduled_s - on_rank_s),
            "send_s": max(0.0, sent_s - first.sampled_s),
        }
        return Timing(ttft_s=sum(part or 0.0 for part in parts.values()), **parts)

    def _read_comm(self) -> _CommCounts:
        stats = self._engine.stats
        return {count[:3]: count for count in stats.comm} if stats else {}


def _seconds(counts: _CommCounts) -> float:
    """The time steps waited for collectives; excludes gathering layers, which overlaps with computing."""
    return sum(count.seconds for count in counts.values() if count.phase != GATHERING)


def _span(seconds: float, comm_seconds: float) -> CommSpan:
    return CommSpan(seconds, comm_seconds, comm_share=comm_seconds / seconds if seconds > 0 else 0.0)
