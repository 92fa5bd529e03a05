"""What is reckoned before a run: arithmetic against what torch counts, and the report that names them."""

from pathlib import Path

import pytest
import torch
from helpers.training.training_runs import make_config
from torch.utils.flop_counter import FlopCounterMode

from tightwire.comm.group.topology import Topology
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.training.config.read import read_config
from tightwire.training.engine.units import plan_units
from tightwire.training.estimate.arithmetic import flops_per_token, peak_flops
from tightwire.training.run.dry_run import dry_run, sent_in_a_step
from tightwire.training.run.setup import engine_options
from tightwire.training.start.model import build_model, config_of

_CPU = torch.device("cpu")
_SEQUENCES, _TOKENS = 2, 128
_LLAMA = LlamaConfig(
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    mlp_size=96,
    vocab_size=300,
    max_positions=512,
)


def _loss() -> torch.Tensor:
    """Of a real model."""
    model = build_model(_LLAMA, device=_CPU)
    model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        torch.nn.init.zeros_(tensor)
    ids = torch.zeros(_SEQUENCES, _TOKENS, dtype=torch.int64)
    return model(input_ids=ids, labels=ids, shift_labels=ids, use_cache=False).loss


def test_arithmetic_of_products_is_what_torch_counts() -> None:
    with FlopCounterMode(display=False) as counted:
        _loss().backward()

    attention = 12 * _LLAMA.num_layers * _LLAMA.num_heads * _LLAMA.head_dim * _TOKENS  # torch counts none on a CPU
    assert flops_per_token(_LLAMA, _TOKENS) - attention == counted.get_total_flops() / (_SEQUENCES * _TOKENS)


def test_a_cpu_is_measured() -> None:
    measured = peak_flops(_CPU, torch.float32)
    assert measured is not None and measured > 0


def test_a_dry_run_says_what_a_run_would_take(tmp_path: Path) -> None:
    overrides = ("dry_run={ranks: 4, inside: 1gbit}", "parallel.sharding=zero3", "batch.micro_sequences=1")
    report = dry_run(make_config(tmp_path, *overrides), {})

    for words in ("4 on 1 node, sharding zero3, 4 shards", "8 sequences of 16 tokens = 128 tokens", "weight buffers"):
        assert words in report
    assert "        blocks                 6 x a payload of 8KiB" in report
    assert "at 1 TFLOP/s, as given" in report and "at 1gbit" in report
    assert "data              1 file, " in report
    assert not (tmp_path / "run").exists()


def test_a_dry_run_counts_what_a_slot_keeps_and_sends(tmp_path: Path) -> None:
    overrides = ("dry_run.ranks=2", "parallel.nodes=2", "parallel.sharding=none")
    dense = dry_run(make_config(tmp_path, *overrides), {})
    sparse = dry_run(make_config(tmp_path, *overrides, "parallel.between={kind: top-k, dense_below: 64}"), {})

    def numbers(report: str, name: str) -> list[str]:
        return [line.removeprefix(f"    {name} ").split()[0] for line in report.splitlines() if f"    {name}  " in line]

    assert not numbers(dense, "between") and len(numbers(sparse, "between")) == 1
    assert numbers(dense, "between nodes")[0] != numbers(sparse, "between nodes")[0]
    assert "in 5 sums, top-k" in sparse and "        blocks                 3 x sending " in sparse

    def disk(report: str) -> str:
        return next(line for line in report.splitlines() if line.startswith("disk"))

    assert disk(dense) != disk(sparse)  # which has the residuals of both replicas


def test_a_dry_run_counts_what_clipping_sends_inside_nodes(tmp_path: Path) -> None:
    overrides = (
        "dry_run={ranks: 4, inside: 1gbit}",
        "parallel.nodes=2",
        "parallel.sharding=hybrid",
        "batch.micro_sequences=1",
    )

    def inside(clip_norm: str) -> float:
        slot = f"parallel.between={{kind: top-k, clip_norm: {clip_norm}}}"
        config = make_config(tmp_path, *overrides, slot)
        options, topology = engine_options(config), Topology(0, 4, num_nodes=2)
        plan = plan_units(build_model(config_of(config.model), device=_CPU), 2)
        return sent_in_a_step(config, options, plan, [], topology).inside

    num_parameters = 3 * 9 + 2  # of three blocks, the embedding and the last norm
    assert (inside("null"), inside("1.0")) == (0, 8 * num_parameters)


def test_a_dry_run_does_without_the_data() -> None:
    config = read_config(Path("multi-node"), ["dry_run.ranks=16", "parallel.nodes=2", "log.peak_tflops=400"])
    report = dry_run(config, {})

    assert "data              NOT FOUND" in report
    assert "gather_across" in report and "give dry_run.between" in report


def test_a_dry_run_refuses_what_a_run_would(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be dealt to 3 ranks"):
        dry_run(make_config(tmp_path, "dry_run.ranks=3"), {})
    with pytest.raises(ValueError, match="dry_run.inside: 'fast' is not a link"):
        dry_run(make_config(tmp_path, "dry_run={ranks: 2, inside: fast}", "parallel.sharding=zero3"), {})
    with pytest.raises(
        ValueError, match="dry_run.between: '50mbi' is not a link"
    ):  # of a wire that nothing goes over, too
        dry_run(make_config(tmp_path, "dry_run={ranks: 1, between: 50mbi}"), {})
