"""What the forecast of streaming is made of: steps whose times are given."""

from typing import cast

import pytest

from tightwire.model.step import make_plan
from tightwire.model.weights.streamed import Flow, StreamedWeights
from tightwire.server.ranks.stream_meter import StepSize, StreamMeter

MB = 1_000_000
PLAN = make_plan(token_ids=[1], query_lens=[1], context_lens=[1], block_tables=[0], num_decode_rows=1, logit_rows=[0])


class _Weights:
    """Three layers of a megabyte that come as fast as the test says."""

    pass_bytes, layers_per_pass = 3 * MB, 3

    def __init__(self) -> None:
        self._flow = Flow(0, 0, 0.0, 0.0, 0.0)

    def flow(self) -> Flow:
        return self._flow

    def come(self, seconds: float) -> None:
        before = self._flow
        self._flow = Flow(before.num_layers + 3, before.num_bytes + 3 * MB, before.fetch_s + seconds, 0.0, 0.0)


def test_what_came_while_kernels_were_compiled_is_not_forecast() -> None:
    weights = _Weights()
    meter = StreamMeter(cast(StreamedWeights, weights), StepSize(8, 8), lambda: 0.0)
    meter.run(lambda: weights.come(seconds=9.0), PLAN)
    assert meter.forecast().bytes_per_s == pytest.approx(3 * MB / 9)
    meter.forecast_from_here()
    assert meter.forecast().bytes_per_s == 0
    meter.run(lambda: weights.come(seconds=0.03), PLAN)
    assert meter.forecast().bytes_per_s == pytest.approx(100 * MB)
    assert meter.forecast().pass_s == pytest.approx(0.03)
    assert meter.count().num_bytes == 6 * MB  # what came is counted all the same


def test_full_steps_that_wait_make_the_next_ones_larger() -> None:
    size = StepSize(512, 2048)
    size.learn(512, step_s=1.0, waited_s=0.8)
    assert size.tokens == 1024
    size.learn(1000, step_s=1.0, waited_s=0.5)
    assert size.tokens == 2048
    size.learn(2048, step_s=1.0, waited_s=0.5)
    assert size.tokens == 2048


def test_steps_that_do_not_wait_or_are_small_say_nothing() -> None:
    size = StepSize(512, 2048)
    size.learn(512, step_s=1.0, waited_s=0.05)
    size.learn(8, step_s=1.0, waited_s=0.99)
    assert size.tokens == 512
