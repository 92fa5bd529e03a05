"""A tiny model on a GPU with its KV cache on the host, against the same steps with the cache on the device."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.model.one_rank import one_rank_runner
from helpers.model.whole_logits import whole_logits
from tiny import make_tiny
from torch import Tensor

from tightwire.bench.stream.order import OrderCheck
from tightwire.model.cache.kv_cache import OffloadedCache
from tightwire.model.runner import ModelRunner
from tightwire.model.step import StepPlan, make_plan

pytestmark = pytest.mark.gpu

_BLOCK_SIZE, _MAX_BLOCKS, _NUM_SEQS = 16, 8, 6
_NUM_BLOCKS = _NUM_SEQS * _MAX_BLOCKS


def _runner(folder: Path, device: torch.device, buffer_blocks: int | None) -> ModelRunner:
    sizes = {"max_model_len": _BLOCK_SIZE * _MAX_BLOCKS, "num_blocks": _NUM_BLOCKS, "block_size": _BLOCK_SIZE}
    return one_rank_runner(folder, device, **sizes, buffer_blocks=buffer_blocks)


def _plan(sequences: Sequence[int], contexts: Sequence[int], num_new: int, tables_BM: np.ndarray) -> StepPlan:
    rows = len(sequences) * num_new
    return make_plan(
        token_ids=np.random.default_rng(contexts[0]).integers(0, 250, rows),
        query_lens=[num_new] * len(sequences),
        context_lens=contexts,
        block_tables=tables_BM[sequences],
        num_decode_rows=rows if num_new == 1 else 0,
        logit_rows=np.arange(num_new - 1, rows, num_new),
    )


def _logits(runner: ModelRunner, plans: Sequence[StepPlan]) -> list[Tensor]:
    """Of steps that are all launched before any is waited for."""
    logits = [whole_logits(runner, plan) for plan in plans]
    return [each.cpu() for each in logits if each is not None]


def test_steps_give_the_same_bits_in_order(device: torch.device, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, num_hidden_layers=5)
    tables_BM = np.random.default_rng(0).permutation(_NUM_BLOCKS).reshape(_NUM_SEQS, _MAX_BLOCKS)
    plans, lengths = [_plan([number], [90], 90, tables_BM) for number in range(_NUM_SEQS)], [90] * _NUM_SEQS
    for turn in range(30):
        sequences = list(range(turn % 3, _NUM_SEQS))
        for number in sequences:
            lengths[number] += 1
        plans.append(_plan(sequences, [lengths[number] for number in sequences], 1, tables_BM))
    on_device = _logits(_runner(folder, device, None), plans)
    runner = _runner(folder, device, _NUM_BLOCKS)
    for want, got in zip(on_device, _logits(runner, plans), strict=True):
        assert torch.equal(got, want)
    assert isinstance(runner.cache, OffloadedCache)
    OrderCheck(saves=True).check(runner.cache.pool.events)
    runner.close()
