import pytest

from tightwire.bench.stream.arms import Arm, PassTrace, trace_pass
from tightwire.comm.buffers import SlotEvent


def _events(*events: tuple[float, str, int]) -> list[SlotEvent]:
    return [SlotEvent(at_s, kind, owner, -1 if kind == "ask" else owner % 2) for at_s, kind, owner in events]


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


def test_an_arm_spreads_the_layers_that_it_streams() -> None:
    plan = Arm("host", "int4", 5_000_000).plan(num_layers=6, num_streamed=3)

    assert (plan.streamed, plan.origin, plan.codec, plan.bytes_per_s) == ((1, 3, 5), "host", "int4", 5_000_000)
    assert Arm("disk", "none", 0).plan(6, 6).bytes_per_s is None
    assert Arm("peers", "none", 0).plan(6, 6, num_replicas=3).ranks_per_node == 3
    assert Arm("peers", "none", 5_000_000).plan(6, 6, num_replicas=3).bytes_per_s == 5_000_000
