"""A tiny model on a GPU: replayed steps against the same steps run kernel by kernel, and against the CPU."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.model.one_rank import one_rank_runner
from tiny import make_tiny
from torch import Tensor

from tightwire.kernels.layer_ops import norm_linear
from tightwire.model import decode_graphs, layer_kernels
from tightwire.model.runner import ModelRunner
from tightwire.model.step import make_plan

pytestmark = pytest.mark.gpu

_BLOCK_SIZE, _MAX_BLOCKS = 16, 8


def _runner(folder: Path, device: torch.device, graphs_up_to: int, dtype: torch.dtype = torch.float32) -> ModelRunner:
    sizes = {"max_model_len": _BLOCK_SIZE * _MAX_BLOCKS, "num_blocks": 16 * _MAX_BLOCKS, "block_size": _BLOCK_SIZE}
    return one_rank_runner(folder, device, **sizes, graphs_up_to=graphs_up_to, dtype=dtype)


def _execute(runner: ModelRunner, tokens: Sequence[Sequence[int]], contexts: Sequence[int], num_decode: int) -> Tensor:
    tables = np.arange(len(tokens) * _MAX_BLOCKS).reshape(len(tokens), _MAX_BLOCKS)
    logits = runner.execute(
        make_plan(
            token_ids=[token for row in tokens for token in row],
            query_lens=[len(row) for row in tokens],
            context_lens=contexts,
            block_tables=tables,
            num_decode_rows=num_decode,
            logit_rows=np.cumsum([len(row) for row in tokens]) - 1,
        )
    )
    assert logits is not None
    return logits.cpu()


def _generated(runner: ModelRunner, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Logits of the prompts' ends, then of three greedy tokens each; the sequences end one after the other."""
    tokens, seen = [list(prompt) for prompt in prompts], []
    seen.append(_execute(runner, tokens, [len(row) for row in tokens], 0))
    for _ in range(3):
        for row, logits in zip(tokens, seen[-1], strict=False):
            row.append(int(logits.argmax()))
        tokens = tokens[: max(1, len(tokens) - 2)]
        seen.append(_execute(runner, [row[-1:] for row in tokens], [len(row) for row in tokens], len(tokens)))
    return seen


@pytest.mark.parametrize("num_seqs", [1, 2, 7, 12])
def test_replayed_steps_give_the_models_logits(num_seqs: int, device: torch.device, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    rng = np.random.default_rng(num_seqs)
    prompts = [rng.integers(0, 300, rng.integers(1, 100)).tolist() for _ in range(num_seqs)]
    on_cpu = _generated(_runner(folder, torch.device("cpu"), 0), prompts)
    eager = _generated(_runner(folder, device, 0), prompts)
    replayed = _generated(_runner(folder, device, 12 if num_seqs > 1 else 1), prompts)
    for want, plain, got in zip(on_cpu, eager, replayed, strict=True):
        torch.testing.assert_close(got, plain, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("is_faster", [False, True])
def test_a_step_of_one_row_in_either_form(
    is_faster: bool, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms, rotations and SwiGLU in kernels of their own, or in those of products: as near to float32 as kernels launched one by one."""
    fused = list[int]()

    def product(x: Tensor | None, residual: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        fused.append(len(residual))
        return norm_linear(x, residual, *given)

    monkeypatch.setattr(decode_graphs, "_times_s", lambda forms: [2.0, 1.0 if is_faster else 2.0])
    monkeypatch.setattr(layer_kernels, "norm_linear", product)
    folder = make_tiny(tmp_path)
    replayed, eager = (_runner(folder, device, num_rows, torch.bfloat16) for num_rows in (2, 0))
    assert fused == [1] * 8  # two products in each of two layers, once before the capture and once in it

    def scored(runner: ModelRunner) -> Tensor:
        _execute(runner, [[5, 9, 200]], [3], 0)
        return torch.cat([_execute(runner, [[token]], [context], 1) for context, token in ((4, 7), (5, 80), (6, 300))])

    exact, one_by_one, got = map(scored, (_runner(folder, torch.device("cpu"), 0), eager, replayed))
    assert float((got - exact).norm()) <= 1.5 * float((one_by_one - exact).norm())
    assert torch.equal(got, one_by_one) != is_faster


def test_both_forms_of_one_row_are_timed(device: torch.device, tmp_path: Path) -> None:
    note = _runner(make_tiny(tmp_path), device, 1, torch.bfloat16).note
    assert re.fullmatch(
        r"one row: norms, rotations and SwiGLU in .* kernels.*; \d+\.\d\d ms a step in those .*, \d+\.\d\d .*", note
    )
