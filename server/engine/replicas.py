"""The replicas of the model as the engine sees them: a scheduler each, with its own cache blocks, and a step of all of them.

A sequence stays with the replica that it was given on arrival (``routing``); a preempted one comes back to it. With one
replica this is its scheduler and nothing else.
"""

from typing import NamedTuple

import msgspec

from tightwire.model.step import StepPlan, idle_plan, meeting_of
from tightwire.server.config.limits import Limits
from tightwire.server.engine.drafts import NgramDrafter
from tightwire.server.engine.request import Request
from tightwire.server.engine.routing import choose_replica
from tightwire.server.engine.scheduled_step import Chunk
from tightwire.server.engine.scheduler import Scheduler
from tightwire.server.ipc.engine_stats import EngineCounters, ReplicaLoad


class WorldStep(NamedTuple):
    """A plan for each replica, and the sequences' parts in the order of all plans' rows, replica after replica."""

    plans: list[StepPlan]
    chunks: list[Chunk]


class Replicas:
    """``schedule`` makes one step of all; everything else goes to the scheduler that a sequence was given to."""

    def __init__(
        self, limits: Limits, num_replicas: int, drafter: NgramDrafter | None, counters: EngineCounters
    ) -> None:
        """``limits``: of each replica. ``counters``: of all replicas together."""
        self._schedulers = [Scheduler(limits, drafter, counters) for _ in range(num_replicas)]
        self._num_planned = 0

    def add(self, request: Request, replica: int | None = None) -> None:
        """Queue a sequence; ``replica``: where, instead of where there is least to do."""
        request.replica = self._choose(request) if replica is None else replica
        self._schedulers[request.replica].add(request)

    def remove(self, request: Request, *, spoiled: bool = False) -> None:
        self._schedulers[request.replica].remove(request, spoiled=spoiled)

    def learn(self, request: Request, num_right: int) -> None:
        self._schedulers[request.replica].learn(request, num_right)

    def may_guess(self, num_seqs: int) -> bool:
        return self._schedulers[0].may_guess(num_seqs)

    def limit_steps(self, num_tokens: int) -> None:
        """The most that the next steps may take, each replica's for itself."""
        for scheduler in self._schedulers:
            scheduler.step_tokens = num_tokens

    def schedule(self, now_s: float, *, ahead: bool = False) -> WorldStep | None:
        """The next step of every replica that has something to do, an empty plan for the others; None when none has.

        ``ahead``: as for ``Scheduler.schedule``; with one replica only.
        """
        steps = [scheduler.schedule(now_s, ahead=ahead) for scheduler in self._schedulers]
        if not any(steps):
            return None
        plans = [step.plan if step else idle_plan(0) for step in steps]
        if len(plans) > 1:
            self._num_planned += 1
            together = {"index": self._num_planned, "meeting": meeting_of(plans)}
            plans = [msgspec.structs.replace(plan, **together) for plan in plans]
        return WorldStep(plans, [chunk for step in steps if step for chunk in step.chunks])

    def loads(self) -> list[ReplicaLoad]:
        return [
            ReplicaLoad(
                num_running=len(scheduler.running),
                num_waiting=len(scheduler.waiting),
                num_blocks=scheduler.pool.num_blocks,
                num_free_blocks=scheduler.pool.num_free,
            )
            for scheduler in self._schedulers
        ]

    def _choose(self, request: Request) -> int:
        if len(self._schedulers) == 1:
            return 0
        cached = [0 if s.prefixes is None else s.prefixes.num_kept(request) for s in self._schedulers]
        return choose_replica([scheduler.num_to_compute for scheduler in self._schedulers], cached)
