"""Where a request's time to first token went, from its arrival at the app to its first bytes in the socket.

Always recorded; the response extra ``"tightwire": {"timing": true}`` shows it, and /metrics sums it up.
"""

import time
from collections.abc import Callable

from tightwire.server.api.metrics import Metrics
from tightwire.server.api.responses import Timing
from tightwire.server.ipc.messages import FirstToken


class TtftWatch:
    """Told of each event as it happens; the first of a kind counts, whichever of the request's sequences it is of.

    Args:
        arrived_s, tokenize_s: when the request came, and how long it was tokenized.
        streamed: whether its text goes out as it comes; if not, the first token is the end.
        clock: the one that rank 0 reads too (``FirstToken``).
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        arrived_s: float,
        tokenize_s: float,
        streamed: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics, self._clock, self._streamed = metrics, clock, streamed
        self.arrived_s, self._tokenize_s = arrived_s, tokenize_s
        self._handed_over_s: float | None = None
        self._first: FirstToken | None = None
        self._timing: Timing | None = None

    def hand_over(self) -> None:
        """The sequences go to the engine now."""
        self._handed_over_s = self._clock()

    def saw_token(self, first: FirstToken | None) -> None:
        """A token came; ``first`` is set with the first one of each sequence."""
        self._first = self._first or first
        if not self._streamed:
            self.sent()

    def sent(self) -> None:
        """Text has been handed to the socket."""
        if self._timing is None and self._first is not None and self._handed_over_s is not None:
            self._timing = self._split(self._first, self._handed_over_s, self._clock())
            self._metrics.observe_ttft(self._timing)

    @property
    def timing(self) -> Timing | None:
        """None before the end."""
        return self._timing

    def _split(self, first: FirstToken, handed_over_s: float, sent_s: float) -> Timing:
        # Differences of moments may be a rounding below zero, and no part may be negative.
        http_s = max(0.0, handed_over_s - self.arrived_s - self._tokenize_s)
        queue_s = max(0.0, first.scheduled_s - handed_over_s)
        on_rank_s = first.compute_s + first.allreduce_s + (first.codec_s or 0.0) + first.sampling_s
        engine_s = max(0.0, first.sampled_s - first.scheduled_s - on_rank_s)
        send_s = max(0.0, sent_s - first.sampled_s)
        return Timing(
            ttft_s=http_s + self._tokenize_s + queue_s + on_rank_s + engine_s + send_s,
            http_s=http_s,
            tokenize_s=self._tokenize_s,
            queue_s=queue_s,
            compute_s=first.compute_s,
            allreduce_s=first.allreduce_s,
            codec_s=first.codec_s,
            sampling_s=first.sampling_s,
            engine_s=engine_s,
            send_s=send_s,
        )
