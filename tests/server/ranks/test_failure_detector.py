"""Who is blamed for what, on a clock of our own and without processes."""

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tightwire.server.ipc.messages import Failed, Heartbeat, Ready, Stage
from tightwire.server.ranks.failure_detector import Watch


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> Watch:
    watch = Watch({0: 11, 1: 22}, rank_timeout_s=10, step_timeout_s=120, clock=clock)
    watch.serving = True
    return watch


def beat(watch: Watch, rank: int, step: int = 7, busy_s: float = 0.1, doing: str = "step 7: all_reduce ring") -> None:
    watch.heard(Heartbeat(rank=rank, step=step, doing=doing, busy_s=busy_s))


def failed(rank: int, message: str, *, symptom: bool = False) -> Failed:
    return Failed(rank=rank, doing="step 7", message=message, traceback=f"trace of {rank}", symptom=symptom)


def pass_time(watch: Watch, clock: Clock, seconds: float, *beating: int) -> None:
    """Seconds in which only some ranks beat."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now += 0.5
        for rank in beating:
            beat(watch, rank)
        watch.check()


def test_beating_ranks_are_well(watch: Watch, clock: Clock) -> None:
    pass_time(watch, clock, 60, 0, 1)
    assert watch.check() is None


def test_a_killed_rank_is_named_with_what_all_were_doing(watch: Watch) -> None:
    beat(watch, 0, doing="step 8: all_reduce ring 1152 B, #5, 0.1 s")
    beat(watch, 1, doing="step 8")
    watch.exited(1, -signal.SIGKILL)
    assert watch.check() == (
        "rank 1 (pid 22) was killed by SIGKILL (out of memory?) while: step 8 "
        "(rank 0: step 8: all_reduce ring 1152 B, #5, 0.1 s)"
    )


def test_the_cause_wins_over_symptoms_that_came_first(watch: Watch) -> None:
    watch.heard(failed(0, "PeerLostError: rank 1 is gone", symptom=True))
    watch.exited(0, 1)
    watch.heard(failed(1, "OSError: the disk is on fire"))
    watch.exited(1, 1)
    reason = watch.check()
    assert reason is not None and reason.startswith("rank 1 (pid 22) failed while: step 7: OSError")
    assert watch.tracebacks() == [(1, "trace of 1")]


def test_a_symptom_alone_is_better_than_nothing(watch: Watch, clock: Clock) -> None:
    watch.heard(failed(0, "CollectiveTimeoutError: rank 1 did not arrive", symptom=True))
    assert watch.check() is None
    pass_time(watch, clock, 3, 1)
    reason = watch.check()
    assert reason is not None and "rank 0 (pid 11) failed while: step 7: CollectiveTimeoutError: rank 1" in reason
    assert watch.tracebacks() == [] and watch.tracebacks(of_symptoms=True) == [(0, "trace of 0")]


def test_of_symptoms_the_first_is_named_because_others_follow_from_its_end(watch: Watch, clock: Clock) -> None:
    watch.heard(failed(1, "PeerLostError: lost rank 2: no acknowledgement for 10 s", symptom=True))
    watch.heard(failed(0, "PeerLostError: lost rank 1: closed by that rank", symptom=True))
    pass_time(watch, clock, 3)
    reason = watch.check()
    assert reason is not None and reason.startswith("rank 1 (pid 22) failed while: step 7: PeerLostError: lost rank 2")
    assert watch.describe() == "rank 0: step 7; rank 1: step 7", "in their order"


def test_a_killed_rank_is_named_however_late_its_end_is_known(watch: Watch, clock: Clock) -> None:
    """On a busy machine its connections are closed, and missed by the others, seconds before it can be waited for."""
    watch.heard(failed(0, "PeerLostError: rank 1 is gone", symptom=True))
    watch.exited(0, 1)
    pass_time(watch, clock, 2.5)
    assert watch.check() is None
    watch.exited(1, -signal.SIGKILL)
    reason = watch.check()
    assert reason is not None and reason.startswith("rank 1 (pid 22) was killed by SIGKILL")
    assert watch.tracebacks() == []  # what the other rank saw adds nothing to the reason


def test_an_exit_without_a_word(watch: Watch, clock: Clock) -> None:
    watch.exited(0, 3)
    assert watch.check() is None
    pass_time(watch, clock, 3, 1)
    reason = watch.check()
    assert reason is not None and "rank 0 (pid 11) exited with code 3" in reason


def test_an_exit_without_a_fault_is_a_fault_too(watch: Watch, clock: Clock) -> None:
    watch.exited(0, 0)
    pass_time(watch, clock, 3, 1)
    reason = watch.check()
    assert reason is not None and "exited with code 0" in reason


def test_silence_is_noticed_after_the_timeout(watch: Watch, clock: Clock) -> None:
    pass_time(watch, clock, 9.5, 0)
    assert watch.check() is None
    pass_time(watch, clock, 1.5, 0)
    reason = watch.check()
    assert reason is not None and "rank 1 (pid 22) has been silent for" in reason


def test_silence_while_loading_is_borne_longer(watch: Watch, clock: Clock) -> None:
    watch.serving = False
    beat(watch, 1, step=-1, doing="weights")
    pass_time(watch, clock, 60, 0)
    assert watch.check() is None
    pass_time(watch, clock, 65, 0)
    assert watch.reason is not None


def test_a_rank_that_is_not_forked_cannot_be_heard(watch: Watch, clock: Clock) -> None:
    watch.serving = False
    pass_time(watch, clock, 600)
    assert watch.check() is None
    watch.exited(1, -signal.SIGKILL)
    reason = watch.check()
    assert reason is not None and "rank 1 (pid 22) was killed by SIGKILL (out of memory?) while: importing" in reason


def test_a_rank_is_named_with_the_process_that_was_forked(clock: Clock) -> None:
    pids = {0: 11, 1: 11}
    watch = Watch(pids, rank_timeout_s=10, step_timeout_s=120, clock=clock)
    pids[1] = 33
    beat(watch, 1)
    watch.exited(1, -signal.SIGKILL)
    reason = watch.check()
    assert reason is not None and reason.startswith("rank 1 (pid 33) was killed")


def test_a_watcher_that_was_stopped_itself_blames_nobody(watch: Watch, clock: Clock) -> None:
    watch.check()
    clock.now += 3600
    assert watch.check() is None
    pass_time(watch, clock, 11, 0)
    assert watch.reason is not None


@pytest.mark.parametrize(("serving", "step", "hung"), [(True, 7, True), (True, -1, False), (False, 7, False)])
def test_only_a_step_of_a_serving_rank_can_hang(watch: Watch, serving: bool, step: int, hung: bool) -> None:
    watch.serving = serving
    beat(watch, 0)
    beat(watch, 1, step=step, busy_s=121)
    assert (watch.check() is not None) == hung


def test_a_rank_that_reads_an_adapter_for_ever_is_named(watch: Watch) -> None:
    for rank in range(2):
        beat(watch, rank, step=-1, busy_s=0.0, doing="idle")
    beat(watch, 1, step=-1, busy_s=599.0, doing="loading the adapter in /nfs/poet")
    assert watch.check() is None
    beat(watch, 1, step=-1, busy_s=601.0, doing="loading the adapter in /nfs/poet")
    reason = "rank 1 (pid 22) has been at this for 601 s: loading the adapter in /nfs/poet (rank 0: idle)"
    assert watch.check() == reason


def test_a_long_warm_up_is_no_hang_when_the_rank_is_ready(clock: Clock) -> None:
    watch = Watch({0: 11}, rank_timeout_s=10, step_timeout_s=120, clock=clock)
    beat(watch, 0, step=2, busy_s=121)
    assert watch.check() is None
    watch.heard(Ready(rank=0, peak_host_bytes=1))
    watch.serving = True
    assert watch.check() is None


def test_of_ranks_that_hang_together_the_one_behind_is_blamed_and_each_ones_last_collective_told(watch: Watch) -> None:
    doing = ("step 9: all_reduce ring 1152 B, #524, 121.0 s", "step 9, after all_reduce ring 1152 B, #523")
    for rank, number, busy_s in ((0, 524, 121), (1, 523, 119.6)):  # rank 1's last heartbeat is a little older
        watch.heard(Heartbeat(rank=rank, step=9, doing=doing[rank], busy_s=busy_s, num_collectives=number))
    assert watch.check() == (
        "rank 1 (pid 22) has been at one step for 120 s: step 9, after all_reduce ring 1152 B, #523 "
        "(rank 0: step 9: all_reduce ring 1152 B, #524, 121.0 s)"
    )


def test_of_stages_that_hang_together_the_one_at_the_earliest_step_is_blamed(watch: Watch) -> None:
    """A stage with more layers has begun more collectives."""
    for rank, step, number in ((0, 10, 300), (1, 9, 500)):
        doing = f"step {step}"
        watch.heard(Heartbeat(rank=rank, step=step, doing=doing, busy_s=121.0, num_collectives=number))
    assert str(watch.check()).startswith("rank 1 (pid 22) has been at one step for 121 s")


def test_a_step_that_moves_may_last_and_hangs_when_it_no_longer_does(watch: Watch) -> None:
    for busy_s, number in ((1.0, 10), (119.0, 400), (238.0, 800), (357.0, 801), (476.0, 801)):
        for rank in range(2):
            doing = f"step 9: all_reduce ring 1152 B, #{number}, 0.4 s"
            watch.heard(Heartbeat(rank=rank, step=9, doing=doing, busy_s=busy_s, num_collectives=number))
        assert watch.check() is None
    watch.heard(Heartbeat(rank=0, step=9, doing="step 9: a barrier", busy_s=478.0, num_collectives=801))
    reason = watch.check()
    assert reason is not None
    assert "rank 0 (pid 11) has been at one step for 478 s, 121 s without a new collective: step 9: a barrier" in reason


def test_last_words_are_newer_than_heartbeats(watch: Watch) -> None:
    beat(watch, 0, doing="step 7, after all_reduce ring 8 B, #3")
    watch.heard(failed(0, "PeerLostError: rank 1 is gone", symptom=True))
    watch.exited(1, -signal.SIGKILL)
    reason = watch.check()
    assert reason is not None and reason.endswith("(rank 0: step 7)")


def test_the_first_reason_stays(watch: Watch) -> None:
    watch.exited(1, -signal.SIGKILL)
    first = watch.check()
    watch.exited(0, 3)
    assert watch.check() == first


@pytest.fixture
def stopped() -> Iterator[int]:
    with subprocess.Popen(["sleep", "60"]) as process:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        yield process.pid
        process.kill()


def test_a_stopped_process_is_told_from_a_busy_one(stopped: int, clock: Clock) -> None:
    watch = Watch({0: stopped}, rank_timeout_s=10, step_timeout_s=120, clock=clock)
    watch.check()
    pass_time(watch, clock, 11)
    assert watch.reason is not None and f"rank 0 (pid {stopped}) is stopped (SIGSTOP)" in watch.reason


def test_a_replica_may_wait_for_another_one_as_long_as_that_gets_on(clock: Clock) -> None:
    watch = Watch(
        {0: 11, 1: 22, 2: 33, 3: 44}, rank_timeout_s=10, step_timeout_s=120, tp=2, num_replicas=2, clock=clock
    )
    watch.serving = True

    def beat_all(busy_s: float, num_collectives: int) -> None:
        for rank in (0, 1):
            watch.heard(
                Heartbeat(rank=rank, step=9, doing="step 9", busy_s=busy_s, num_collectives=9, num_choice_gathers=5)
            )
        for rank, number in ((2, num_collectives), (3, num_collectives - 1)):
            watch.heard(
                Heartbeat(
                    rank=rank, step=9, doing="step 9", busy_s=busy_s, num_collectives=number, num_choice_gathers=4
                )
            )

    beat_all(0.1, 10)
    beat_all(130, 60)
    assert watch.check() is None
    beat_all(251, 60)
    reason = watch.check()
    assert reason is not None
    assert reason.startswith(
        "rank 3 (replica 1) (pid 44) has been at one step for 251 s, 121 s without a new collective"
    )
    assert "rank 0 (replica 0): step 9" in reason


def test_a_host_with_one_replica_of_several_names_its_ranks(clock: Clock) -> None:
    watch = Watch({1: 22}, rank_timeout_s=10, step_timeout_s=120, num_replicas=2, clock=clock)
    assert watch.describe() == "rank 1 (replica 1): importing PyTorch"
    watch.exited(1, -signal.SIGKILL)
    assert (
        watch.check() == "rank 1 (replica 1) (pid 22) was killed by SIGKILL (out of memory?) while: importing PyTorch"
    )


def test_a_rank_of_another_host_is_named_with_its_node(clock: Clock) -> None:
    watch = Watch({0: 11, 1: 0}, rank_timeout_s=10, step_timeout_s=120, node_of="node {}".format, clock=clock)
    watch.begin_loading()
    watch.serving = True
    beat(watch, 1)
    pass_time(watch, clock, 12, 0)
    reason = watch.check()
    assert reason is not None
    assert reason.startswith(
        "rank 1 (node 1) has been silent for 11.5 s, last seen at: step 7: all_reduce ring (rank 0: step 7"
    )


def test_a_rank_of_a_host_that_has_not_joined_is_not_silent_and_later_its_host_reports_first(clock: Clock) -> None:
    watch = Watch({0: 11, 1: 0}, rank_timeout_s=10, step_timeout_s=120, node_of="node {}".format, clock=clock)
    beat(watch, 1)
    pass_time(watch, clock, 290, 0)
    assert watch.check() is None, "the deadline of joining is another one, and the host may start again"
    watch.begin_loading()
    pass_time(watch, clock, 5, 0)
    watch.serving = True
    assert watch.check() is None
    beat(watch, 1)
    pass_time(watch, clock, 10.5, 0)
    assert watch.check() is None, "its own host knows more, and reports at 10 s"
    pass_time(watch, clock, 1.5, 0)
    assert (watch.check() or "").startswith("rank 1 (node 1) has been silent for 11")


def test_ranks_that_come_no_further_are_described_once_a_minute(watch: Watch, clock: Clock) -> None:
    watch.serving = False
    beat(watch, 0, step=-1, doing="join")
    beat(watch, 1, step=-1, doing="waiting for rank 0 to compile")
    clock.now += 90
    assert watch.stalled() is None, "they have no work yet"
    watch.begin_loading()
    clock.now += 50
    watch.heard(Stage(rank=1, name="weights", fraction=0.5))
    clock.now += 50
    assert watch.stalled() is None
    clock.now += 15
    message = "no rank has come further for 60 s: rank 0: join; rank 1: waiting for rank 0 to compile"
    assert [watch.stalled(), watch.stalled()] == [message, None]
    clock.now += 61
    assert watch.stalled() == message
    watch.serving = True
    clock.now += 61
    assert watch.stalled() is None
