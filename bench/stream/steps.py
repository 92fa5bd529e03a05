"""Steps by hand, without an engine: sequences in blocks of their own, and greedy tokens to compare answers by."""

from collections.abc import Sequence

import numpy as np
import torch

from tightwire.bench.stream.cells import Load
from tightwire.comm.group.group import Group
from tightwire.model.runner import ModelRunner
from tightwire.model.step import StepPlan, make_plan

BLOCK_SIZE = 16


def make_step(load: Load, context: int, vocab_size: int, seed: int) -> StepPlan:
    """Random tokens: the last one of each of ``rows`` sequences of ``context`` tokens, or all of one prompt."""
    token_ids = np.random.default_rng(seed).integers(0, vocab_size, load.rows)
    if load.is_decode:
        return _plan(token_ids, [1] * load.rows, [context] * load.rows, is_decode=True)
    return _plan(token_ids, [load.rows], [load.rows], is_decode=False)


def greedy_tokens(runner: ModelRunner, group: Group, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What ``prompt`` is continued with; the same on every rank."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        new = tokens[-1:] if len(tokens) > len(prompt) else tokens
        logits_RV = runner.execute(_plan(new, [len(new)], [len(tokens)], is_decode=len(new) == 1))
        best = torch.zeros(1, dtype=torch.int64) if logits_RV is None else logits_RV[-1:].argmax(-1).cpu()
        told = group.transport.gather(best.to(group.device).view(torch.uint8))
        tokens.append(int(told[0].view(torch.int64)))
    return tokens[len(prompt) :]


def _plan(
    token_ids: Sequence[int] | np.ndarray, query_lens: Sequence[int], context_lens: Sequence[int], *, is_decode: bool
) -> StepPlan:
    widest = -(-max(context_lens) // BLOCK_SIZE)
    return make_plan(
        token_ids=token_ids,
        query_lens=query_lens,
        context_lens=context_lens,
        block_tables=np.arange(len(context_lens) * widest),
        num_decode_rows=len(token_ids) if is_decode else 0,
        logit_rows=np.cumsum(query_lens) - 1,
    )
