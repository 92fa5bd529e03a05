"""Fills each step of every replica with tokens of its running sequences. ``sequences`` decides which sequences run.

docs/serving.md describes the order. Running sequences are older than waiting ones, and the oldest always gets a token,
because the pool holds the longest possible sequence; so it finishes, and no sequence starves. Drafted tokens take the
budget and blocks that the others leave.

Sequences of different AllReduce policies never share a step; policies with work take turns, one step each. With the KV
cache on the host, a step can hold only ``max_step_blocks`` blocks: the youngest sequences sit it out, and if the oldest
is still catching up, decoding sequences leave room for it.

A step planned ahead preempts nobody: a sequence about to end may free enough blocks. It drafts nothing, because the
tokens that a draft would follow are not known yet. Blocks of an ended sequence are free at once, even if the running
step still writes to them: the next holder writes and reads later.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import msgspec

from tightwire.model.step import IDLE_PLAN, StepPlan
from tightwire.server.config.limits import Limits
from tightwire.server.engine.drafts import Drafter
from tightwire.server.engine.request import Request
from tightwire.server.engine.sequences import Sequences
from tightwire.server.engine.step_builder import Chunk, ScheduledStep, StepBuilder, make_step
from tightwire.server.engine.under_way import ChunksUnderWay
from tightwire.server.ipc.engine_stats import EngineCounters, ReplicaLoad

# How much busier a replica may be, as a share of the larger load, and still win because it has cached the prompt. A cached prompt saves work once, while a running sequence slows its neighbours until it ends.
_NEAR_SHARE = 0.25


class _PreemptionNeededError(Exception):
    """A step cannot be planned ahead without a preemption."""


class Scheduler:
    """``schedule`` makes the next step of one replica's sequences."""

    def __init__(self, limits: Limits, drafter: Drafter | None = None, counters: EngineCounters | None = None) -> None:
        self.step_tokens = limits.max_num_batched_tokens  # budget of the next step
        self.counters = EngineCounters() if counters is None else counters
        self.sequences = Sequences(limits, self.counters)
        self._limits, self._drafter = limits, drafter
        self._last_policy, self._num_planned = 0, 0
        self._under_way = ChunksUnderWay(limits) if limits.num_stages > 1 else None

    def may_draft(self, num_seqs: int) -> bool:
        """True if steps may hold drafts while there are so many sequences, in steps or waiting."""
        return self._drafter is not None and num_seqs <= self._limits.max_drafting_seqs

    def schedule(self, now_s: float, *, ahead: bool = False) -> ScheduledStep | None:
        """The next step, or None: nothing to do, or with ``ahead`` (the previous step still runs) the caller must wait for that."""
        if not self.sequences:
            return None
        try:
            step = self._plan(now_s, ahead)
        except _PreemptionNeededError:
            return None
        assert step or ahead or self._limits.pipeline, "the oldest sequence always gets a token, or waits for one"
        return step

    def _plan(self, now_s: float, ahead: bool) -> ScheduledStep | None:
        for policy in self._turns():
            chunks = self._fill(policy, ahead).chunks()
            if chunks:  # empty if the youngest found no block, and the head of the queue did not fit
                self._last_policy = policy
                for chunk in chunks:
                    if chunk.request.first_scheduled_s is None:
                        chunk.request.first_scheduled_s = now_s
                return self._make(chunks, policy)
        return self._make([], 0) if self._under_way else None

    def _make(self, chunks: list[Chunk], policy: int) -> ScheduledStep:
        self._num_planned += 1
        stages = None
        if self._under_way is not None:
            stages = self._under_way.advance(self._num_planned, chunks, staged=policy < self._limits.num_policies)
        return make_step(self._num_planned, chunks, self._limits, policy, stages)

    def _may_run(self, request: Request, policy: int) -> bool:
        """True if a step of ``policy`` may have tokens of ``request``; its decode rows wait for its prompt."""
        return request.policy == policy and (request.in_prompt or request.ready_at <= self._num_planned + 1)

    def _turns(self) -> list[int]:
        """The policies that may have work, in the order of their turns."""
        policies = {request.policy for request in self.sequences.running}
        if self.sequences.waiting:
            policies.add(self.sequences.waiting[0].policy)
        return sorted(policies, key=lambda policy: (policy <= self._last_policy, policy))

    def _fill(self, policy: int, ahead: bool) -> StepBuilder:
        step = StepBuilder(self._limits, self.step_tokens, ahead=ahead)
        running = [request for request in self.sequences.running if self._may_run(request, policy)]
        if running and _is_behind(running[0]):
            step.reserve(running[0])
        decoding = [request for request in running if not _is_behind(request)]
        group = self._group(decoding) if self._limits.pipeline else decoding
        held = set(decoding).difference(group) if self._limits.pipeline else ()
        for request in group:
            if request not in step.preempted:
                self._give(request, step, preempting=True)
        self.sequences.admit(policy)  # never one just preempted: it freed fewer blocks than it would need
        # Besides prompts: sequences just admitted with all but their last token in the prefix cache.
        others = [each for each in self.sequences.running if each not in step.tokens and each not in held]
        prompts = [each for each in others if self._may_run(each, policy) and each.num_to_compute]
        withheld = 0
        if prompts and self._under_way is not None and policy < self._limits.num_policies:  # they pass the stages
            whole = [(min(each.num_cached_tokens, each.num_computed), each.num_prompt_tokens) for each in prompts]
            rows = self._limits.chunks.choose(whole, prompts[0].num_computed, self._limits.num_stages)
            withheld = max(0, step.budget - rows)
            step.budget -= withheld
        self._fill_with_prompts(prompts, step)
        step.budget += withheld
        if self._drafter is not None and not ahead and self.may_draft(len(self.sequences)):
            drafting = [each for each in step.tokens if not each.in_prompt and each.num_to_compute == 1]
            self._drafter.prepare(drafting, self.step_tokens - step.budget, len(step.tokens))
            for request in drafting:
                self._draft(request, step, self._drafter)
        return step

    def _group(self, decoding: Sequence[Request]) -> Sequence[Request]:
        """The sequences of a pipeline whose next tokens this step computes: as many groups as there are stages are under way.

        Those that no group has room for wait for it; a smaller group would read all weights too.
        """
        num_stages, ready = self._limits.num_stages, [request for request in decoding if request.num_to_compute]
        under_way = {request.entered_at for request in decoding if not request.num_to_compute}
        return ready[: -(-len(decoding) // num_stages)] if len(under_way) < num_stages else []

    def _fill_with_prompts(self, prompts: Sequence[Request], step: StepBuilder) -> None:
        """Give the rest of the step to prompts and to recomputed sequences. The oldest sequence always gets tokens."""
        started: set[Hashable] = set()  # keys of blocks that this step computes, or leaves for the next step
        preempting = True
        while True:
            leaders, followers = self._split_by_next_block(prompts, started)
            short = _short_ones(leaders, step.budget)
            reserved = sum(short.values())
            for request in leaders:
                reserved -= short.get(request, 0)
                # Decode rows come first in a step, so they cannot continue a prefix of the same step, which advances in later rounds.
                if request not in step.preempted and (preempting or request.in_prompt):
                    self._give(request, step, preempting=preempting, reserved=reserved)
            for request, num_tokens in step.tokens.items():
                # From here on the sequence is not preempted in this step.
                self.sequences.prefixes.enter(request, request.num_computed + num_tokens)
                started.add(self.sequences.prefixes.next_key(request))
            prompts = [request for request in followers if request.in_prompt and request not in step.preempted]
            if not (leaders and prompts and step.budget):
                return
            preempting = False  # the prefix cache already counts on what this step computes

    def _split_by_next_block(
        self, prompts: Sequence[Request], started: set[Hashable]
    ) -> tuple[list[Request], list[Request]]:
        """Sequences whose next block no older one computes, and the others, which wait for it."""
        leaders: list[Request] = []
        followers: list[Request] = []
        for request in prompts:
            self.sequences.prefixes.count_hits(request, self.sequences.advance(request))
            key = self.sequences.prefixes.next_key(request)
            (leaders if key is None or key not in started else followers).append(request)
            started.add(key)
        return leaders, followers

    def _give(self, request: Request, step: StepBuilder, *, preempting: bool, reserved: int = 0) -> None:
        num_tokens = step.affordable(request, reserved)
        if num_tokens and self._grow(request, num_tokens, step, preempting=preempting):
            step.take(request, num_tokens)

    def _grow(self, request: Request, num_tokens: int, step: StepBuilder, *, preempting: bool) -> bool:
        """Allocate blocks for its next tokens; False if too few. ``preempting``: preempt younger sequences, finally this one."""
        while not self.sequences.grow(request, num_tokens):
            if not preempting:
                return False
            if step.ahead:
                raise _PreemptionNeededError
            victim = self.sequences.running[-1]
            self.sequences.preempt(victim)
            step.drop(victim)
            if victim is request:
                return False
        return True

    def _draft(self, request: Request, step: StepBuilder, drafter: Drafter) -> None:
        sequences, num_groups, num_tokens = self.sequences, self._limits.groups.num, len(request.token_ids)
        # Leave a block of each group for each sequence's next token, because blocks of rejected drafts are not returned.
        num_free = max(0, sequences.pool.num_free - num_groups * len(sequences.running))
        num_blocks = (len(request.blocks) + num_free) // num_groups
        free_slots = num_blocks * self._limits.block_size - num_tokens
        # The last token of an answer is chosen, not computed.
        room = min(step.room_for_draft(request), free_slots, request.params.max_tokens - request.num_output_tokens - 1)
        draft = drafter.draft(request, room, self.step_tokens - step.budget, len(step.tokens))
        if draft and sequences.grow(request, 1 + len(draft)):
            step.take_draft(request, draft)


def _is_behind(request: Request) -> bool:
    """True if it has more to compute than the token it generated last."""
    return request.num_to_compute > 1 or request.in_prompt


def _short_ones(prompts: Sequence[Request], budget: int) -> dict[Request, int]:
    """The prompts after the oldest that half of the budget can finish, with their tokens. Excludes scored prompts."""
    room = budget // 2
    short: dict[Request, int] = {}
    for request in prompts[1:]:
        if request.num_to_compute <= room and request.prompt_logprobs is None:
            room -= request.num_to_compute
            short[request] = request.num_to_compute
    return short


class WorldStep(NamedTuple):
    """One plan for each replica, and what ``ScheduledStep`` has, replica after replica."""

    plans: list[StepPlan]
    chunks: list[Chunk]
    results: list[Chunk]


class Replicas:
    """``schedule`` makes one step of all replicas; other calls go to the sequence's scheduler."""

    def __init__(self, limits: Limits, num_replicas: int, drafter: Drafter | None, counters: EngineCounters) -> None:
        """``limits``: the limits of each replica. ``counters``: the counters of all replicas together."""
        self._schedulers = [Scheduler(limits, drafter, counters) for _ in range(num_replicas)]
        self._num_planned, self._limits = 0, limits

    def add(self, request: Request, replica: int | None = None) -> None:
        """Queue a sequence; ``replica``: overrides the choice."""
        request.replica = self._choose(request) if replica is None else replica
        self._schedulers[request.replica].sequences.add(request)

    def remove(self, request: Request, *, spoiled: bool = False) -> None:
        self._schedulers[request.replica].sequences.remove(request, spoiled=spoiled)

    def may_draft(self, num_seqs: int) -> bool:
        return any(each.may_draft(max(num_seqs, len(each.sequences))) for each in self._schedulers)

    def limit_steps(self, num_tokens: int) -> None:
        for scheduler in self._schedulers:
            scheduler.step_tokens = num_tokens

    def schedule(self, now_s: float, *, ahead: bool = False) -> WorldStep | None:
        """The next step of every replica with work, an empty plan for the others; None if none has work."""
        steps = [scheduler.schedule(now_s, ahead=ahead) for scheduler in self._schedulers]
        if not any(steps):
            return None
        plans = [step.plan if step else IDLE_PLAN for step in steps]
        if len(plans) > 1:
            self._num_planned += 1
            plans = [msgspec.structs.replace(plan, index=self._num_planned) for plan in plans]
        made = [step for step in steps if step]
        return WorldStep(plans, [c for step in made for c in step.chunks], [c for step in made for c in step.results])

    def learn(self, step: WorldStep, seconds: float) -> None:
        """Take the time of a step into account for the next chunks, if prompts pass stages and it had nothing else."""
        of_prompts = all(chunk.start < chunk.request.num_prompt_tokens for chunk in step.chunks)
        if self._limits.num_stages > 1 and step.chunks and of_prompts and not step.plans[0].logit_rows:
            self._limits.chunks.learn([(chunk.start, chunk.end) for chunk in step.chunks], seconds)

    def loads(self) -> list[ReplicaLoad]:
        return [scheduler.sequences.load for scheduler in self._schedulers]

    def _choose(self, request: Request) -> int:
        if len(self._schedulers) == 1:
            return 0
        all_sequences = [scheduler.sequences for scheduler in self._schedulers]
        num_cached = [sequences.prefixes.num_cached(request) for sequences in all_sequences]
        return choose_replica([sequences.num_to_compute for sequences in all_sequences], num_cached)


def choose_replica(loads: Sequence[int], num_cached: Sequence[int]) -> int:
    """The replica that has cached most of the prompt, among those with nearly the least load (known tokens left to compute)."""
    least = min(loads)
    near = [replica for replica, load in enumerate(loads) if load - least <= _NEAR_SHARE * load]
    return max(near, key=lambda replica: (num_cached[replica], -loads[replica], -replica))
