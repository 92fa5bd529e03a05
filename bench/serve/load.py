"""Sends prompts to a server: n at a time (closed loop), or at a rate (open loop, Poisson arrivals).

In an open loop clients do not wait for each other, so the queue grows without bound when the server is too slow.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from tightwire.bench.client import Prompt, Sample

Send = Callable[[Prompt], Awaitable[Sample]]

# After so many failures in a row the server counts as gone. 429 (too many requests) is no sign of that.
MAX_FAILURES_IN_A_ROW = 10
_TOO_MUCH = "HTTP 429"


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Exactly one of ``concurrency`` and ``request_rate`` is set."""

    concurrency: int | None = None
    request_rate: float | None = None  # requests per second
    temperature: float | None = None  # None: that of all loads

    @property
    def name(self) -> str:
        name = f"rate {self.request_rate:g}/s" if self.concurrency is None else f"concurrency {self.concurrency}"
        return name if self.temperature is None else f"{name}, temperature {self.temperature:g}"


@dataclass(kw_only=True, slots=True)
class LoadRun:
    """One load and its samples; filled while it runs, so that an interrupted run keeps what it has."""

    load: Load
    num_requests: int
    samples: list[Sample] = field(default_factory=list)
    duration_s: float = 0.0  # from the first send to the last end
    stopped: str | None = None  # the reason if it ended before all requests were sent
    _failures: int = 0

    def add(self, sample: Sample) -> None:
        self.samples.append(sample)
        if not (sample.error and sample.error.startswith(_TOO_MUCH)):
            self._failures = self._failures + 1 if sample.error else 0
        if self._failures >= MAX_FAILURES_IN_A_ROW and self.stopped is None:
            self.stopped = f"{self._failures} requests in a row failed; the last: {sample.error}"


async def run_load(run: LoadRun, prompts: Sequence[Prompt], send: Send, *, seed: int, done: Callable[[], None]) -> None:
    """Send all prompts under the load and collect the samples in it; ``done`` is called after each."""
    began = time.perf_counter()

    async def one(index: int, planned: float | None = None) -> None:
        sent_s = time.perf_counter() - began
        sample = await send(prompts[index])
        sample.index, sample.sent_s = index, sent_s
        sample.late_s = sent_s - planned if planned is not None else 0.0
        run.duration_s = time.perf_counter() - began
        run.add(sample)
        done()

    waiting = iter(range(len(prompts)))

    async def client() -> None:
        for index in waiting:
            if run.stopped:
                return
            await one(index)

    async with asyncio.TaskGroup() as tasks:
        if run.load.request_rate is None:
            for _ in range(min(run.load.concurrency or 1, len(prompts))):
                tasks.create_task(client())
            return
        for index, arrival in enumerate(arrivals(len(prompts), run.load.request_rate, seed)):
            await asyncio.sleep(began + arrival - time.perf_counter())
            if run.stopped:
                return
            tasks.create_task(one(index, arrival))


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds at which requests arrive; the first at 0, with exponential gaps of mean 1 / rate."""
    source = random.Random(f"{seed}/arrivals")
    return list(accumulate((source.gammavariate(1.0, 1 / rate) for _ in range(count - 1)), initial=0.0))
