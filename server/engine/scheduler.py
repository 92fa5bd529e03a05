"""Which sequences take part in the next step, with how many tokens, and in which cache blocks.

Continuous batching, first come, first served. Each step has a budget of tokens. Running sequences that need one token
come first, so a long prefill never stops the others. Waiting sequences are admitted in order, as far as there are blocks
for all of each. What is left of the budget goes to prompts: up to half of it to those that can be finished with it, and
the rest to the oldest and then the next ones, so a long prompt does not keep the short ones behind it waiting, nor they
it. When blocks run out, the youngest running sequence gives up its own and goes back to the head of the queue, to be
computed again.

Nobody starves: whoever runs is older than whoever waits, only the youngest is preempted, and the oldest always gets at
least one token, because the pool holds the longest sequence there may be and the budget is at least one token per
sequence. So the oldest finishes, and everyone becomes the oldest.

A sequence starts behind what the prefix cache has of it, when it comes for the first time and after a preemption. Of those
whose next block is the same one, the oldest computes it, and the others go on behind it in the same step or the next.

Where drafts are made, a sequence that needs one token may bring guesses of those after it along, of what all others
left of budget and blocks: nobody waits or is preempted for a guess.

Sequences of unlike arms, summed by unlike AllReduces, never share a step: arms that have something to run take turns,
one step each. Waiting is in one queue, in order of arrival, whatever the arm. So what was said of the oldest holds in
each turn of its arm, which comes once in as many steps as there are arms, however long the others generate; and a step
of one arm may preempt the youngest of another.

Where keys and values come from the host for every step, its sequences may have only so many blocks together. Then the
youngest sit a step out, and the oldest, if it is behind, has its blocks left for it by those that need one token. Who would
make those that run too many for a step is not admitted.

A step may be planned ahead, while the last one runs and nobody knows what it chooses: a sequence's next token is then a
reference (``model/references``). Nobody is preempted for such a step, as a sequence that is about to end may give
its blocks, and nothing is guessed. What a sequence had when it ended is free at once, though a step that writes there may
still run: whoever gets its blocks writes and reads after that.
"""

from collections import deque
from collections.abc import Hashable, Sequence

from tightwire.server.config.limits import Limits
from tightwire.server.engine.block_pool import BlockPool
from tightwire.server.engine.drafts import NgramDrafter
from tightwire.server.engine.open_step import OpenStep
from tightwire.server.engine.prefix_cache import PrefixCache
from tightwire.server.engine.request import Request
from tightwire.server.engine.scheduled_step import ScheduledStep, make_step
from tightwire.server.ipc.engine_stats import EngineCounters


class _PreemptionNeededError(Exception):
    """A step planned ahead cannot be had without one."""


class Scheduler:
    """Waiting and running sequences and the block pool; ``schedule`` makes one step of them."""

    def __init__(
        self, limits: Limits, drafter: NgramDrafter | None = None, counters: EngineCounters | None = None
    ) -> None:
        """``drafter``: None where nothing is guessed. ``counters``: those of the engine; None: its own."""
        self.counters = EngineCounters() if counters is None else counters
        self.limits = limits
        self.step_tokens = limits.max_num_batched_tokens  # that the next step may take
        self._drafter = drafter
        self.pool = BlockPool(limits.num_blocks)
        self.prefixes = _prefix_cache(limits, self.pool, self.counters)
        self.waiting: deque[Request] = deque()  # oldest first, like running; all of running is older
        self.running: list[Request] = []
        self._last_arm = 0
        self._num_planned = 0

    def add(self, request: Request) -> None:
        """Queue a sequence whose tokens, with all it may generate, fit max_model_len."""
        self.waiting.append(request)

    def remove(self, request: Request, *, spoiled: bool = False) -> None:
        """Forget a sequence that ended or was cancelled; its blocks are free at once.

        ``spoiled``: what it computed came to nothing that others should share.
        """
        (self.running if request in self.running else self.waiting).remove(request)
        if spoiled:
            self.pool.spoil(request.blocks)
        elif self.prefixes is not None:  # a block that was filled before its last token was known
            self.prefixes.enter(request, request.num_computed)
        self._free(request)

    def learn(self, request: Request, num_right: int) -> None:
        """The first ``num_right`` guesses of ``request``'s draft held."""
        assert self._drafter is not None, "somebody made the draft"
        self._drafter.learn(request, num_right)

    def may_guess(self, num_seqs: int) -> bool:
        """Whether tokens may be guessed in a step of so many sequences."""
        return self._drafter is not None and num_seqs <= self.limits.max_drafting_seqs

    @property
    def num_to_compute(self) -> int:
        """Tokens that its sequences are known to need, cached ones of those that wait included."""
        return sum(request.num_to_compute for requests in (self.running, self.waiting) for request in requests)

    def has_requests(self) -> bool:
        return bool(self.running or self.waiting)

    def schedule(self, now_s: float, *, ahead: bool = False) -> ScheduledStep | None:
        """The next step, or None when there is nothing to do.

        ``ahead``: while the last one runs. Then None may also mean that it has to be waited for.
        """
        if not self.has_requests():
            return None
        try:
            step = self._plan(now_s, ahead)
        except _PreemptionNeededError:
            return None
        assert step is not None or ahead, "the oldest sequence always gets a token"
        return step

    def _plan(self, now_s: float, ahead: bool) -> ScheduledStep | None:
        for arm in self._turns():
            chunks = self._fill(arm, ahead).chunks()
            if chunks:  # the youngest may have found no block, and the head of the queue no room
                self._last_arm = arm
                self._num_planned += 1
                for chunk in chunks:
                    if chunk.request.first_scheduled_s is None:
                        chunk.request.first_scheduled_s = now_s
                return make_step(self._num_planned, chunks, arm)
        return None

    def _turns(self) -> list[int]:
        """The arms that may have something to run, the one whose turn it is first."""
        arms = {request.arm for request in self.running}
        if self.waiting:
            arms.add(self.waiting[0].arm)
        return sorted(arms, key=lambda arm: (arm <= self._last_arm, arm))

    def _fill(self, arm: int, ahead: bool) -> OpenStep:
        step = OpenStep(self.limits, self.step_tokens, ahead=ahead)
        runs = [request for request in self.running if request.arm == arm]
        if runs and _is_behind(runs[0]):
            step.reserve(runs[0])
        for request in [request for request in runs if not _is_behind(request)]:
            if request not in step.preempted:
                self._give(request, step, preempting=True)
        self._admit(arm)  # never one just preempted: it gave up less than it would need
        # Beside prompts, one just admitted of which all but the last token was found in the prefix cache.
        rest = [request for request in self.running if request.arm == arm and request not in step.tokens]
        self._fill_with_prompts([request for request in rest if request.num_to_compute], step)
        if self._drafter is not None and not ahead and self.may_guess(len(step.tokens)):
            for request in step.tokens:
                self._guess(request, step, self._drafter)
        return step

    def _fill_with_prompts(self, prompts: Sequence[Request], step: OpenStep) -> None:
        """Give what is left of the step to prompts and to what is computed again. The oldest of all gets something."""
        started: set[Hashable] = set()  # keys of blocks that this step works on, or leaves for the next
        preempting = True
        while True:
            leaders, followers = self._leaders(prompts, started)
            short = _short_ones(leaders, step.budget)
            reserved = sum(short.values())
            for request in leaders:
                reserved -= short.get(request, 0)
                if request not in step.preempted:
                    self._give(request, step, preempting=preempting, reserved=reserved)
            for request, num_tokens in step.tokens.items():
                self._enter(request, num_tokens, started)
            # Rows of generated tokens come first in a step, so they cannot go on behind a prompt's of the same step.
            prompts = [request for request in followers if request.in_prompt and request not in step.preempted]
            if not (leaders and prompts and step.budget):
                return
            preempting = False  # of what is entered nothing may be given up any more

    def _leaders(self, prompts: Sequence[Request], started: set[Hashable]) -> tuple[list[Request], list[Request]]:
        """Those whose next block nobody before them has, or is about to have; and the others, who had better wait."""
        if self.prefixes is None:
            return list(prompts), []
        leaders: list[Request] = []
        followers: list[Request] = []
        for request in prompts:
            self._count_hits(request, self.prefixes.advance(request))
            key = self.prefixes.next_key(request)
            (leaders if key is None or key not in started else followers).append(request)
            started.add(key)
        return leaders, followers

    def _give(self, request: Request, step: OpenStep, *, preempting: bool, reserved: int = 0) -> None:
        num_tokens = step.affordable(request, reserved)
        if num_tokens and self._grow(request, num_tokens, step, preempting=preempting):
            step.take(request, num_tokens)

    def _admit(self, arm: int) -> None:
        """Let waiting sequences run, in order, while there is room for all of each and for those running to grow."""
        wanted = sum(self._blocks_soon(request) - len(request.blocks) for request in self.running)
        while self.waiting and self.waiting[0].arm == arm and len(self.running) < self.limits.max_num_seqs:
            if self.running and wanted >= self.pool.num_free:
                return
            request = self.waiting[0]
            num_cached = 0 if self.prefixes is None else self.prefixes.advance(request)
            wanted += self._blocks_soon(request) - len(request.blocks)
            # Without the margin that ``_blocks_soon`` has, a sequence just preempted would come back, be computed again,
            # and be preempted again a few tokens later. The only sequence always has room.
            if self.running and (wanted > self.pool.num_free or not self._fits_in_a_step(request)):
                self._free(request)
                return
            self.running.append(self.waiting.popleft())
            if self.prefixes is not None:
                self._count_hits(request, num_cached)
                self.prefixes.count_query(request)

    def _fits_in_a_step(self, request: Request) -> bool:
        """Whether ``request`` and all that run could take part in one step, soon too."""
        if self.limits.max_step_blocks is None:
            return True
        together = [*self.running, request]
        blocks = {block for each in together for block in each.blocks}
        growth = sum(self._blocks_soon(each) - len(each.blocks) for each in together)
        return len(blocks) + growth <= self.limits.max_step_blocks

    def _blocks_soon(self, request: Request) -> int:
        """All that ``request`` needs for its tokens and one block more."""
        num_tokens = len(request.token_ids) + self.limits.block_size
        return max(len(request.blocks), self.limits.blocks_for(min(num_tokens, self.limits.max_model_len)))

    def _grow(self, request: Request, num_tokens: int, step: OpenStep, *, preempting: bool) -> bool:
        """Give ``request`` blocks for its next tokens; False when there are none for it.

        ``preempting``: the youngest give up theirs for it, unless it is the youngest itself.
        """
        missing = self.limits.blocks_for(request.num_computed + num_tokens) - len(request.blocks)
        if missing <= 0:
            return True
        while missing > self.pool.num_free:
            if not preempting:
                return False
            if step.ahead:
                raise _PreemptionNeededError
            victim = self.running[-1]
            self._preempt(victim)
            step.drop(victim)
            if victim is request:
                return False
        request.blocks.extend(self.pool.allocate(missing))
        return True

    def _guess(self, request: Request, step: OpenStep, drafter: NgramDrafter) -> None:
        if request.in_prompt or request.num_to_compute != 1:
            return
        num_tokens = len(request.token_ids)
        # A block for each sequence's next token is left, as what guesses that failed have taken is not given back.
        num_free = max(0, self.pool.num_free - len(self.running))
        free_slots = (len(request.blocks) + num_free) * self.limits.block_size - num_tokens
        # The last token of an answer is chosen, not computed.
        wanted = request.params.max_tokens - request.num_output_tokens - 1
        draft = drafter.draft(request, min(step.room_for_draft(request), free_slots, wanted))
        if draft and self._grow(request, 1 + len(draft), step, preempting=False):
            step.take_draft(request, draft)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._free(request)
        request.was_preempted = True
        self.waiting.appendleft(request)
        self.counters.num_preemptions += 1

    def _free(self, request: Request) -> None:
        self.pool.free(reversed(request.blocks))  # of what is kept, the ends of prompts are to go first
        del request.blocks[:]
        request.num_computed = 0
        request.num_entered_blocks, request.prefix = 0, None

    def _enter(self, request: Request, num_tokens: int, started: set[Hashable]) -> None:
        """Tell the prefix cache of what this step will compute. From here on the sequence is not preempted in it."""
        if self.prefixes is not None:
            self.prefixes.enter(request, request.num_computed + num_tokens)
            started.add(self.prefixes.next_key(request))

    def _count_hits(self, request: Request, num_tokens: int) -> None:
        if self.prefixes is not None and not request.was_preempted:
            self.prefixes.count_hits(request, num_tokens)


def _is_behind(request: Request) -> bool:
    """Whether it has more to compute than the token it generated last."""
    return request.num_to_compute > 1 or request.in_prompt


def _short_ones(prompts: Sequence[Request], budget: int) -> dict[Request, int]:
    """Those behind the oldest that can be finished with half of the budget, and how much of it each needs.

    None whose tokens are scored: they have a budget of their own, which the oldest must find whole.
    """
    room = budget // 2
    short: dict[Request, int] = {}
    for request in prompts[1:]:
        if request.num_to_compute <= room and request.prompt_logprobs is None:
            room -= request.num_to_compute
            short[request] = request.num_to_compute
    return short


def _prefix_cache(limits: Limits, pool: BlockPool, counters: EngineCounters) -> PrefixCache | None:
    if limits.prefix_cache == "none":
        return None
    return PrefixCache(pool, limits.block_size, counters=counters, with_answers=limits.prefix_cache == "all")
