"""Which sequences take part in the next step, with how many tokens, and in which cache blocks.

Continuous batching, first come, first served. Each step has a budget of tokens. Running sequences that need one token
come first, so a long prefill never stops the others; what is left goes to unfinished prefills, then to waiting
sequences, oldest first. When blocks run out, the youngest running sequence gives up its own and goes back to the head
of the queue, to be computed again.

Nobody starves: whoever runs is older than whoever waits, only the youngest is preempted, and the oldest always gets at
least one token, because the pool holds the longest sequence there may be and the budget is at least one token per
sequence. So the oldest finishes, and everyone becomes the oldest.

A sequence starts behind what the prefix cache has of it, when it comes for the first time and after a preemption.

Where drafts are made, a sequence that needs one token may bring guesses of those after it along, of what all others
left of budget and blocks: nobody waits or is preempted for a guess.

Sequences of unlike arms, summed by unlike AllReduces, never share a step: arms that have something to run take turns,
one step each. Waiting is in one queue, in order of arrival, whatever the arm. So what was said of the oldest holds in
each turn of its arm, which comes once in as many steps as there are arms, however long the others generate; and a step
of one arm may preempt the youngest of another.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tightwire.model.candidates import candidates_needed
from tightwire.model.step import StepPlan
from tightwire.server.blocks import BlockPool
from tightwire.server.drafts import NgramDrafter
from tightwire.server.prefix_cache import PrefixCache
from tightwire.server.request import Request

# Prompt rows of one step whose logits are asked for: 50 MB for a vocabulary of 49152. The memory budget counts them.
MAX_SCORED_ROWS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one engine may hold and do at once; all known once the cache is allocated."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    max_scored_rows: int = MAX_SCORED_ROWS
    max_drafting_seqs: int = 16  # with more sequences in a step none brings guesses along
    prefix_cache: str = "prompts"  # what sequences that begin alike share: none, prompts, or all (answers too)

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "num_blocks", "block_size", "max_scored_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}; "
                "running sequences could not all take a step"
            )
        if self.num_blocks * self.block_size < self.max_model_len:
            raise ValueError(
                f"the KV cache holds {self.num_blocks} blocks of {self.block_size} = "
                f"{self.num_blocks * self.block_size} tokens, less than one sequence of max_model_len="
                f"{self.max_model_len}; give it more memory (--kv-cache-memory) or set --max-model-len to at most "
                f"{self.num_blocks * self.block_size}"
            )

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


class Chunk(NamedTuple):
    """One sequence's part of a step: positions [start, end), and what its rows of logits are for."""

    request: Request
    start: int
    end: int
    scored: range  # positions whose logits score the next prompt token
    samples: bool  # the last position's logits choose the next token
    draft: Sequence[int] = ()  # guesses of it and of those after, computed behind ``end``; each has logits too

    @property
    def num_rows(self) -> int:
        return self.end - self.start + len(self.draft)


class ScheduledStep(NamedTuple):
    """``chunks`` are in the order of the plan's rows; each owns len(scored) + samples + len(draft) of its logits."""

    plan: StepPlan
    chunks: list[Chunk]


class Scheduler:
    """Waiting and running sequences and the block pool; ``schedule`` makes one step of them."""

    def __init__(self, limits: Limits, drafter: NgramDrafter | None = None) -> None:
        """``drafter``: None where nothing is guessed."""
        self.limits = limits
        self._drafter = drafter
        self.pool = BlockPool(limits.num_blocks)
        self.prefixes = _prefix_cache(limits, self.pool)
        self.waiting: deque[Request] = deque()  # oldest first, like running; all of running is older
        self.running: list[Request] = []
        self.num_preemptions = 0
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
        self._free(request)

    def learn(self, request: Request, num_right: int) -> None:
        """The first ``num_right`` guesses of ``request``'s draft held."""
        assert self._drafter is not None, "somebody made the draft"
        self._drafter.learn(request, num_right)

    def has_requests(self) -> bool:
        return bool(self.running or self.waiting)

    def schedule(self, now_s: float) -> ScheduledStep | None:
        """The next step, or None when there is nothing to do."""
        if not self.has_requests():
            return None
        for arm in self._turns():
            chunks = self._draft(arm, now_s)
            if chunks:  # the youngest may have found no block, and the head of the queue no room
                self._last_arm = arm
                self._num_planned += 1
                return ScheduledStep(make_plan(self._num_planned, chunks, arm), chunks)
        raise AssertionError("the oldest sequence always gets a token")

    def _turns(self) -> list[int]:
        """The arms that may have something to run, the one whose turn it is first."""
        arms = {request.arm for request in self.running}
        if self.waiting:
            arms.add(self.waiting[0].arm)
        return sorted(arms, key=lambda arm: (arm <= self._last_arm, arm))

    def _draft(self, arm: int, now_s: float) -> list[Chunk]:
        step = _StepDraft(self.limits)
        running = [request for request in self.running if request.arm == arm]
        # One new token each, then prompts and what is computed again, oldest first.
        for request in sorted(running, key=lambda r: r.num_to_compute > 1 or r.in_prompt):
            if request in step.preempted:
                continue
            num_tokens = step.affordable(request)
            if num_tokens and self._grow(request, num_tokens, step):
                step.take(request, num_tokens)
        for request, num_tokens in step.tokens.items():
            self._enter(request, num_tokens)
        self._admit(arm, step, now_s)  # never one just preempted: it gave up less than it would need
        if self._drafter is not None and len(step.tokens) <= self.limits.max_drafting_seqs:
            for request in step.tokens:
                self._guess(request, step, self._drafter)
        return step.chunks()

    def _admit(self, arm: int, step: "_StepDraft", now_s: float) -> None:
        """Start waiting sequences, in order, while there is room for all of each and for those running to grow."""
        while self.waiting and self.waiting[0].arm == arm and len(self.running) < self.limits.max_num_seqs:
            request = self.waiting[0]
            if step.affordable(request) == 0:
                return
            if self.prefixes is not None:
                self.prefixes.take(request)
            if not self._has_room(request):
                self._free(request)
                return
            self.waiting.popleft()
            self.running.append(request)
            if request.first_scheduled_s is None:
                request.first_scheduled_s = now_s
                if self.prefixes is not None:
                    self.prefixes.count(request)
            num_tokens = step.affordable(request)
            self._grow(request, num_tokens, step)
            step.take(request, num_tokens)
            self._enter(request, num_tokens)

    def _has_room(self, request: Request) -> bool:
        """Whether starting ``request`` would leave every running sequence its prompt and one more block.

        Without that margin a sequence just preempted would come back, be computed again, and be preempted again a few
        tokens later. The only sequence always has room.
        """
        if not self.running:
            return True
        wanted = sum(self._blocks_soon(r) - len(r.blocks) for r in [*self.running, request])
        return wanted <= self.pool.num_free

    def _blocks_soon(self, request: Request) -> int:
        num_tokens = len(request.token_ids) + self.limits.block_size
        return max(len(request.blocks), self.limits.blocks_for(min(num_tokens, self.limits.max_model_len)))

    def _grow(self, request: Request, num_tokens: int, step: "_StepDraft") -> bool:
        """Give ``request`` blocks for its next tokens, preempting the youngest; False when that was itself."""
        missing = self.limits.blocks_for(request.num_computed + num_tokens) - len(request.blocks)
        if missing <= 0:
            return True
        while missing > self.pool.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            step.drop(victim)
            if victim is request:
                return False
        request.blocks.extend(self.pool.allocate(missing))
        return True

    def _guess(self, request: Request, step: "_StepDraft", drafter: NgramDrafter) -> None:
        if request.in_prompt or request.num_to_compute != 1:
            return
        num_tokens = len(request.token_ids)
        # A block for each sequence's next token is left, as what guesses that failed have taken is not given back.
        num_free = max(0, self.pool.num_free - len(self.running))
        free_slots = (len(request.blocks) + num_free) * self.limits.block_size - num_tokens
        # The last token of an answer is chosen, not computed.
        wanted = request.params.max_tokens - request.num_output_tokens - 1
        draft = drafter.draft(request, min(step.room_for_draft, free_slots, wanted))
        if draft:
            self._grow(request, 1 + len(draft), step)
            step.take_draft(request, draft)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._free(request)
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def _free(self, request: Request) -> None:
        self.pool.free(reversed(request.blocks))  # of what is kept, the ends of prompts are to go first
        del request.blocks[:]
        request.num_computed = 0
        request.num_entered_blocks, request.prefix = 0, None

    def _enter(self, request: Request, num_tokens: int) -> None:
        """Tell the prefix cache of what this step will compute. From here on nobody of the step is preempted."""
        if self.prefixes is not None:
            self.prefixes.enter(request, request.num_computed + num_tokens)


class _StepDraft:
    """The step being put together: who takes how many tokens, and what is left of the budgets."""

    def __init__(self, limits: Limits) -> None:
        self.preempted: set[Request] = set()
        self.tokens: dict[Request, int] = {}
        self._drafts: dict[Request, list[int]] = {}
        self._budget = limits.max_num_batched_tokens
        self._scored_rows = limits.max_scored_rows

    def affordable(self, request: Request) -> int:
        """How many of its tokens ``request`` may compute in this step."""
        num_tokens = min(request.num_to_compute, self._budget)
        if request.in_prompt:
            # A chunk ends where the prompt does: generated tokens, recomputed, keep the kernels they were made with.
            num_tokens = min(num_tokens, request.num_prompt_tokens - request.num_computed)
        rows = request.rows_to_score(request.num_computed, request.num_computed + num_tokens)
        if len(rows) > self._scored_rows:
            num_tokens = rows.start + self._scored_rows - request.num_computed
        return num_tokens

    def take(self, request: Request, num_tokens: int) -> None:
        self.tokens[request] = num_tokens
        self._budget -= num_tokens
        self._scored_rows -= len(request.rows_to_score(request.num_computed, request.num_computed + num_tokens))

    @property
    def room_for_draft(self) -> int:
        return min(self._budget, self._scored_rows)

    def take_draft(self, request: Request, draft: list[int]) -> None:
        self._drafts[request] = draft
        self._budget -= len(draft)
        self._scored_rows -= len(draft)

    def drop(self, request: Request) -> None:
        """Leave out a preempted sequence, though it was given tokens; what they took of the budgets stays spent."""
        self.preempted.add(request)
        self.tokens.pop(request, None)

    def chunks(self) -> list[Chunk]:
        """Generated tokens first, as ``StepPlan`` wants them."""
        shares = sorted(self.tokens.items(), key=lambda share: share[0].in_prompt)
        return [_make_chunk(request, num_tokens, self._drafts.get(request, ())) for request, num_tokens in shares]


def _prefix_cache(limits: Limits, pool: BlockPool) -> PrefixCache | None:
    if limits.prefix_cache == "none":
        return None
    return PrefixCache(pool, limits.block_size, with_answers=limits.prefix_cache == "all")


def _make_chunk(request: Request, num_tokens: int, draft: Sequence[int]) -> Chunk:
    start, end = request.num_computed, request.num_computed + num_tokens
    complete = end == len(request.token_ids)
    samples = complete and request.params.max_tokens > 0
    return Chunk(request, start, end, request.rows_to_score(start, end), samples, draft)


def make_plan(index: int, chunks: Sequence[Chunk], arm: int = 0) -> StepPlan:
    """Pack the chunks into arrays, sequences one after the other."""
    token_ids: list[int] = []
    logit_rows: list[int] = []
    block_tables = np.zeros((len(chunks), max(len(chunk.request.blocks) for chunk in chunks)), "<i4")
    for b, (request, start, end, scored, samples, draft) in enumerate(chunks):
        if scored:
            logit_rows.extend(range(len(token_ids) + scored.start - start, len(token_ids) + scored.stop - start))
        token_ids.extend(request.token_ids[start:end])
        if samples:
            logit_rows.extend(range(len(token_ids) - 1, len(token_ids) + len(draft)))
            token_ids.extend(draft)
        block_tables[b, : len(request.blocks)] = request.blocks
    return StepPlan(
        index=index,
        token_ids=_int32_bytes(token_ids),
        query_lens=_int32_bytes([chunk.num_rows for chunk in chunks]),
        context_lens=_int32_bytes([chunk.start + chunk.num_rows for chunk in chunks]),
        block_tables=block_tables.tobytes(),
        num_decode_rows=sum(c.num_rows for c in chunks if c.start >= c.request.num_prompt_tokens),
        logit_rows=_int32_bytes(logit_rows),
        arm=arm,
        num_candidates=_candidates_needed(chunks),
    )


def _candidates_needed(chunks: Sequence[Chunk]) -> int:
    """How many of the best logits are enough for every row; 0: all are needed, or no row has any."""
    if any(chunk.scored for chunk in chunks):
        return 0
    needed = [candidates_needed(chunk.request.params) for chunk in chunks if chunk.samples]
    return max(needed) if needed and min(needed) else 0


def _int32_bytes(values: list[int]) -> bytes:
    return np.array(values, "<i4").tobytes()
