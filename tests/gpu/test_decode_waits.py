"""Decode steps planned ahead on a GPU: from the first to the last, the host waits for the device at no place of its own.

Torch's own check (``set_sync_debug_mode``) knows nothing of events and streams that are waited for, so those are looked at here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.server.local_engine import local_engine
from helpers.server.staged_requests import params
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
from tightwire.server.ipc.messages import AddRequest

pytestmark = pytest.mark.gpu

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8, "seed": 3},
    "top_k": {"temperature": 0.8, "top_k": 5, "seed": 3},
    "top_p": {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01, "seed": 3},
    "penalties": {"temperature": 0.0, "frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.2},
    "bias": {"temperature": 0.0, "logit_bias": {65: 5.0}, "logprobs": 2},
}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Graphs that are replayed, and waits of the host for an event, a stream or the device."""
    calls: list[str] = []
    for owner, name in (
        (torch.cuda.CUDAGraph, "replay"),
        (torch.cuda.Event, "synchronize"),
        (torch.cuda.Stream, "synchronize"),
        (torch.cuda, "synchronize"),
    ):
        monkeypatch.setattr(owner, name, _noted(f"{owner.__name__}.{name}", getattr(owner, name), calls))
    return calls


def _noted(told: str, own: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        calls.append(told)
        return own(*args)

    return call


@contextmanager
def _no_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_an_engine_waits_for_the_tokens_of_the_step_before(
    device: torch.device, tmp_path: Path, seen: list[str]
) -> None:
    """By events, of their end and of their tokens, when the next step is launched."""
    checkpoint = open_checkpoint(str(make_tiny(tmp_path)))
    sizes: dict[str, Any] = {"max_model_len": 64, "num_blocks": 8, "max_num_seqs": 2, "graphs_up_to": 2}
    with local_engine(checkpoint, plan_ahead=True, device=device, **sizes) as local:
        for number in range(2):
            local.engine.add(
                AddRequest(str(number), [5, 9, 200, 17 + number], params({"max_tokens": 12, "temperature": 0.0}))
            )
        for _ in range(4):
            local.engine.step()
        seen.clear()
        with _no_waits():
            for _ in range(5):
                assert len(local.engine.step().outputs) == 2
        event = f"{torch.cuda.Event.__name__}.synchronize"
        assert seen == [f"{torch.cuda.CUDAGraph.__name__}.replay", event, event] * 5


@pytest.mark.parametrize("kind", KINDS)
def test_no_step_waits_for_the_device(kind: str, device: torch.device, tmp_path: Path, seen: list[str]) -> None:
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
    seen.clear()
    with _no_waits():
        for length in range(4, 7):
            choices.append(step([deferred_token(0)], length, choices[-1].ids_R))
    assert [call.rpartition(".")[2] for call in seen] == ["replay"] * 3
    assert all(0 <= choice.wait().token_ids[0] < vocab_size for choice in choices)
    runner.close()
