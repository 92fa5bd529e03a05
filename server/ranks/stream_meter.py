"""Measures during warm-up what streaming costs: the time of a step against the same step with resident weights."""

import time
from collections.abc import Callable
from typing import TypeVar

from tightwire.model.step import StepPlan
from tightwire.model.weights.streamed import StreamedWeights
from tightwire.server.ipc.engine_stats import StreamCount
from tightwire.server.ipc.messages import StreamForecast

_PROMPT_TOKENS = 512  # prompt length for which the forecast states the time to first token

_FULL = 0.9  # share of the step limit; a smaller step says nothing about larger ones
_WAITING = 0.1  # share of the step's time

_T = TypeVar("_T")


class StepSize:
    """The token limit of a step when layers stream; ``tokens`` doubles from ``least`` up to ``most``.

    Every step fetches all streamed layers. Steps that compute for less time than the layers take to arrive repeat that
    transfer for each part of a prompt, so the limit grows while full steps wait for layers.
    """

    def __init__(self, least: int, most: int) -> None:
        self.tokens, self._most = least, most

    def learn(self, num_tokens: int, step_s: float, waited_s: float) -> None:
        """Update the limit from one step: its tokens, its time, and the part of it spent waiting for layers."""
        if num_tokens >= _FULL * self.tokens and waited_s > _WAITING * step_s:
            self.tokens = min(2 * self.tokens, self._most)


class StreamMeter:
    """Runs and times steps; keeps the last decode step and the last step with a prompt."""

    def __init__(self, weights: StreamedWeights, step_size: StepSize, other_waits_s: Callable[[], float]) -> None:
        """Args:
        step_size: learns from every step.
        other_waits_s: returns the seconds steps have waited so far for anything except layers.
        """
        self._weights, self._step_size, self._other_waits_s = weights, step_size, other_waits_s
        self._since = weights.flow()
        self._computing_s = {True: 0.0, False: 0.0}  # without waits for layers; by ``is_decode``
        self._num_rows = {True: 1, False: 1}

    def forecast_from_here(self) -> None:
        """Exclude everything so far: layers arrive slower while kernels compile and files are first read."""
        self._since = self._weights.flow()

    def run(self, execute: Callable[[], _T], plan: StepPlan) -> _T:
        before, others_before_s, start_s = self._weights.flow(), self._other_waits_s(), time.perf_counter()
        result = execute()
        step_s, after = time.perf_counter() - start_s, self._weights.flow()
        waited_s = after.waited_s - before.waited_s
        # Waiting for a slower replica counts as part of the step's time, but not as this rank's computing.
        others_s = self._other_waits_s() - others_before_s + after.late_s - before.late_s
        self._step_size.learn(plan.num_rows, step_s, waited_s)
        self._computing_s[plan.is_decode] = max(0.0, step_s - waited_s - others_s)
        self._num_rows[plan.is_decode] = plan.num_rows
        return result

    def count(self) -> StreamCount:
        flow = self._weights.flow()
        return StreamCount(flow.num_bytes, flow.fetch_s, flow.waited_s, self._step_size.tokens)

    def forecast(self) -> StreamForecast:
        """The forecast for one sequence. Assumes that each token of a long prompt costs as much as in the short one
        measured.
        """
        flow, since, weights = self._weights.flow(), self._since, self._weights
        fetch_s = flow.fetch_s - since.fetch_s
        bytes_per_s = (flow.num_bytes - since.num_bytes) / fetch_s if fetch_s else 0.0
        per_row_s = self._computing_s[False] / self._num_rows[False]
        pass_s = weights.pass_bytes / bytes_per_s if bytes_per_s else 0.0
        return StreamForecast(
            num_layers=weights.layers_per_pass,
            pass_bytes=weights.pass_bytes,
            bytes_per_s=bytes_per_s,
            pass_s=pass_s,
            decode_s=self._computing_s[True],
            prompt_s=per_row_s * _PROMPT_TOKENS,
            break_even_rows=max(1, round(pass_s / per_row_s)) if pass_s and per_row_s else 0,
        )
