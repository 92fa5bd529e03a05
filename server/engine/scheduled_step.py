"""One step as the scheduler has decided it: each sequence's chunk of it, and the plan that all ranks run."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tightwire.model.step import StepPlan, make_plan
from tightwire.server.engine.request import Request


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


def make_chunk(request: Request, num_tokens: int, draft: Sequence[int]) -> Chunk:
    """The next ``num_tokens`` of a sequence."""
    start, end = request.num_computed, request.num_computed + num_tokens
    complete = end == len(request.token_ids)
    samples = complete and request.params.max_tokens > 0
    return Chunk(request, start, end, request.rows_to_score(start, end), samples, draft)


def make_step(index: int, chunks: list[Chunk], arm: int = 0) -> ScheduledStep:
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
    plan = make_plan(
        index=index,
        token_ids=token_ids,
        query_lens=[chunk.num_rows for chunk in chunks],
        context_lens=[chunk.start + chunk.num_rows for chunk in chunks],
        block_tables=block_tables,
        num_decode_rows=sum(c.num_rows for c in chunks if c.start >= c.request.num_prompt_tokens),
        logit_rows=logit_rows,
        arm=arm,
        num_candidates=_candidates_needed(chunks),
    )
    return ScheduledStep(plan, chunks)


def _candidates_needed(chunks: Sequence[Chunk]) -> int:
    """How many of the best logits are enough for every row; 0: all are needed, or no row has any."""
    if any(chunk.scored for chunk in chunks):
        return 0
    needed = [chunk.request.num_candidates for chunk in chunks if chunk.samples]
    return max(needed) if needed and min(needed) else 0
