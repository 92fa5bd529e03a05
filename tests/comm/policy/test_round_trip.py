"""Two processes that meet for a moment."""

import multiprocessing

import pytest

from tightwire.comm.policy.round_trip import measure_round_trip
from tightwire.comm.transport.segment import why_unusable


@pytest.mark.skipif(why_unusable() is not None, reason=f"no shared memory here: {why_unusable()}")
def test_a_round_trip_takes_time_and_leaves_no_process() -> None:
    latency = measure_round_trip(8192)
    assert (latency.op, latency.algorithm) == ("all_reduce", "one-shot")
    assert 0 < latency.p50_us <= latency.p99_us
    assert multiprocessing.active_children() == []
