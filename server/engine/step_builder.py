"""Builds one step within its budgets: tokens, rows of logits that score prompts, and blocks of a cache on the host."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tightwire.model.sampling.sampler import Wanted
from tightwire.model.step import StepPlan, make_plan
from tightwire.server.config.limits import Limits
from tightwire.server.engine.request import Request


class Chunk(NamedTuple):
    """One sequence's part of a step: the positions [start, end) and the use of their logits."""

    request: Request
    start: int
    end: int
    scored: range  # positions whose logits score the next prompt token
    samples: bool  # the last position's logits choose the next token
    draft: Sequence[int] = ()  # guesses of the next tokens, computed after ``end``; each has a row of logits

    @property
    def num_rows(self) -> int:
        return self.end - self.start + len(self.draft)

    @property
    def is_last_of_scored(self) -> bool:
        """True if it ends a prompt that is scored, and nothing is generated."""
        return not self.samples and self.end == len(self.request.token_ids)

    @property
    def wanted(self) -> Wanted:
        """What its rows of logits are for."""
        request, scored = self.request, self.scored
        targets = request.token_ids[scored.start + 1 : scored.stop + 1] if scored else ()
        return Wanted(request, targets, self.samples, self.draft)


class ScheduledStep(NamedTuple):
    """``chunks`` are in the order of the plan's rows, ``results`` those whose logits it makes, in the order of these.

    Each has len(scored) + samples + len(draft) rows of logits. Both are the same unless prompts pass stages.
    """

    plan: StepPlan
    chunks: list[Chunk]
    results: list[Chunk]


class StagedStep(NamedTuple):
    """What a step of several stages has besides its chunks; the fields of ``StepPlan`` with these names."""

    num_together: int  # chunks, the first ones, that all ranks compute together
    leaving: list[tuple[Chunk, int]]  # chunks that leave the last stage, with their first row among those that leave
    staged: bool
    awaits: int
    rewritten: list[int]


class StepBuilder:
    """Adds sequences' tokens to the step. The scheduler has already allocated their blocks."""

    def __init__(self, limits: Limits, budget: int, *, ahead: bool = False) -> None:
        """``budget``: tokens in all. ``ahead``: the step is planned while the previous one runs."""
        self.ahead = ahead
        self.preempted: set[Request] = set()
        self.tokens: dict[Request, int] = {}
        self._drafts: dict[Request, list[int]] = {}
        self.budget = budget  # tokens left
        self._scored_rows = limits.max_scored_rows
        self._limits = limits
        self._blocks: set[int] = set()  # of all sequences in the step, if blocks are limited
        self._reserved: tuple[Request, int] | None = None  # a sequence, and the blocks that the others leave for it

    def affordable(self, request: Request, reserved: int = 0) -> int:
        """The number of tokens ``request`` can compute in this step, leaving ``reserved`` tokens of the budget."""
        num_tokens = min(request.num_to_compute, self.budget - reserved)
        if request.in_prompt:
            # A chunk stops at the end of the prompt: recomputed output tokens must use the same kernels as before.
            num_tokens = min(num_tokens, request.num_prompt_tokens - request.num_computed)
        rows = request.rows_to_score(request.num_computed, request.num_computed + num_tokens)
        if len(rows) > self._scored_rows:
            num_tokens = rows.start + self._scored_rows - request.num_computed
        return min(num_tokens, self._tokens_in_blocks(request))

    def reserve(self, request: Request) -> None:
        """Make the other sequences leave blocks for the tokens that this one can take now."""
        self._reserved = request, self._limits.blocks_for(request.num_computed + self.affordable(request))

    def take(self, request: Request, num_tokens: int) -> None:
        self.tokens[request] = num_tokens
        if self._reserved is not None and self._reserved[0] is request:
            self._reserved = None
        self._take_blocks(request, num_tokens)
        self.budget -= num_tokens
        self._scored_rows -= len(request.rows_to_score(request.num_computed, request.num_computed + num_tokens))

    def room_for_draft(self, request: Request) -> int:
        """The number of draft tokens that ``request`` can add to its one token."""
        return min(self.budget, self._scored_rows, self._tokens_in_blocks(request) - 1)

    def take_draft(self, request: Request, draft: list[int]) -> None:
        self._drafts[request] = draft
        self._take_blocks(request, 1 + len(draft))
        self.budget -= len(draft)
        self._scored_rows -= len(draft)

    def drop(self, request: Request) -> None:
        """Remove a preempted sequence. Its share of the budgets stays spent."""
        self.preempted.add(request)
        self.tokens.pop(request, None)

    def chunks(self) -> list[Chunk]:
        """Decode rows first, as ``StepPlan`` requires; then by adapter, so that each adapter is read once."""
        shares = sorted(self.tokens.items(), key=lambda share: (share[0].in_prompt, share[0].adapter_slot))
        chunks: list[Chunk] = []
        for request, num_tokens in shares:
            start, end = request.num_computed, request.num_computed + num_tokens
            samples = end == len(request.token_ids) and request.params.max_tokens > 0
            draft = self._drafts.get(request, ())
            chunks.append(Chunk(request, start, end, request.rows_to_score(start, end), samples, draft))
        return chunks

    def _tokens_in_blocks(self, request: Request) -> int:
        """The number of tokens of ``request`` that fit the blocks left for the step; not below 0."""
        most = self._limits.max_step_blocks
        if most is None:
            return self.budget + 1  # no limit: a draft may take the whole budget, and its one token is already paid for
        free = most - len(self._blocks) - sum(block not in self._blocks for block in request.blocks)
        if self._reserved is not None and self._reserved[0] is not request:
            free -= self._reserved[1]
        return max(0, (len(request.blocks) + free) * self._limits.block_size - request.num_computed)

    def _take_blocks(self, request: Request, num_tokens: int) -> None:
        if self._limits.max_step_blocks is not None:
            self._blocks.update(request.blocks[: self._limits.blocks_for(request.num_computed + num_tokens)])


def make_step(
    index: int, chunks: list[Chunk], limits: Limits, policy: int = 0, stages: StagedStep | None = None
) -> ScheduledStep:
    """Pack the chunks into arrays, one sequence after the other. ``stages``: None if prompts pass none."""
    token_ids, first_rows = list[int](), list[int]()
    groups, num_groups = limits.groups, limits.groups.num
    most = max((len(chunk.request.blocks) for chunk in chunks), default=0) // num_groups
    tables_LBM = np.zeros((num_groups, len(chunks), most), "<i4")
    for b, (request, start, end, _, _, draft) in enumerate(chunks):
        first_rows.append(len(token_ids))
        token_ids.extend(request.token_ids[start:end])
        token_ids.extend(draft)
        own_ML = np.frombuffer(request.blocks, "i4").reshape(-1, num_groups)
        tables_LBM[:, b, : len(own_ML)] = own_ML.T
    ends_B = np.array([chunk.start + chunk.num_rows for chunk in chunks])
    if groups.num_sliding:
        held_LBM = groups.held(np.array([chunk.start for chunk in chunks]), ends_B, limits.block_size)
        tables_LBM = tables_LBM[:, :, : held_LBM.shape[2]][held_LBM]
    results, staged = list(zip(chunks, first_rows, strict=True)), {}
    if stages is not None:
        num_rows = sum(chunk.num_rows for chunk in chunks[: stages.num_together])
        results = results[: stages.num_together] + [(chunk, num_rows + row) for chunk, row in stages.leaving]
        staged = {name: getattr(stages, name) for name in ("staged", "awaits", "rewritten")}
    slots = [chunk.request.adapter_slot for chunk in chunks]
    plan = make_plan(
        index=index,
        token_ids=token_ids,
        query_lens=[chunk.num_rows for chunk in chunks],
        context_lens=ends_B,
        block_tables=tables_LBM,
        num_decode_rows=sum(c.num_rows for c in chunks if c.start >= c.request.num_prompt_tokens),
        logit_rows=[row for chunk, first in results for row in _logit_rows(chunk, first)],
        policy=policy,
        adapters=slots if max(slots, default=-1) >= 0 else None,  # none of the sequences has one
        **staged,
    )
    return ScheduledStep(plan, chunks, [chunk for chunk, _ in results])


def _logit_rows(chunk: Chunk, first_row: int) -> list[int]:
    """The rows whose logits are needed, of a chunk whose rows begin at ``first_row``."""
    _, start, end, scored, samples, draft = chunk
    rows = [first_row + position - start for position in scored]
    if samples:
        rows += range(first_row + end - start - 1, first_row + end - start + len(draft))
    return rows
