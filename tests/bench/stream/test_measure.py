"""Traces of passes, and the cores of the ranks."""

import os

import pytest
from helpers.server.stream_bench_bodies import bind_and_look

from tightwire.bench.ranks import RankOptions, open_ranks
from tightwire.bench.stream.measure import PassTrace, trace_pass
from tightwire.bench.stream.options import StreamBenchOptions
from tightwire.comm.buffers import BufferEvent
from tightwire.server.plan.devices import num_cores

EVERYWHERE = tuple(sorted(os.sched_getaffinity(0)))


@pytest.mark.skipif(len(EVERYWHERE) < 2 or num_cores() < len(EVERYWHERE), reason="not two cores of our own")
def test_ranks_are_bound_to_their_own_cores() -> None:
    with open_ranks(RankOptions(ranks=2)) as (ranks, _):
        settled = dict(ranks.stream(bind_and_look, StreamBenchOptions(threads=1)))
    assert {threads for _, _, threads in settled.values()} == {1}
    shares = [share for share, seen, _ in settled.values() if share == seen]
    assert len(shares) == 2 and all(shares) and not set(shares[0]) & set(shares[1])


def test_a_single_rank_is_not_bound() -> None:
    with open_ranks(RankOptions(ranks=1)) as (ranks, _):
        assert dict(ranks.stream(bind_and_look, StreamBenchOptions(threads=1))) == {0: ((), EVERYWHERE, 1)}


def _events(*events: tuple[float, str, int]) -> list[BufferEvent]:
    return [BufferEvent(at_s, kind, owner, -1 if kind == "ask" else owner % 2) for at_s, kind, owner in events]


def test_fetching_without_a_stall_is_hidden() -> None:
    # Three layers of 4 s each, computed in 1 s each: in a pass of 12 s computing waits 9 s.
    events = _events(
        *((0, "fill", 0), (0, "ask", 0), (4, "filled", 0), (4, "use", 0), (4, "fill", 1), (5, "release", 0)),
        *((5, "ask", 1), (8, "filled", 1), (8, "use", 1), (8, "fill", 2), (9, "release", 1)),
        *((9, "ask", 2), (12, "filled", 2), (12, "use", 2), (12, "fill", 0), (13, "release", 2)),
    )

    trace = trace_pass(events, 1.0, 13.0)

    assert (trace.pass_s, trace.fetch_s) == (12, 11)  # layer 0 of the next pass has not come whole
    assert trace.stall_s == 3 + 3 + 3
    assert trace.overlap == pytest.approx(2 / 3)


def test_a_fetch_that_ends_after_the_pass_counts_up_to_its_end() -> None:
    events = _events((0, "fill", 0), (4, "filled", 0), (4, "ask", 0), (4, "use", 0), (4, "fill", 1), (8, "filled", 1))

    assert trace_pass(events, 2.0, 6.0) == PassTrace(pass_s=4.0, fetch_s=4.0, stall_s=0.0)


@pytest.mark.parametrize(
    ("pass_s", "fetch_s", "stall_s", "overlap"),
    [
        (10, 10, 7, 1.0),  # the source never paused: all computing was behind it
        (10, 4, 0, 1.0),  # computing never waited: all fetching was behind it
        (10, 6, 6, 0.0),  # one after the other
        (10, 6, 3, 0.5),
        (10, 0, 0, 0.0),  # nothing was fetched, nothing could be hidden
    ],
)
def test_overlap_is_relative_to_the_shorter_part(pass_s: float, fetch_s: float, stall_s: float, overlap: float) -> None:
    assert PassTrace(pass_s=pass_s, fetch_s=fetch_s, stall_s=stall_s).overlap == pytest.approx(overlap)
