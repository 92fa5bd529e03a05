import asyncio
import statistics
import time
from itertools import pairwise

import pytest

from tightwire.bench.client import Prompt, Sample
from tightwire.bench.serve.load import Load, LoadRun, arrivals, run_load

PROMPTS = [Prompt(content=str(i), max_tokens=1) for i in range(12)]


class Server:
    """Answers after a while, and sees how many are in flight."""

    def __init__(self, seconds: float = 0.01, error: str | None = None) -> None:
        self.seconds, self.error = seconds, error
        self.in_flight = self.peak = 0
        self.asked: list[str] = []

    async def send(self, prompt: Prompt) -> Sample:
        self.asked.append(str(prompt.content))
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        await asyncio.sleep(self.seconds)
        self.in_flight -= 1
        return Sample(e2e_s=self.seconds, error=self.error)


async def run(load: Load, server: Server) -> LoadRun:
    arm = LoadRun(load=load, num_requests=len(PROMPTS))
    await asyncio.wait_for(run_load(arm, PROMPTS, server.send, seed=1, done=lambda: None), 10.0)
    return arm


@pytest.mark.parametrize("concurrency", [1, 5, 12, 40])
async def test_a_closed_loop_keeps_its_concurrency(concurrency: int) -> None:
    server = Server()

    arm = await run(Load(concurrency=concurrency), server)

    assert server.peak == min(concurrency, len(PROMPTS))
    assert server.asked == [str(i) for i in range(12)]
    assert sorted(sample.index for sample in arm.samples) == list(range(12))


async def test_a_request_is_sent_after_it_waited_for_its_turn() -> None:
    arm = await run(Load(concurrency=1), Server(0.02))

    sent = [sample.sent_s for sample in arm.samples]
    assert all(later - earlier >= 0.02 for earlier, later in pairwise(sent))
    assert arm.duration_s >= 12 * 0.02
    assert all(sample.e2e_s == 0.02 for sample in arm.samples)


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    server = Server(0.5)
    began = time.perf_counter()

    arm = await run(Load(request_rate=200.0), server)

    assert server.peak == len(PROMPTS)
    assert time.perf_counter() - began < 12 * 0.5
    assert [sample.sent_s - sample.late_s for sample in arm.samples] == pytest.approx(arrivals(12, 200.0, 1))


async def test_no_requests_go_to_a_server_that_is_gone() -> None:
    server = Server(0.0, error="connection: refused")

    closed = await run(Load(concurrency=2), server)

    assert closed.stopped is not None
    assert 10 <= len(closed.samples) < len(PROMPTS)


def test_arrivals_are_poisson_and_follow_the_seed() -> None:
    times = arrivals(4001, 50.0, seed=7)
    gaps = [later - earlier for earlier, later in pairwise(times)]

    assert times[0] == 0.0
    assert times == arrivals(4001, 50.0, seed=7) != arrivals(4001, 50.0, seed=8)
    # Exponential gaps have a standard deviation equal to their mean; five standard errors of 4000 draws.
    assert statistics.fmean(gaps) == pytest.approx(0.02, rel=5 / 4000**0.5)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=5 * (2 / 4000) ** 0.5)


async def test_status_429_does_not_stop_the_load() -> None:
    full, gone = Server(error="HTTP 429: queue full"), Server(error="HTTP 503: rank 1 died")

    assert (await run(Load(concurrency=1), full)).stopped is None
    assert "10 requests in a row failed" in ((await run(Load(concurrency=1), gone)).stopped or "")
    assert len(full.asked) == 12
