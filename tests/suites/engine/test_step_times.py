"""Times by kind of work, with a clock that moves only when work is done."""

import pytest

from tightwire.comm.ledger.ledger import Spent
from tightwire.server.engine.engine import first_token
from tightwire.server.engine.pipeline import StepTimes


class Work:
    """Advances the clock. Part of a forward pass is collectives, part of those is codec time."""

    def __init__(self) -> None:
        self.now_s, self.comm = 100.0, Spent(7.0, 3.0, 0)

    def forward(self, seconds: float, comm: float = 0.0, codec: float = 0.0, unsplit: int = 0) -> str:
        self.now_s += seconds
        before = self.comm
        self.comm = Spent(before.seconds + comm, before.codec_seconds + codec, before.num_unsplit + unsplit)
        return "logits"

    def sample(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def times(work: Work) -> StepTimes:
    times = StepTimes(lambda: work.now_s, lambda: work.comm)
    times.forward(work.forward, 50.0, comm=20.0, codec=5.0, unsplit=1)  # before the sequence: nothing of it counts
    times.sampling(work.sample, 9.0)
    return times


def test_times_of_two_steps_and_the_time_between(work: Work, times: StepTimes) -> None:
    scheduled = times.read()
    work.now_s += 0.25  # the plan
    assert times.forward(work.forward, 4.0, comm=3.0, codec=1.0) == "logits"
    work.now_s += 0.5
    times.forward(work.forward, 2.0, comm=0.5)
    times.sampling(work.sample, 0.125)
    first = first_token(scheduled, times.read())

    assert (first.scheduled_s, first.sampled_s) == (159.0, 165.875)
    assert (first.compute_s, first.allreduce_s, first.codec_s, first.sampling_s) == (2.5, 2.5, 1.0, 0.125)


def test_codec_time_is_unknown_after_a_fused_call(work: Work, times: StepTimes) -> None:
    scheduled = times.read()
    times.forward(work.forward, 4.0, comm=3.0, codec=1.0)
    times.forward(work.forward, 4.0, comm=3.0, unsplit=1)
    first = first_token(scheduled, times.read())

    assert (first.compute_s, first.allreduce_s, first.codec_s) == (2.0, 6.0, None)


def test_no_part_is_negative_after_rounding(work: Work, times: StepTimes) -> None:
    scheduled = times.read()
    times.forward(work.forward, 1.0, comm=1.0 + 1e-9, codec=1.0 + 2e-9)
    first = first_token(scheduled, times.read())

    assert first.compute_s == 0 and first.allreduce_s == 0
