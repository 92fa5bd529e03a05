"""Whole runs: a stopped and resumed run equals an uninterrupted one, also on another number of ranks."""

import json
import math
from pathlib import Path

import pytest
import torch
from helpers.training.training_runs import StopAfter, log_lines, losses, make_config, train
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from tightwire.model.checkpoint.random import RandomReader
from tightwire.model.open import open_checkpoint
from tightwire.training.checkpoint.files import keys_in
from tightwire.training.checkpoint.folders import checkpoints_in, read_description
from tightwire.training.run import run

_ZERO3 = "parallel.sharding=zero3"


@pytest.mark.parametrize(
    ("world_size", "num_nodes", "overrides"),
    [
        (1, 1, ()),
        (2, 1, (_ZERO3, "parallel.gather_codec=int8", "parallel.checkpoint_blocks=auto")),
        (
            2,
            2,
            (
                "optimizer.name=sgd",
                "optimizer.weight_decay=0",
                "parallel.between={kind: dgc, sparsity: [0.9], dense_below: 64}",
            ),
        ),
    ],
    ids=["alone", "zero3-int8", "dgc"],
)
def test_a_stopped_run_resumes_to_the_bit(
    tmp_path: Path, world_size: int, num_nodes: int, overrides: tuple[str, ...]
) -> None:
    whole = make_config(tmp_path, *overrides, run="whole")
    parted = make_config(tmp_path, *overrides, run="parted")

    assert train(whole, world_size, num_nodes) == [0] * world_size
    assert train(parted, world_size, num_nodes, StopAfter(parted, 3)) == [2] * world_size
    assert len(losses(parted)) == 3
    assert train(parted, world_size, num_nodes) == [0] * world_size

    assert losses(parted) == losses(whole)
    exported = [Path(config.run, "model/model.safetensors").read_bytes() for config in (whole, parted)]
    assert exported[0] == exported[1]


def test_a_run_resumes_with_another_number_of_ranks_and_sharding(tmp_path: Path) -> None:
    whole, parted = make_config(tmp_path, run="whole"), make_config(tmp_path, run="parted")
    train(whole)
    train(parted, stop_signal=StopAfter(parted, 2))
    train(make_config(tmp_path, _ZERO3, run="parted"), 2, stop_signal=StopAfter(parted, 4))
    train(make_config(tmp_path, "parallel.sharding=hybrid", "batch.micro_sequences=1", run="parted"), 4, 2)

    assert len(losses(parted)) == 6
    assert losses(parted) == pytest.approx(losses(whole), abs=2e-5)  # sums in another order


def test_residuals_are_averaged_over_another_number_of_replicas(tmp_path: Path) -> None:
    between = "parallel.between={kind: top-k, sparsity: [0.9], dense_below: 64}"
    config = make_config(tmp_path, between)
    train(config, 2, stop_signal=StopAfter(config, 2))
    train(make_config(tmp_path, between, "batch.micro_sequences=1"), 4)

    assert read_description(checkpoints_in(Path(config.run))[-1])["replicas"] == 4
    assert len(losses(config)) == 6


def test_checkpoints_are_written_during_the_run_and_the_newest_kept(tmp_path: Path) -> None:
    config = make_config(tmp_path, "checkpoint={every: 2, keep: 2}")
    train(config)
    assert [path.name for path in checkpoints_in(Path(config.run))] == ["step-00000004", "step-00000006"]


def test_the_exported_model_is_read_by_the_server_and_by_transformers(tmp_path: Path) -> None:
    config = make_config(tmp_path, "export.dtype=float32", "model.tokenizer=bpe:300", _ZERO3)
    train(config, 2)

    folder = Path(config.run) / "model"
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.config.num_layers == 3 and checkpoint.config.dtype == "float32"
    assert checkpoint.tokenizer().decode(checkpoint.tokenizer().encode("document 7 says")) == "document 7 says"
    ids = torch.tensor([checkpoint.tokenizer().encode("document 7 says hhhh")])
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loss = model(input_ids=ids, labels=ids).loss
    assert loss < math.log(300)  # better than a guess: it has learned something, and its weights are where they belong


def test_a_run_starts_from_an_exported_model(tmp_path: Path) -> None:
    first = make_config(tmp_path, "export.dtype=float32", "schedule.steps=2")
    train(first)
    values = ["model={start: " + str(Path(first.run) / "model") + "}", "schedule.steps=1", "schedule.warmup_steps=0"]
    second = make_config(tmp_path, *values, "schedule.kind=constant", run="second")
    train(second)
    assert losses(second)[0] < losses(first)[0]


def test_evaluations_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    overrides = ("evaluation.every=3", "evaluation.prompts=['document ']", "schedule.steps=3")
    alone, shared = (make_config(tmp_path, *overrides, run=run) for run in ("alone", "shared"))
    train(alone)
    train(make_config(tmp_path, *overrides, _ZERO3, run="shared"), 2)

    (one,), (two,) = ([line for line in log_lines(config) if "held_out_loss" in line] for config in (alone, shared))
    assert two["held_out_loss"] == pytest.approx(one["held_out_loss"], abs=1e-5)
    assert one["tokens"] == two["tokens"] == 6 * 16
    assert one["samples"] == two["samples"] and one["samples"][0][0] == "document "


def test_frozen_parameters_do_not_change(tmp_path: Path) -> None:
    config = make_config(tmp_path, "model.frozen=['model.layers.0.*']", "export.dtype=float32", _ZERO3)
    train(config, 2)
    exported = open_checkpoint(str(Path(config.run) / "model"))
    trained, began = exported.reader(), RandomReader(exported.config, config.seed)
    now, before = torch.empty(48, 32), torch.empty(48, 32)
    for layer, same in ((0, True), (1, False)):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        trained.read_into(now, name, rows=range(48))
        began.read_into(before, name, rows=range(48))
        assert torch.equal(now, before) is same


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_frozen_weights_are_not_in_checkpoints_and_come_back_on_other_ranks(
    tmp_path: Path, before: int, after: int
) -> None:
    """In 4 bits on both, so the losses go on as without a break."""
    options = ("model.frozen=['*proj*', '*embed*']", "parallel.frozen_codec=int4", "parallel.sharding=zero3")
    whole = make_config(tmp_path, *options, run="whole")
    train(whole, before)
    config = make_config(tmp_path, *options)
    train(config, before, stop_signal=StopAfter(config, 3))
    keys = keys_in(checkpoints_in(Path(config.run))[-1])
    assert keys and not any("proj" in key or "embed" in key for key in keys)

    train(config, after)

    assert losses(config) == pytest.approx(losses(whole), abs=1e-5)
    exported = [load_file(Path(each.run) / "model" / "model.safetensors") for each in (whole, config)]
    frozen = [name for name in exported[0] if "proj" in name or "embed" in name]
    assert frozen and all(torch.equal(exported[0][name], exported[1][name]) for name in frozen)


def test_a_start_warns_of_sparse_gradients_that_send_more_than_dense_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sparse = "parallel={sharding: none, between: {kind: top-k, sparsity: [0.1], dense_below: 64}}"
    train(make_config(tmp_path, sparse, "schedule={steps: 1, warmup_steps: 0}"), 4)
    assert "WARNING: " in capsys.readouterr().err


def test_the_log_has_time_bytes_and_memory_of_each_step(tmp_path: Path) -> None:
    config = make_config(tmp_path, _ZERO3)
    train(config, 2)
    line = log_lines(config)[-1]
    assert line["tokens"] == 8 * 16 and line["wire_bytes"] > 0 and line["memory_bytes"] > 0 and 0 < line["mfu"] < 1
    assert json.dumps(line)  # no number that JSON does not have


@pytest.mark.parametrize("given_tflops", [None, 1e-9])
def test_measured_mfu_is_at_most_one_unless_the_peak_is_given(
    given_tflops: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "peak_flops", lambda device, dtype: 1.0)  # beside a program that took all the cores
    config = make_config(
        tmp_path, f"log.peak_tflops={'null' if given_tflops is None else given_tflops}", "schedule.steps=2"
    )
    train(config)
    assert all((line["mfu"] <= 1) == (given_tflops is None) for line in log_lines(config))


def test_as_many_blocks_as_buffers_are_trained(tmp_path: Path) -> None:
    """Then a block's gradients want a buffer that still holds those of its micro-batch before."""
    config = make_config(tmp_path, _ZERO3, "model.shape.num_hidden_layers=2", "batch.micro_sequences=1")
    train(config, 2)
    assert len(losses(config)) == 6
