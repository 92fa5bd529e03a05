"""Few rows run as the layer program, with the bits of kernels called one by one."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from helpers.model.tiny_gguf import make_tiny_gguf
from tiny import VARIANTS, make_tiny
from torch import Tensor

from tightwire.comm.group.group import in_process_groups
from tightwire.model import decoder, layer_kernels, layer_program
from tightwire.model.build import RankGroups, RunnerOptions, build_runner
from tightwire.model.layout import make_layout
from tightwire.model.open import open_checkpoint
from tightwire.model.runner import ModelRunner
from tightwire.model.step import StepPlan, make_plan
from tightwire.model.weights import EVERYTHING_RESIDENT, WeightPlan
from tightwire.model.weights.formats import choose_formats

_BLOCK_SIZE, _MAX_BLOCKS, _VOCAB = 16, 8, 304


def _runner(
    model: Path, dtype: torch.dtype, quantization: str = "auto", *, int8: bool = False, **options: Any
) -> ModelRunner:
    checkpoint = open_checkpoint(str(model))
    formats = choose_formats(checkpoint.reader(), checkpoint.config, quantization)
    return build_runner(
        checkpoint.config,
        checkpoint.reader(),
        make_layout(checkpoint.config, 1),
        RankGroups(in_process_groups(1)[0]),
        RunnerOptions(
            dtype=dtype,
            max_model_len=_BLOCK_SIZE * _MAX_BLOCKS,
            num_blocks=32 * _MAX_BLOCKS,
            block_size=_BLOCK_SIZE,
            formats=formats.with_int8_activations() if int8 else formats,
            **options,
        ),
    )


def _execute(runner: ModelRunner, lens: Sequence[tuple[int, int]], num_decode: int, **changes: Any) -> Tensor:
    """Logits of all rows of sequences with (new tokens, context); the first ``num_decode`` sequences are generated."""
    logits_TV = runner.execute(_plan(lens, num_decode, **changes))
    assert logits_TV is not None
    return logits_TV


def _execute_eagerly(runner: ModelRunner, lens: Sequence[tuple[int, int]], num_decode: int, **changes: Any) -> Tensor:
    """The logits of ``_execute`` for a step with a prompt, kernel by kernel."""
    with patch.object(decoder, "MAX_PROGRAM_ROWS", 0):
        return _execute(runner, lens, num_decode, **changes)


def _plan(lens: Sequence[tuple[int, int]], num_decode: int, **changes: Any) -> StepPlan:
    rng = np.random.default_rng(3)
    token_ids = [rng.integers(0, _VOCAB, new) for new, _ in lens]
    tables = np.arange(len(lens) * _MAX_BLOCKS).reshape(len(lens), _MAX_BLOCKS)
    values: dict[str, Any] = {
        "token_ids": np.concatenate(token_ids),
        "query_lens": [new for new, _ in lens],
        "context_lens": [context for _, context in lens],
        "block_tables": tables,
        "num_decode_rows": sum(new for new, _ in lens[:num_decode]),
        "logit_rows": range(sum(new for new, _ in lens)),
    }
    return make_plan(**(values | changes))


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """More than there is work for, so that some come late and find phases done."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    monkeypatch.setattr(layer_program, "useful_threads", lambda num_rows, num_weights: 3)
    yield
    torch.set_num_threads(before)


_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
_CONTEXTS = [5, 1, 100, 17, 64, 65, 16, 33, 2]


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_a_row_gets_the_same_bits_alone_and_beside_a_prompt(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    runner = _runner(make_tiny(tmp_path, **VARIANTS[variant]), dtype)
    for num_seqs in (1, len(_CONTEXTS)):
        contexts = _CONTEXTS[:num_seqs]
        _execute(runner, [(context, context) for context in contexts], 0)
        generated = [(1, context) for context in contexts]
        by_themselves = _execute(runner, generated, num_seqs)
        beside = _execute_eagerly(runner, [*generated, (3, 3)], num_seqs)
        assert torch.equal(beside, _execute(runner, [*generated, (3, 3)], num_seqs))
        assert by_themselves.isfinite().all()
        assert torch.equal(by_themselves, beside[:num_seqs])


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("quant", ["Q8_0", "Q4_0", "Q4_1"])
def test_packed_weights_give_the_same_bits_in_both_executions(quant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "m.gguf", quant, attention_bias=True)
    by_themselves = {}
    for quantization in ("auto", "none"):
        runner = _runner(path, dtype, quantization)
        _execute(runner, [(context, context) for context in _CONTEXTS], 0)
        generated = [(1, context) for context in _CONTEXTS]
        by_themselves[quantization] = _execute(runner, generated, len(_CONTEXTS))
        beside = _execute_eagerly(runner, [*generated, (3, 3)], len(_CONTEXTS))
        assert torch.equal(by_themselves[quantization], beside[: len(_CONTEXTS)])
    # An expanded embedding is rounded to dtype; rows of a packed one are unpacked to the float32 of the residual.
    assert torch.equal(by_themselves["auto"], by_themselves["none"]) == (dtype == torch.float32)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("quant", ["Q8_0", "Q4_0", "Q4_1"])
def test_int8_activations_give_the_same_bits_however_a_layer_is_run(
    quant: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """By the layer program and beside a prompt, token by token and as a prompt, resident and streamed."""
    path = make_tiny_gguf(tmp_path / "m.gguf", quant, attention_bias=True, num_hidden_layers=4)
    streamed = WeightPlan(source="stream", origin="host", streamed=(1, 2, 3))
    float_logits = _execute(_runner(path, dtype), [(5, 5)], 0)
    seen = []
    for plan in (EVERYTHING_RESIDENT, streamed):
        runner = _runner(path, dtype, int8=True, weight_plan=plan)
        prompts = _execute(runner, [(context, context) for context in _CONTEXTS], 0)
        generated = [(1, context) for context in _CONTEXTS]
        by_themselves = _execute(runner, generated, len(_CONTEXTS))
        assert torch.equal(
            by_themselves, _execute_eagerly(runner, [*generated, (3, 3)], len(_CONTEXTS))[: len(_CONTEXTS)]
        )
        seen.append((prompts, by_themselves))
        runner.close()
    assert all(map(torch.equal, *seen))
    int8_logits = seen[0][0][:5]
    assert 0 < (int8_logits - float_logits).abs().max() < 0.1 * float_logits.abs().max()


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("int8", [False, True])
def test_threads_that_share_packed_weights_change_no_bit(quantization: str, int8: bool, tmp_path: Path) -> None:
    runner = _runner(make_tiny(tmp_path, num_hidden_layers=6), torch.bfloat16, quantization, int8=int8)
    _execute(runner, [(context, context) for context in _CONTEXTS], 0)
    generated = [(1, context) for context in _CONTEXTS]
    beside = _execute_eagerly(runner, [*generated, (3, 3)], len(_CONTEXTS))[: len(_CONTEXTS)]
    for _ in range(20):
        assert torch.equal(_execute(runner, generated, len(_CONTEXTS)), beside)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("dtype", _DTYPES)
def test_threads_that_share_the_work_change_no_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    runner = _runner(make_tiny(tmp_path, num_hidden_layers=6), dtype)
    _execute(runner, [(context, context) for context in _CONTEXTS], 0)
    generated = [(1, context) for context in _CONTEXTS]
    beside = _execute_eagerly(runner, [*generated, (3, 3)], len(_CONTEXTS))[: len(_CONTEXTS)]
    for _ in range(50):
        assert torch.equal(_execute(runner, generated, len(_CONTEXTS)), beside)


@pytest.mark.parametrize("logit_rows", [[1, 40], [40], [0, 1, 7]])
def test_the_last_mlp_computes_the_rows_that_are_needed(
    logit_rows: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    gated_linear = layer_kernels.gated_linear

    def counted(x_TD: Tensor, *matrix: Any, **form: Any) -> Tensor:
        counts.append(len(x_TD))
        return gated_linear(x_TD, *matrix, **form)

    monkeypatch.setattr(layer_kernels, "gated_linear", counted)
    lens = [(1, 9), (1, 20), (39, 39)]
    runner = _runner(make_tiny(tmp_path), torch.bfloat16)
    _execute(runner, [(context, context) for _, context in lens], 0)
    counts.clear()
    whole = _execute_eagerly(runner, lens, 2)
    some = _execute_eagerly(runner, lens, 2, logit_rows=logit_rows)
    assert torch.equal(some, whole[logit_rows])
    assert counts == [41, 41, 41, len(logit_rows)]
    with patch.object(decoder, "MAX_PROGRAM_ROWS", 0):
        assert runner.execute(_plan(lens, 2, logit_rows=[])) is None
    assert counts[4:] == [41, 0]


@pytest.mark.parametrize("dtype", _DTYPES)
def test_several_tokens_of_a_sequence_see_each_other_in_order(dtype: torch.dtype, tmp_path: Path) -> None:
    runner = _runner(make_tiny(tmp_path), dtype)
    lens = [(3, 40), (1, 7), (5, 5), (2, 66)]
    _execute(runner, [(context, context) for _, context in lens], 0)
    by_themselves = _execute(runner, lens, len(lens))
    beside = _execute_eagerly(runner, [*lens, (3, 3)], len(lens))
    assert torch.equal(by_themselves, beside[: len(by_themselves)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_tables": [[32 * _MAX_BLOCKS] * _MAX_BLOCKS]}, "slots are .*4100.*; the cache has slots 0 to 4095"),
        ({"block_tables": [[-1] * _MAX_BLOCKS]}, "slots are .*-12"),
        ({"block_tables": [[999, *range(7)]], "context_lens": [21]}, "sequence 0 has query rows"),
    ],
)
def test_an_invalid_plan_is_refused_before_anything_is_written(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    runner = _runner(make_tiny(tmp_path), torch.float32)
    with pytest.raises(ValueError, match=message):
        _execute(runner, [(1, 5)], 1, **changes)


def test_a_prompt_with_a_slot_outside_the_cache_is_refused_before_its_first_layer(tmp_path: Path) -> None:
    runner = _runner(make_tiny(tmp_path), torch.float32)
    with pytest.raises(ValueError, match="the cache has slots 0 to 4095"):
        _execute(runner, [(3, 3)], 0, block_tables=[[32 * _MAX_BLOCKS] * _MAX_BLOCKS])
