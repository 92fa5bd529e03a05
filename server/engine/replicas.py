"""Chooses a replica of the model for each new sequence, and makes one step of all replicas.

Each replica has its own scheduler and KV-cache blocks. A sequence stays with its replica, even after a preemption.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tightwire.model.step import StepPlan, gather_sizes, idle_plan
from tightwire.server.config.limits import Limits
from tightwire.server.engine.drafts import NgramDrafter
from tightwire.server.engine.request import Request
from tightwire.server.engine.scheduler import Scheduler
from tightwire.server.engine.step_builder import Chunk
from tightwire.server.ipc.engine_stats import EngineCounters, ReplicaLoad

# As a share of the larger of two loads: how much more work a replica may have than another because its prefix cache
# holds the prompt. A cached prompt saves work once, while a running sequence slows its neighbours until it ends.
_NEAR_SHARE = 0.25


class WorldStep(NamedTuple):
    """One plan for each replica, and the sequences' chunks in the order of all plans' rows, replica after replica."""

    plans: list[StepPlan]
    chunks: list[Chunk]


class Replicas:
    """``schedule`` makes one step of all replicas; other calls go to the sequence's scheduler."""

    def __init__(
        self, limits: Limits, num_replicas: int, drafter: NgramDrafter | None, counters: EngineCounters
    ) -> None:
        """``limits``: of each replica. ``counters``: of all replicas together."""
        self._schedulers = [Scheduler(limits, drafter, counters) for _ in range(num_replicas)]
        self._num_planned = 0

    def add(self, request: Request, replica: int | None = None) -> None:
        """Queue a sequence; ``replica``: overrides the choice."""
        request.replica = self._choose(request) if replica is None else replica
        self._schedulers[request.replica].sequences.add(request)

    def remove(self, request: Request, *, spoiled: bool = False) -> None:
        self._schedulers[request.replica].sequences.remove(request, spoiled=spoiled)

    def may_draft(self, num_seqs: int) -> bool:
        return self._schedulers[0].may_draft(num_seqs)

    def limit_steps(self, num_tokens: int) -> None:
        """Set the token limit of each replica's next steps."""
        for scheduler in self._schedulers:
            scheduler.step_tokens = num_tokens

    def schedule(self, now_s: float, *, ahead: bool = False) -> WorldStep | None:
        """The next step of every replica with work, an empty plan for the others; None if none has work.

        ``ahead``: as for ``Scheduler.schedule``; with one replica only.
        """
        steps = [scheduler.schedule(now_s, ahead=ahead) for scheduler in self._schedulers]
        if not any(steps):
            return None
        plans = [step.plan if step else idle_plan(0) for step in steps]
        if len(plans) > 1:
            self._num_planned += 1
            together = {"index": self._num_planned, "gather_sizes": gather_sizes(plans)}
            plans = [msgspec.structs.replace(plan, **together) for plan in plans]
        return WorldStep(plans, [chunk for step in steps if step for chunk in step.chunks])

    def loads(self) -> list[ReplicaLoad]:
        return [scheduler.sequences.load for scheduler in self._schedulers]

    def _choose(self, request: Request) -> int:
        if len(self._schedulers) == 1:
            return 0
        all_sequences = [scheduler.sequences for scheduler in self._schedulers]
        num_cached = [sequences.prefixes.num_cached(request) for sequences in all_sequences]
        return choose_replica([sequences.num_to_compute for sequences in all_sequences], num_cached)


def choose_replica(loads: Sequence[int], num_cached: Sequence[int]) -> int:
    """Of the replicas with nearly the least load, the one that has cached most of the prompt.

    Args:
        loads: known tokens left to compute on each replica: the rest of its prompts, and one per running answer.
        num_cached: tokens of the prompt that each replica has cached.
    """
    least = min(loads)
    near = [replica for replica, load in enumerate(loads) if load - least <= _NEAR_SHARE * load]
    return max(near, key=lambda replica: (num_cached[replica], -loads[replica], -replica))
