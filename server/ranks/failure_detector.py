"""Decides from exits, reports and heartbeats whether a rank is lost, and words the reason. Has no sockets or processes.

When a rank is killed, the others fail in their collective, and may report first. So the caller waits briefly after the
first sign, and symptoms wait longer: on a busy machine the kernel reports an exit long after connections close.
"""

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from tightwire.parent_death import state_of
from tightwire.server.ipc.messages import Failed, FromRank, Heartbeat, Ready, Stage
from tightwire.server.plan.rank_setup import rank_name

_IMPORTING = "importing PyTorch"  # before it is forked, and can be heard
# A rank that imports more from a slow disk may hold the interpreter, and delay the heartbeat, for long.
_LOADING_PATIENCE = 12
# How long ranks may load without a part of a stage done, before the log says what each does.
_SAY_STALLED_S = 60.0
# If this clock jumps further, the parent itself was stopped and cannot judge the ranks' silence.
_OWN_PAUSE_S = 3.0
# How long to wait for a cause after the first sign; at most half of the silence timeout.
_CAUSE_PATIENCE_S = 3.0
_OTHER_HOST_S = 1.0  # for another host's report of a silent rank
# How long a rank may be at something between two steps, such as reading an adapter from a slow disk; no request goes on meanwhile.
_BETWEEN_STEPS_S = 600.0


@dataclass(slots=True)
class _Rank:
    pid: int
    heard_s: float
    beat: Heartbeat
    moved_s: float = 0.0  # ``busy_s`` at the last progress: a new collective, or a part of a streamed layer
    exit_code: int | None = None
    failed: Failed | None = None

    @property
    def doing(self) -> str:
        return self.beat.doing if self.failed is None else self.failed.doing

    @property
    def stuck_s(self) -> float:
        return self.beat.busy_s - self.moved_s


class Watch:
    """The known state of each rank. Set ``serving`` once all are ready: steps have a deadline from then on."""

    def __init__(
        self,
        pids: Mapping[int, int],
        *,
        rank_timeout_s: float,
        step_timeout_s: float,
        forks: int = 0,
        tp: int = 1,
        num_replicas: int = 1,
        node_of: Callable[[int], str] = lambda rank: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``pids``: the process of each rank, that of ``forks`` until it is forked; 0 for one of another host. ``tp``: ranks of a replica. ``node_of``: the name of a rank's host; empty if there is one."""
        self.serving = False
        self.reason: str | None = None
        self._rank_timeout_s, self._step_timeout_s = rank_timeout_s, step_timeout_s
        self._tp, self._num_replicas = tp, num_replicas
        self._clock, self._last_check = clock, clock()
        self._first_sign_s = float("inf")  # when the first exit or failure was seen
        self._moved_s: float | None = None  # when a rank last did a part of a stage, after ``begin_loading``
        self._node_of, self._pids, self._forks = node_of, pids, forks
        self._ranks = {
            rank: _Rank(pid, clock(), Heartbeat(rank=rank, step=-1, doing=_IMPORTING, busy_s=0.0))
            for rank, pid in pids.items()
        }

    def heard(self, message: FromRank) -> None:
        """Record a message. Any heartbeat shows that its rank is alive."""
        if isinstance(message, Heartbeat):
            rank = self._ranks[message.rank]
            if message.step != rank.beat.step:
                rank.moved_s = 0.0
            elif (message.num_collectives, message.num_fetched) != (rank.beat.num_collectives, rank.beat.num_fetched):
                rank.moved_s = message.busy_s
            rank.heard_s, rank.beat = self._clock(), message
        elif isinstance(message, Ready):
            # The last heartbeat may be from a long warm-up, which has no time limit.
            rank = self._ranks[message.rank]
            rank.beat = msgspec.structs.replace(rank.beat, step=-1, doing="idle", busy_s=0.0)
            rank.moved_s = 0.0
        elif isinstance(message, Failed):
            # To the end: of several, the first to fail is named, because the others may have failed by its end.
            rank = self._ranks[message.rank] = self._ranks.pop(message.rank)
            rank.failed = message
            self._note_sign()
        if isinstance(message, Stage | Ready) and self._moved_s is not None:
            self._moved_s = self._clock()

    def begin_loading(self) -> None:
        """Record that the ranks have got their work. From now on silence counts for ranks of other hosts too."""
        self._moved_s = self._clock()
        for rank in self._ranks.values():
            rank.heard_s = self._moved_s

    def stalled(self) -> str | None:
        """What each rank does if none has done a part of a stage for a minute; then again after another minute."""
        if self.serving or self._moved_s is None or self._clock() - self._moved_s < _SAY_STALLED_S:
            return None
        self._moved_s = self._clock()
        return f"no rank has come further for {_SAY_STALLED_S:.0f} s: {self.describe()}"

    def exited(self, rank: int, exit_code: int) -> None:
        self._ranks[rank].exit_code = exit_code
        self._note_sign()

    def _note_sign(self) -> None:
        self._first_sign_s = min(self._first_sign_s, self._clock())

    def check(self) -> str | None:
        """The reason why the ranks cannot continue, or None. The first reason is kept."""
        now = self._clock()
        if now - self._last_check > _OWN_PAUSE_S:
            for rank in self._ranks.values():
                rank.heard_s = now
        self._last_check = now
        for number, rank in self._ranks.items():
            rank.pid = self._pids[number]
            if rank.pid != self._forks and rank.beat.doing == _IMPORTING:
                rank.heard_s, rank.beat = now, msgspec.structs.replace(rank.beat, doing="starting")
        if self.reason is None:
            self.reason = self._verdict(now)
        return self.reason

    def _verdict(self, now: float) -> str | None:
        """Check causes before symptoms. A normal exit or a symptom first waits for a better explanation."""
        waits = now - self._first_sign_s < min(_CAUSE_PATIENCE_S, self._rank_timeout_s / 2)
        for find in (self._killed, self._failed, self._left, self._silent, self._hung, self._symptom):
            for number, rank in self._ranks.items():
                what = find(rank, now)
                if what is not None:
                    if waits and find in (self._left, self._symptom):
                        return None
                    others = f" ({doing})" if (doing := self.describe(without=number)) else ""
                    place = ", ".join(filter(None, [self._node_of(number), f"pid {rank.pid}" if rank.pid else ""]))
                    return f"rank {self._name(number)} ({place}) {what}{others}"
        return None

    def _killed(self, rank: _Rank, now: float) -> str | None:
        if rank.exit_code is None or rank.exit_code >= 0:
            return None
        number = -rank.exit_code
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        cause = " (out of memory?)" if number == signal.SIGKILL else ""
        return f"was killed by {name}{cause} while: {rank.doing}"

    def _failed(self, rank: _Rank, now: float, symptom: bool = False) -> str | None:
        if rank.failed is not None and rank.failed.symptom == symptom:
            return f"failed while: {rank.failed.doing}: {rank.failed.message}"
        return None

    def _symptom(self, rank: _Rank, now: float) -> str | None:
        return self._failed(rank, now, symptom=True)

    def _left(self, rank: _Rank, now: float) -> str | None:
        if rank.exit_code is not None and rank.failed is None:
            return f"exited with code {rank.exit_code} while: {rank.doing}"
        return None

    def _silent(self, rank: _Rank, now: float) -> str | None:
        if not rank.pid and self._moved_s is None:
            return None  # its host may start again until all have joined, for which there is another deadline
        loading = float("inf") if rank.beat.doing == _IMPORTING else _LOADING_PATIENCE
        limit = self._rank_timeout_s * (1.0 if self.serving else loading)
        silent_s = now - rank.heard_s
        if silent_s > self._rank_timeout_s and rank.pid and state_of(rank.pid) in ("T", "t"):
            return f"is stopped (SIGSTOP), silent for {silent_s:.1f} s, last seen at: {rank.doing}"
        # A remote rank's own host also watches it and can tell whether it was stopped, so give it time to report.
        if silent_s > limit + (0.0 if rank.pid else _OTHER_HOST_S):
            return f"has been silent for {silent_s:.1f} s, last seen at: {rank.doing}"
        return None

    def _hung(self, rank: _Rank, now: float) -> str | None:
        if not self.serving:
            return None
        if rank.beat.step < 0 and rank.stuck_s > _BETWEEN_STEPS_S:
            return f"has been at this for {rank.stuck_s:.0f} s: {rank.doing}"
        stepping = [each for each in self._ranks.values() if each.beat.step >= 0]
        # A replica that has finished its step waits for the others, as long as they make progress.
        fewest = min((each.beat.num_choice_gathers for each in stepping), default=0)
        at_a_step = [each for each in stepping if each.beat.num_choice_gathers == fewest]
        # A step may take minutes: a long prompt over a slow link moves from collective to collective.
        if not any(each.stuck_s > self._step_timeout_s for each in at_a_step):
            return None
        # Ranks begin a step together and their heartbeats arrive at different times, so the first rank over the limit
        # is not necessarily the cause. The others wait for the rank that has begun the fewest collectives.
        # Stages of a pipeline have unlike layers, and so unlike numbers in one step; replicas count their own steps.
        one_count = self._num_replicas == 1
        behind = min(at_a_step, key=lambda each: (one_count and each.beat.step, each.beat.num_collectives))
        if rank is not behind:
            return None
        stuck = f", {rank.stuck_s:.0f} s without a new collective" if rank.moved_s else ""
        return f"has been at one step for {rank.beat.busy_s:.0f} s{stuck}: {rank.doing}"

    def describe(self, without: int = -1) -> str:
        """The last reported activity of all ranks but one, each with its newest collective."""
        ranks = sorted(self._ranks.items())
        return "; ".join(f"rank {self._name(n)}: {rank.doing}" for n, rank in ranks if n != without)

    def _name(self, number: int) -> str:
        return rank_name(number, self._tp, self._num_replicas)

    def tracebacks(self, *, of_symptoms: bool = False) -> list[tuple[int, str]]:
        """By rank, the tracebacks of ranks that failed on their own, or of those that failed because of another rank."""
        failed = ((number, rank.failed) for number, rank in self._ranks.items() if rank.failed)
        return [(number, one.traceback) for number, one in failed if one.traceback and one.symptom == of_symptoms]
