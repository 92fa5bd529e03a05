"""Decode steps planned ahead on a GPU: from the first to the last, the host waits for the device at no place of its own."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import make_tiny
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.group.group import open_process_group
from tightwire.comm.group.topology import Topology
from tightwire.model.build import RankGroups, RunnerOptions, build_runner
from tightwire.model.layout import make_layout
from tightwire.model.open import open_checkpoint
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.model.sampling.sampler import Choice, Sampler, Wanted
from tightwire.model.step import deferred_token, make_plan

pytestmark = pytest.mark.gpu

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8, "seed": 3},
    "top_k": {"temperature": 0.8, "top_k": 5, "seed": 3},
    "top_p": {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01, "seed": 3},
    "penalties": {"temperature": 0.0, "frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.2},
    "bias": {"temperature": 0.0, "logit_bias": {65: 5.0}, "logprobs": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_step_waits_for_the_device(kind: str, device: torch.device, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_tiny(tmp_path)))
    vocab_size = checkpoint.config.vocab_size
    runner = build_runner(
        checkpoint.config,
        checkpoint.reader(),
        make_layout(checkpoint.config, 1),
        RankGroups(open_process_group(Topology(0, 1), store=HashStore(), device=device)),
        RunnerOptions(dtype=torch.float32, max_model_len=32, num_blocks=2, block_size=16, graphs_up_to=1),
    )
    row: Any = SimpleNamespace(token_ids=[1, 2, 3], num_prompt_tokens=3, stop_ids=frozenset())
    row.params, sampler, wanted = SamplingParams(max_tokens=9, **KINDS[kind]), Sampler(vocab_size), Wanted(row)

    def step(tokens: list[int], length: int, chosen_R: torch.Tensor | None) -> Choice:
        plan = make_plan(
            token_ids=tokens,
            query_lens=[len(tokens)],
            context_lens=[length],
            block_tables=np.arange(2)[None],
            num_decode_rows=int(len(tokens) == 1),
            logit_rows=[len(tokens) - 1],
            sampling=sampler.rows([wanted]),
        )
        results = runner.choose(plan, runner.execute(plan, chosen_R))
        assert results is not None
        return Choice(results, [plan.sampling])

    choices = [step(row.token_ids, 3, None)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for length in range(4, 7):
            choices.append(step([deferred_token(0)], length, choices[-1].ids_R))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(0 <= choice.wait().token_ids[0] < vocab_size for choice in choices)
    runner.close()
