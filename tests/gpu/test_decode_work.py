"""What a replayed decode step gives a GPU to do beside the replay: bytes copied to it, and torch's operations."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.model.device_work import DeviceWork
from helpers.model.one_rank import one_rank_runner
from tiny import make_tiny
from torch import Tensor

from tightwire.model.runner import ModelRunner
from tightwire.model.sampling.choose import TokenChooser
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.model.sampling.rows import Column, SampleRows, sampled_row
from tightwire.model.step import StepPlan, deferred_token, make_plan
from tightwire.server.engine.draft_runner import DraftRunner

pytestmark = pytest.mark.gpu

_WIDTH, _VOCAB_SIZE = 2, 304


def _runner(folder: Path, device: torch.device, num_rows: int, max_model_len: int, **options: Any) -> ModelRunner:
    sizes = {"max_model_len": max_model_len, "num_blocks": num_rows * _WIDTH, "block_size": 16, "graphs_up_to": 4}
    return one_rank_runner(folder, device, **sizes | options)


def _plan(tokens: Sequence[int], length: int, rows: Sequence[int] | None = None) -> StepPlan:
    """A greedy decode step of these tokens, each the last of ``length``; ``rows``: those with logits, by default all."""
    num_rows, params = len(tokens), SamplingParams(max_tokens=9, temperature=0.0)
    return make_plan(
        token_ids=tokens,
        query_lens=[1] * num_rows,
        context_lens=[length] * num_rows,
        block_tables=np.arange(num_rows * _WIDTH).reshape(num_rows, _WIDTH),
        num_decode_rows=num_rows,
        logit_rows=range(num_rows) if rows is None else rows,
        sampling=SampleRows(np.array([sampled_row(params, _VOCAB_SIZE)] * num_rows, np.float64).tobytes()),
    )


def _steps(folder: Path, device: torch.device, num_rows: int, max_model_len: int) -> tuple[list[DeviceWork], list[int]]:
    """Three greedy steps of the same rows, each with the tokens of the one before; the work of each, and the last's tokens."""
    runner = _runner(folder, device, num_rows, max_model_len)
    chosen_R, works = None, list[DeviceWork]()
    for length in range(1, 4):
        with DeviceWork(device) as work:
            plan = _plan(
                range(num_rows) if chosen_R is None else [deferred_token(row) for row in range(num_rows)], length
            )
            results = runner.choose(plan, runner.execute(plan, chosen_R))
            assert isinstance(results, Tensor)
            chosen_R = results.int()
        works.append(work)
    runner.close()
    assert chosen_R is not None
    return works, chosen_R.tolist()


@pytest.mark.parametrize("num_rows", [1, 3])
def test_bytes_copied_do_not_grow_with_the_longest_context(num_rows: int, device: torch.device, tmp_path: Path) -> None:
    """Tables are copied in the first step alone; the rest is a few numbers a row."""
    folder = make_tiny(tmp_path)
    short, long = (_steps(folder, device, num_rows, length) for length in (32, 512))
    first, *later = [work.copied_bytes for work in long[0]]
    assert short[1] == long[1] and [first, *later] == [work.copied_bytes for work in short[0]]
    assert [first - each for each in later] == [4 * num_rows * _WIDTH] * 2
    assert max(later) <= 64 * 4


def test_a_greedy_step_is_a_replay_and_a_few_operations(device: torch.device, tmp_path: Path) -> None:
    """Copies of the plan's numbers and of the last tokens, the largest logits, and whether they are finite."""
    *_, work = _steps(make_tiny(tmp_path), device, 3, 32)[0]
    assert work.operations.total() <= 7, work.operations


def test_logits_are_those_of_the_rows_that_want_them(device: torch.device, tmp_path: Path) -> None:
    runner = _runner(make_tiny(tmp_path), device, 3, 32)
    whole = runner.execute(_plan([5, 9, 200], 1))
    assert whole is not None
    whole = whole.cpu()  # the next step may overwrite them
    some = runner.execute(_plan([5, 9, 200], 1, [2, 0]))
    assert some is not None and torch.equal(some.cpu(), whole[[2, 0]])
    assert runner.execute(_plan([5, 9, 200], 1, [])) is None
    eager = _runner(tmp_path, device, 3, 32, graphs_up_to=0).execute(_plan([5, 9, 200], 1))
    assert eager is not None
    torch.testing.assert_close(whole, eager.cpu(), atol=1e-4, rtol=1e-4)


def test_a_drafting_models_steps_use_the_part_of_the_head_that_was_asked_for(
    device: torch.device, tmp_path: Path
) -> None:
    drafting = DraftRunner(_runner(make_tiny(tmp_path), device, 3, 32, cuts_head=True))
    whole, part = drafting.execute(_plan([5, 9, 200], 1)), drafting.execute(_plan([5, 9, 200], 1), 32)
    assert whole is not None and part is not None and part.shape == (3, 32)
    torch.testing.assert_close(part.cpu(), whole.cpu()[:, :32], atol=1e-4, rtol=1e-4)


def test_greedy_rows_are_chosen_as_on_a_cpu(device: torch.device) -> None:
    """Also equal logits, zeros of either sign, and rows that are not finite: there is no token then."""
    logits_RV = torch.randn(7, _VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    logits_RV[0, [7, 70, 200]] = 9.0
    logits_RV[1] = -0.0
    logits_RV[1, 5:] = 0.0
    logits_RV[2, 3], logits_RV[3, 3], logits_RV[4] = torch.nan, torch.inf, -torch.inf
    logits_RV[5, 3] = -torch.inf
    rows, tokens = _plan(range(7), 1).sampling, list[list[int]]()
    for place in (torch.device("cpu"), device):
        chooser = TokenChooser([range(_VOCAB_SIZE)], 0, place, lambda x, phase: [x])
        tokens.append(chooser.choose(logits_RV.to(place), rows).tolist())
    assert tokens[0] == tokens[1] and tokens[0][:5] == [7, 0, -1, -1, -1]


@pytest.mark.parametrize(
    ("filters", "num_rows", "sorts", "operations"),
    [
        ({}, 20, 0, 64),
        ({"top_p": 0.5}, 20, 1, 116),
        ({"top_p": 0.5}, 70, 4, 210),
        ({"min_p": 0.1, "top_p": 0.9}, 20, 2, 165),
        ({"top_k": 20, "top_p": 0.8}, 20, 1, 96),
    ],
)
def test_drawn_tokens_are_those_of_a_cpu(
    filters: dict[str, Any], num_rows: int, sorts: int, operations: int, device: torch.device
) -> None:
    """Up to 64 rows are sorted once, for top_p or min_p; another sort is of the few keys that ranks tell each other."""
    logits_RV = torch.randn(num_rows, _VOCAB_SIZE, generator=torch.Generator().manual_seed(4)) * 3
    row = sampled_row(SamplingParams(max_tokens=9, temperature=0.8, **filters), _VOCAB_SIZE)
    table_RC = np.array([row] * len(logits_RV), np.float64)
    table_RC.view(np.int64)[:, Column.NOISE] = np.random.default_rng(5).integers(-(2**63), 2**63 - 1, len(logits_RV))
    rows, tokens = SampleRows(table_RC.tobytes()), list[list[int]]()
    for place in (torch.device("cpu"), device):
        chooser = TokenChooser([range(_VOCAB_SIZE)], 0, place, lambda x, phase: [x])
        with DeviceWork(device) as work:
            tokens.append(chooser.choose(logits_RV.to(place), rows).tolist())
    assert tokens[0] == tokens[1]
    assert work.operations["sort"] == sorts and work.operations.total() <= operations, work.operations
