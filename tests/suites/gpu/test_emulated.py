"""Tests of tests/gpu on an emulated CUDA device: those that run in seconds there, in `make aot` a few more. The others need a device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.kernels.interpreted import needs_triton

pytestmark = needs_triton
ROOT = Path(__file__).parents[3]
ALL = "TIGHTWIRE_AOT" in os.environ


@pytest.mark.slow
def test_on_an_emulated_device() -> None:
    """In a process of its own, in which Triton is an interpreter and torch has a device.

    The device refuses what CUDA refuses and decode never waits for it and gives it little beside a replay; prompts and answers of packed weights, training, replayed steps, stages, drafts; in `make aot` shared layers.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "helpers.emulated.pytest_plugin", "-p", "no:cacheprovider"]
    files = (
        "rules",
        "decode_waits",
        "decode_work",
        "layer_kernels",
        "training",
        "decode_graphs",
        "stages",
        "drafts",
        "packed_model",
        "partition",
    )
    chosen = "test_rules or test_decode_waits or prompts_of_packed or has_the_losses or models_logits[1]"
    chosen += " or one_rank[dtype0 or model_drafts or test_packed_model or test_decode_work or quantized_on_the_device"
    chosen += " or either_form[True]"
    chosen += " or answer_as_one_rank or own_ones[none] or form" * ALL
    run = subprocess.run(
        [*command, *(f"tests/gpu/test_{file}.py" for file in files), "-k", chosen],
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}/tests"},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert run.returncode == 0, run.stdout[-8000:]
    assert f"{54 if ALL else 50} passed" in run.stdout, run.stdout
