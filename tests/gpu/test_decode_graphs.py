"""A tiny model on a GPU: replayed steps against the same steps run kernel by kernel, and against the CPU."""

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


def _runner(folder: Path, device: torch.device, graphs_up_to: int) -> ModelRunner:
    sizes = {"max_model_len": _BLOCK_SIZE * _MAX_BLOCKS, "num_blocks": 16 * _MAX_BLOCKS, "block_size": _BLOCK_SIZE}
    return one_rank_runner(folder, device, **sizes, graphs_up_to=graphs_up_to)


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


@pytest.mark.parametrize("faster", ["apart", "fused"])
def test_a_step_of_one_row_in_either_form(
    faster: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms and SwiGLU in kernels of their own and in those of products; the faster form is kept, and both are told."""
    times_s = iter([0.001, 0.002] if faster == "apart" else [0.002, 0.001])
    monkeypatch.setattr(decode_graphs, "_time_s", lambda replay: next(times_s))
    folder, prompt, fused = make_tiny(tmp_path), [[5, 9, 200]], list[Tensor]()

    def product(x: Tensor | None, residual: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        fused.append(residual)
        return norm_linear(x, residual, *given)

    monkeypatch.setattr(layer_kernels, "norm_linear", product)
    replayed = _runner(folder, device, 1)
    # Two layers have two such products each, once before the capture and once in it; the emulated device replays calls.
    assert len(fused) == 8 and {len(each) for each in fused} == {1}
    want = _generated(_runner(folder, torch.device("cpu"), 0), prompt)
    for got, logits in zip(_generated(replayed, prompt), want, strict=True):
        torch.testing.assert_close(got, logits, atol=2e-3, rtol=2e-3)
    apart, together = ("1.00 ms", "2.00 ms") if faster == "apart" else ("2.00 ms", "1.00 ms")
    assert (
        replayed.note
        == f"a step of one row takes {together} with norms and SwiGLU in kernels of products, {apart} apart"
    )
