"""A run of `tightwire train` on one GPU: the losses of the same run on a CPU, stopped and gone on with."""

from pathlib import Path

import pytest
from helpers.training.training_runs import losses, make_config

from tightwire.training.run.run import run_training

pytestmark = pytest.mark.gpu


def test_a_run_on_a_gpu_has_the_losses_of_one_on_a_cpu(tmp_path: Path) -> None:
    overrides = ("checkpoint.every=3", "evaluation.every=3", "evaluation.prompts=[document]")
    for device in ("cpu", "cuda"):
        assert run_training(make_config(tmp_path, *overrides, f"device={device}", run=device), {}) == 0
    on_cpu, on_gpu = (losses(make_config(tmp_path, run=device)) for device in ("cpu", "cuda"))
    assert on_gpu == pytest.approx(on_cpu, rel=1e-3)


def test_a_run_on_a_gpu_goes_on_where_it_stopped(tmp_path: Path) -> None:
    config = make_config(tmp_path, "device=cuda", "schedule.kind=constant", "schedule.steps=3")
    longer = make_config(tmp_path, "device=cuda", "schedule.kind=constant", "schedule.steps=6")
    whole = make_config(tmp_path, "device=cuda", "schedule.kind=constant", "schedule.steps=6", run="whole")
    for run in (config, longer, whole):
        run_training(run, {})
    assert losses(longer) == losses(whole)
