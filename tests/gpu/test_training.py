"""A run of `tightwire train` on one GPU: the losses of the same run on a CPU, stopped and gone on with."""

from pathlib import Path

import pytest
from helpers.training.training_runs import losses, make_config
from tiny import VARIANTS, make_tiny

from tightwire.training.run.run import run_training

pytestmark = pytest.mark.gpu


def test_a_run_on_a_gpu_has_the_losses_of_one_on_a_cpu(tmp_path: Path) -> None:
    overrides = ("checkpoint.every=3", "evaluation.every=3", "evaluation.prompts=[document]")
    for device in ("cpu", "cuda"):
        assert run_training(make_config(tmp_path, *overrides, f"device={device}", run=device), {}) == 0
    on_cpu, on_gpu = (losses(make_config(tmp_path, run=device)) for device in ("cpu", "cuda"))
    assert on_gpu == pytest.approx(on_cpu, rel=1e-3)


@pytest.mark.parametrize("optimizer", ["{}", "{fused: true}"])
def test_a_run_on_a_gpu_goes_on_where_it_stopped(optimizer: str, tmp_path: Path) -> None:
    given = ("device=cuda", "schedule.kind=constant", f"optimizer.options={optimizer}")
    config = make_config(tmp_path, *given, "schedule.steps=3")
    longer = make_config(tmp_path, *given, "schedule.steps=6")
    whole = make_config(tmp_path, *given, "schedule.steps=6", run="whole")
    for run in (config, longer, whole):
        run_training(run, {})
    assert losses(longer) == losses(whole)


def test_recomputed_blocks_drop_the_same_numbers_again(tmp_path: Path) -> None:
    base = make_tiny(tmp_path / "model", **VARIANTS["odd-heads"])
    model = f"model={{start: {base}, lora: {{rank: 4, alpha: 64, dropout: 0.5}}}}"
    found = {}
    for blocks in ("0", "all"):
        run = make_config(tmp_path, model, "device=cuda", f"parallel.checkpoint_blocks={blocks}", run=f"run-{blocks}")
        assert run_training(run, {}) == 0
        found[blocks] = losses(run)
    assert found["all"] == pytest.approx(found["0"], rel=1e-5)
