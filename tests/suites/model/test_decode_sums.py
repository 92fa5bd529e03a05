"""Ranks that share memory sum inside the layer program, with the bits, counts, traces and errors of separate sums."""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from harness import Ranks, run_ranks
from helpers.comm.fixed_policy import fixed_policy, make_arms
from helpers.model.whole_logits import whole_logits
from tiny import make_tiny

from tightwire.comm.all_reduce.make import make_all_reduce
from tightwire.comm.errors import CollectiveMismatchError, CollectiveTimeoutError, CommError, PeerLostError
from tightwire.comm.group.group import Group
from tightwire.comm.ledger.recording import Event
from tightwire.comm.transport.shared_memory import SharedMemoryTransport
from tightwire.model import layer_program
from tightwire.model.build import RankGroups, RunnerOptions, build_runner
from tightwire.model.layer_program import LayerProgram
from tightwire.model.layout import make_layout
from tightwire.model.open import open_checkpoint
from tightwire.model.parallel import TensorParallel
from tightwire.model.runner import ModelRunner
from tightwire.model.step import StepPlan, make_plan
from tightwire.model.weights.formats import choose_formats

_BLOCK_SIZE, _MAX_BLOCKS, _VOCAB, _NUM_LAYERS = 16, 4, 304, 3
_NUM_SUMS = 2 * _NUM_LAYERS
_ODD_RANK = 1
_ARMS = ("one-shot", "two-shot")


def _runner(group: Group, model: Path, dtype: torch.dtype = torch.float32, quantization: str = "auto") -> ModelRunner:
    checkpoint = open_checkpoint(str(model))
    return build_runner(
        checkpoint.config,
        checkpoint.reader(),
        make_layout(checkpoint.config, group.world_size),
        RankGroups(group, routes=make_arms({name: fixed_policy(name) for name in _ARMS}, group)),
        RunnerOptions(
            dtype=dtype,
            max_model_len=_BLOCK_SIZE * _MAX_BLOCKS,
            num_blocks=32 * _MAX_BLOCKS,
            block_size=_BLOCK_SIZE,
            formats=choose_formats(checkpoint.reader(), checkpoint.config, quantization),
        ),
    )


def _plan(lens: Sequence[tuple[int, int]], *, generated: bool, arm: int = 0) -> StepPlan:
    """All logits of sequences with (new tokens, context)."""
    num_rows = sum(new for new, _ in lens)
    return make_plan(
        token_ids=np.random.default_rng(num_rows).integers(0, _VOCAB, num_rows),
        query_lens=[new for new, _ in lens],
        context_lens=[context for _, context in lens],
        block_tables=np.arange(len(lens) * _MAX_BLOCKS),
        num_decode_rows=num_rows if generated else 0,
        logit_rows=range(num_rows),
        policy=arm,
    )


class _Seen(NamedTuple):
    logits: list[bytes]
    counts: list[Any]
    events: list[Event]
    num_in_kernel: int


def _generate(group: Group, model: Path, dtype: torch.dtype, quantization: str, in_kernel: bool, threads: int) -> _Seen:
    """Steps of 1, 9 and 32 rows behind prompts, and one of the other arm."""
    torch.set_num_threads(threads)
    runner, ledger, calls = _runner(group, model, dtype, quantization), group.ledger, 0
    run_and_sum = LayerProgram.run_and_sum

    def counted(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return run_and_sum(*args)

    logits = []
    ledger.recording.start()
    with (
        patch.object(LayerProgram, "run_and_sum", counted),
        patch.object(layer_program, "useful_threads", lambda num_rows, num_weights: threads),
        patch.object(
            TensorParallel, "sums_in_kernel", TensorParallel.sums_in_kernel if in_kernel else lambda *given: None
        ),
    ):
        whole_logits(runner, _plan([(20, 20)] * 32, generated=False))
        for num_seqs in (1, 9, 32):
            logits.append(whole_logits(runner, _plan([(1, 21)] * num_seqs, generated=True)))
        logits.append(whole_logits(runner, _plan([(2, 22), (1, 21)], generated=True, arm=1)))
    return _Seen(
        [found.numpy().tobytes() for found in logits if found is not None],
        [(*count._replace(seconds=0.0), group.bytes_sent) for count in ledger.counters.counts()],
        ledger.recording.stop(),
        calls,
    )


def _same_either_way(model: Path, world_size: int, dtype: torch.dtype, quantization: str = "auto", threads: int = 1):
    by_themselves, one_by_one = (
        run_ranks(world_size, _generate, model, dtype, quantization, in_kernel, threads, shared_memory=True)
        for in_kernel in (True, False)
    )
    for seen, want in zip(by_themselves, one_by_one, strict=True):
        assert (seen.num_in_kernel, want.num_in_kernel) == (3, 0), "the other arm's sums are not one-shots"
        assert seen.logits == want.logits
        assert seen.counts == want.counts
        assert [event[:8] for event in seen.events] == [event[:8] for event in want.events]
        ends_s = [event.start_s + event.seconds for event in seen.events]
        assert all(event.seconds > 0 for event in seen.events)
        assert all(end_s <= event.start_s for end_s, event in zip(ends_s, seen.events[1:], strict=False))


@pytest.mark.parametrize(
    ("world_size", "dtype"), [(2, torch.bfloat16), (3, torch.float32), (4, torch.bfloat16)], ids=str
)
def test_bits_counts_and_trace_are_those_of_separate_sums(world_size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    _same_either_way(make_tiny(tmp_path, num_hidden_layers=_NUM_LAYERS), world_size, dtype)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_bits_with_packed_weights(quantization: str, tmp_path: Path) -> None:
    _same_either_way(make_tiny(tmp_path, num_hidden_layers=_NUM_LAYERS), 2, torch.bfloat16, quantization)


def test_bits_with_several_threads_a_rank(tmp_path: Path) -> None:
    _same_either_way(make_tiny(tmp_path, num_hidden_layers=_NUM_LAYERS), 2, torch.bfloat16, threads=3)


def _slowly(group: Group, model: Path, threads: int, slow: bool) -> bytes:
    """One rank takes its time between parts, so that the others leave their kernels to look at the clock."""
    torch.set_num_threads(threads)
    runner, run = _runner(group, model), LayerProgram._run

    def run_a_part(program: LayerProgram, first: int, stop: int, *rest: Any) -> None:
        time.sleep(0.03)
        run(program, first, first + 1, *rest)

    whole_logits(runner, _plan([(20, 20)] * 9, generated=False))
    with (
        patch.object(layer_program, "useful_threads", lambda num_rows, num_weights: threads),
        patch.object(LayerProgram, "_run", run_a_part if slow and group.rank == _ODD_RANK else run),
    ):
        logits = whole_logits(runner, _plan([(1, 21)] * 9, generated=True))
    return b"" if logits is None else logits.numpy().tobytes()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_program_continues_after_the_sum_that_it_left(threads: int, tmp_path: Path) -> None:
    model = make_tiny(tmp_path, num_hidden_layers=_NUM_LAYERS)
    with Ranks(2, shared_memory=True) as ranks:
        assert ranks.run(_slowly, model, threads, True) == ranks.run(_slowly, model, threads, False)


def _until_the_odd_rank(
    group: Group, model: Path, act: str
) -> tuple[type[CommError], tuple[int, ...], str, int] | None:
    """After two sums of a step's layers one rank dies, stops, or calls something else."""
    runner, run, sum_rows = _runner(group, model), LayerProgram._run, TensorParallel.sum_rows
    num_sums = 0

    def run_two_parts(program: LayerProgram, first: int, stop: int, *rest: Any) -> None:
        if first == 2:
            assert isinstance(group.transport, SharedMemoryTransport)
            while group.transport.board.last_collectives().count(f"#{_STEP_BEGINS + 3}") < 2:
                time.sleep(0.01)  # until the others show that they wait for it
            os.kill(os.getpid(), signal.Signals[act])
        run(program, first, 2, *rest)

    def sum_two(parallel: TensorParallel, rows_TD: torch.Tensor, *rest: Any, **others: Any) -> torch.Tensor:
        nonlocal num_sums
        num_sums += 1
        return (
            sum_rows(parallel, rows_TD, *rest, **others)
            if num_sums < 3
            else make_all_reduce("two-shot", group)(rows_TD)
        )

    whole_logits(runner, _plan([(20, 20)], generated=False))
    try:
        with contextlib.ExitStack() as patches:
            if group.rank == _ODD_RANK and act == "another call":  # one by one, beside ranks that sum in their kernels
                patches.enter_context(patch.object(TensorParallel, "sums_in_kernel", lambda *given: None))
                patches.enter_context(patch.object(TensorParallel, "sum_rows", sum_two))
            elif group.rank == _ODD_RANK:
                patches.enter_context(patch.object(LayerProgram, "_run", run_two_parts))
            whole_logits(runner, _plan([(1, 21)], generated=True))
    except CommError as error:
        calls = sum(count.calls for count in group.ledger.counters.counts() if count.phase == "decode")
        return type(error), error.ranks, str(error), calls
    return None


_ROW_BYTES = 64 * 4
_STEP_BEGINS = 1 + _NUM_SUMS + 1 + 1  # the prompt's sums and its gather, then the embedding's sum


@pytest.mark.alone
@pytest.mark.parametrize(
    ("act", "error", "timeout_s"),
    [
        ("SIGKILL", PeerLostError, 30.0),
        ("SIGSTOP", CollectiveTimeoutError, 3.0),  # ranks have as long to load the model
        ("another call", CollectiveMismatchError, 20.0),
    ],
)
def test_a_missing_rank_is_named_with_every_ranks_last_collective(
    act: str, error: type[CommError], timeout_s: float, tmp_path: Path
) -> None:
    model = make_tiny(tmp_path, num_hidden_layers=_NUM_LAYERS)
    enough = 2 if act == "SIGSTOP" else 3
    with Ranks(3, shared_memory=True, collective_timeout_s=timeout_s) as ranks:
        outcomes = ranks.outcomes(_until_the_odd_rank, model, act, enough=enough, timeout_s=40)
        ranks.kill()

    waited_for = _STEP_BEGINS + 3
    for rank in (0, 2):
        kind, blamed, message, num_calls = outcomes[rank]
        assert (kind, blamed) == (error, (_ODD_RANK,)), message
        assert f"rank 2: all_reduce one-shot {_ROW_BYTES} B, #{waited_for}" in message
        assert num_calls == 1 + 2, "the embedding's sum and two of the layers'"
        if act == "another call":
            assert f"rank 1: all_reduce two-shot {_ROW_BYTES} B, #{waited_for}" in message
        else:
            died = ", died" if act == "SIGKILL" else ""
            assert f"in all_reduce one-shot {_ROW_BYTES} B, #{waited_for}" in message
            assert f"rank 1: all_reduce one-shot {_ROW_BYTES} B, #{waited_for - 1}{died};" in message
