"""Schedules whose times are known by hand."""

import pytest

from tightwire.comm.policy.schedule import overlapped_s, staged_s


def test_slow_wire_hides_computing() -> None:
    assert overlapped_s(1.0, [(0.0, 3.0)] * 50) == 50 * 2 * 3.0 + 1.0


def test_fast_wire_is_hidden_but_for_the_second_leg_of_a_sum() -> None:
    assert overlapped_s(3.0, [(0.0, 1.0)] * 50) == 50 * 2 * 3.5 + 3.0


def test_adding_takes_the_cores_that_compute() -> None:
    assert overlapped_s(3.0, [(1.0, 1.0)] * 50) == 50 * 2 * 4.5 + 3.0


def test_chunks_follow_each_other_through_the_stages() -> None:
    chunks, stages, hop_s = 8, 3, 0.5
    # The first chunk passes all stages and hops, then one chunk leaves the last stage after the other.
    assert staged_s([[2.0] * stages] * chunks, [hop_s] * chunks, [0.0] * chunks)[0] == pytest.approx(
        (stages - 1) * 2.5 + chunks * 2.0
    )


def test_slowest_stage_sets_the_pace() -> None:
    assert staged_s([[1.0, 4.0, 1.0]] * 5, [0.0] * 5, [0.0] * 5)[0] == 1.0 + 5 * 4.0 + 1.0
    assert staged_s([[2.0], [3.0]], [0.0, 0.0], [0.0, 0.0]) == (5.0, 5.0)


def test_chunk_waits_for_what_follows_the_one_before_on_the_wire() -> None:
    # Hidden states take twice as long beside them, and the wire is never idle from the first chunk's end.
    assert staged_s([[1.0, 1.0]] * 4, [0.5] * 4, [3.0] * 4) == (1.0 + 4 * 1.0 + 1.0, 1.0 + 4 * 3.5)
    # They have come before the next chunk, but for those of the last one.
    assert staged_s([[2.0, 2.0]] * 4, [0.5] * 4, [0.25] * 4) == (
        2.0 + 3 * 2.0 + 0.75 + 2.0,
        2.0 + 3 * 2.0 + 0.75 + 2.0 + 0.25,
    )
