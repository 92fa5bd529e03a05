"""Logits of a model at every position, from a rank that builds its runner as a server's rank does."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from helpers.comm.fixed_policy import fixed_policy, make_arms
from helpers.model.whole_logits import whole_logits
from torch import Tensor

from tightwire.comm.group.group import Group
from tightwire.model.build import RankGroups, RunnerOptions, build_runner
from tightwire.model.open import formats_of, open_checkpoint
from tightwire.model.step import make_plan
from tightwire.model.weights.formats import split_model

PROMPT = 33  # tokens, computed in two steps
_BLOCK_SIZE, _NUM_BLOCKS = 16, 4


def rank_logits(
    group: Group,
    location: str,
    tokens: list[int],
    dtype: torch.dtype = torch.float32,
    *,
    generated: bool = True,
    int8: bool = False,
    **options: Any,
) -> Tensor | None:
    """The logits at every position: those of the prompt from two steps, the others token by token, as ``generated`` or not.

    ``int8``: products with packed weights round their activations to 8 bits. None on all ranks but the first.
    """
    checkpoint = open_checkpoint(location)
    formats, prepared = formats_of(checkpoint, "auto"), checkpoint.prepared
    if prepared:
        prepared = replace(prepared, int8_activations=int8)
    layout = prepared.layout if prepared else split_model(checkpoint.config, formats, group.world_size)
    routes = make_arms({"fixed": fixed_policy("one-shot")}, group) if group.world_size > 1 else None
    runner = build_runner(
        checkpoint.config,
        prepared or checkpoint.reader(),
        layout,
        RankGroups(group, routes=routes),
        RunnerOptions(
            dtype=dtype,
            max_model_len=_BLOCK_SIZE * _NUM_BLOCKS,
            num_blocks=_NUM_BLOCKS,
            block_size=_BLOCK_SIZE,
            formats=formats.with_int8_activations() if int8 else formats,
            **options,
        ),
    )
    logits: list[Tensor] = []
    for start, stop in pairwise([0, 20, PROMPT, *range(PROMPT + 1, len(tokens) + 1)]):
        plan = make_plan(
            token_ids=tokens[start:stop],
            query_lens=[stop - start],
            context_lens=[stop],
            block_tables=np.array([[2, 0, 3, 1]]),
            num_decode_rows=int(generated and start >= PROMPT),
            logit_rows=range(stop - start),
        )
        made = whole_logits(runner, plan)
        if made is not None:
            logits.append(made.clone())
    runner.close()
    return torch.cat(logits) if logits else None
