"""The report of ``tightwire train --dry-run``."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.training.training_runs import make_config

from tightwire.comm.group.topology import Topology
from tightwire.sizes import parse_bytes
from tightwire.training.config.read import read_config
from tightwire.training.engine.options import engine_options
from tightwire.training.estimate import memory, step
from tightwire.training.estimate.step import StepModel, model_step
from tightwire.training.run import dry_run as dry_run_module
from tightwire.training.run.dry_run import dry_run
from tightwire.training.start.model import config_of


def test_a_dry_run_reports_memory_traffic_and_time(tmp_path: Path) -> None:
    overrides = ("dry_run={ranks: 4, inside: 1gbit}", "parallel.sharding=zero3", "batch.micro_sequences=1")
    report = dry_run(make_config(tmp_path, *overrides), {})

    for words in ("4 on 1 node, sharding zero3, 4 shards", "8 sequences of 16 tokens = 128 tokens", "weight buffers"):
        assert words in report
    assert "at 1 TFLOP/s, as given" in report and "not known" not in report
    assert "data              1 file, " in report
    assert "predicted" not in report  # two micro-batches
    assert not (tmp_path / "run").exists()


def test_a_dry_run_advises_against_a_dtype_that_the_machine_multiplies_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flops(device: torch.device, dtype: torch.dtype) -> float:
        return 7e10 if dtype == torch.float32 else 1e9

    for module in (step, dry_run_module):
        monkeypatch.setattr(module, "peak_flops", flops)
    given = ["model.compute_dtype=bfloat16", "log.peak_tflops=1"]  # of another machine
    report = dry_run(make_config(tmp_path, *given), {})
    assert "ADVICE" not in report and ", 1 shard\n" in report
    assert "use model.compute_dtype=float32" in dry_run(make_config(tmp_path, given[0], "log.peak_tflops=null"), {})


def test_a_dry_run_predicts_a_step_of_one_micro_batch(tmp_path: Path) -> None:
    overrides = ("dry_run={ranks: 4, inside: 1gbit}", "parallel.sharding=zero3", "log.peak_tflops=1e-3")
    report = dry_run(make_config(tmp_path, *overrides), {})

    milliseconds = {line.split()[0]: line.split() for line in report.splitlines() if line.startswith("    ")}
    assert float(milliseconds["predicted"][1]) >= float(milliseconds["a"][2])


def test_a_dry_run_counts_what_a_compressor_keeps_and_sends(tmp_path: Path) -> None:
    overrides = ("dry_run.ranks=2", "parallel.nodes=2", "parallel.sharding=none")
    dense = dry_run(make_config(tmp_path, *overrides), {})
    sparse = dry_run(make_config(tmp_path, *overrides, "parallel.between={kind: top-k, dense_below: 64}"), {})

    def numbers(report: str, name: str) -> list[str]:
        return [line.removeprefix(f"    {name} ").split()[0] for line in report.splitlines() if f"    {name}  " in line]

    assert not numbers(dense, "between") and len(numbers(sparse, "between")) == 1
    assert numbers(dense, "between nodes")[0] != numbers(sparse, "between nodes")[0]
    assert numbers(sparse, "top-k compressor")
    assert "from step 0" in sparse and "ADVICE" not in sparse and "from step" not in dense

    def disk(report: str) -> str:
        return next(line for line in report.splitlines() if line.startswith("disk"))

    assert disk(dense) != disk(sparse)  # which has the residuals of both replicas


def test_a_dry_run_advises_where_dense_sums_send_less(tmp_path: Path) -> None:
    overrides = (
        "dry_run.ranks=32",
        "parallel.nodes=32",
        "parallel.sharding=none",
        "batch={sequences: 64, micro_sequences: 2}",
    )
    report = dry_run(
        make_config(tmp_path, *overrides, "parallel.between={kind: top-k, sparsity: [0.75], dense_below: 64}"), {}
    )
    assert "times dense" in report
    assert "    ADVICE: " in report


def test_a_dry_run_counts_what_clipping_sends_inside_nodes(tmp_path: Path) -> None:
    overrides = (
        "dry_run={ranks: 4, inside: 1gbit}",
        "parallel.nodes=2",
        "parallel.sharding=hybrid",
        "batch.micro_sequences=1",
    )

    def inside(clip_norm: str) -> int:
        compressor = f"parallel.between={{kind: top-k, clip_norm: {clip_norm}}}"
        config = make_config(tmp_path, *overrides, compressor)
        model = model_step(config, engine_options(config), config_of(config.model), Topology(0, 4, num_nodes=2))
        return sum(each.inside for each in model.compressors.values())

    num_parameters = 3 * 9 + 2  # of three blocks, the embedding and the last norm
    assert (inside("null"), inside("1.0")) == (0, 8 * num_parameters)
    assert inside("1.0, clip: global") == 8 * 5  # one number of each flat parameter


def test_as_few_blocks_are_recomputed_as_memory_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = ("model.shape.num_hidden_layers=6", "model.shape.vocab_size=300", "data.sequence_tokens=64")
    auto = (*shapes, "parallel={sharding: zero3, checkpoint_blocks: auto}", "dry_run.ranks=2")
    config = make_config(tmp_path, *auto)
    model = model_step(config, engine_options(config), config_of(config.model), Topology(0, 2))
    found = [replace(model, options=replace(model.options, checkpoint_blocks=n)).memory() for n in range(7)]
    most = [each.most for each in found]
    assert most[0] > most[3] > most[5]

    monkeypatch.setattr(StepModel, "memory", lambda self: found[self.options.checkpoint_blocks])  # measured once each
    asked = (most[0], most[0] - 1, most[3], most[3] - 1, 1)
    assert [model.fitting(num_bytes).options.checkpoint_blocks for num_bytes in asked] == [0, 1, 3, 4, 6]
    assert "recomputed        3 of 6 blocks" in dry_run(make_config(tmp_path, *auto, f"dry_run.memory='{most[3]}'"), {})
    assert "recomputed" not in dry_run(config, {})  # this machine has enough


def test_a_dry_run_works_without_the_data() -> None:
    config = read_config(
        "multi-node", ["data.files=[none]", "dry_run.ranks=4", "parallel.nodes=2", "log.peak_tflops=400"]
    )
    report = dry_run(config, {})

    assert "data              NOT FOUND" in report
    assert "gather across" in report and "give dry_run.between" in report


def test_a_dry_run_refuses_what_a_run_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be divided over 3 ranks"):
        dry_run(make_config(tmp_path, "dry_run.ranks=3"), {})
    with pytest.raises(ValueError, match="dry_run.inside: 'fast' is not a link"):
        dry_run(make_config(tmp_path, "dry_run={ranks: 2, inside: fast}", "parallel.sharding=zero3"), {})
    with pytest.raises(
        ValueError, match="dry_run.between: '50mbi' is not a link"
    ):  # of a wire that nothing goes over, too
        dry_run(make_config(tmp_path, "dry_run={ranks: 1, between: 50mbi}"), {})
    with pytest.raises(ValueError, match="dry_run.memory: 'much' is not a size; write it as 2GiB"):
        make_config(tmp_path, "dry_run.memory=much")  # of a run without checkpoint_blocks auto, too


def test_frozen_weights_are_planned_with_their_bytes_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 8 billion in 4 bits on 4 ranks are 1 GiB each, and nothing in float32; kept once a node those of the ranks of a node."""
    monkeypatch.setattr(memory, "activation_bytes", lambda *_, **__: memory.Activations(0, 0))  # a second for 32 blocks
    overrides = (
        "model={start: 'random:llama-3-8b', shape: null, frozen: ['*proj*', '*embed*', 'lm_head*']}",
        "parallel={sharding: zero3, frozen_codec: int4, checkpoint_blocks: all, nodes: 2}",
        "dry_run.ranks=4",
        "batch.sequences=32",
    )

    def frozen_gib(*more: str) -> float:
        report = dry_run(make_config(tmp_path, *overrides, *more), {})
        line = next(line.split() for line in report.splitlines() if line.startswith("    frozen shards"))
        return parse_bytes(line[2]) / 2**30

    assert frozen_gib() == pytest.approx(1.0, rel=0.02)  # 4.25 bits each
    assert frozen_gib("parallel.secondary=true") == pytest.approx(2.0, rel=0.02)
