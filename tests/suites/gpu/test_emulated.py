"""Tests of tests/gpu on an emulated CUDA device: those that run in seconds there. The others need a device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.kernels.interpreted import needs_triton

pytestmark = needs_triton
ROOT = Path(__file__).parents[3]


def _pytest(*arguments: str) -> str:
    """The output of a pytest run in a process of its own, in which Triton is an interpreter and torch has a device."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "helpers.emulated.pytest_plugin", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}/tests"}
    run = subprocess.run(
        [*command, *arguments], check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )
    assert run.returncode == 0, run.stdout[-8000:]
    return run.stdout


def test_the_device_refuses_what_cuda_refuses_and_decode_never_waits_for_it() -> None:
    output = _pytest("tests/gpu/test_rules.py", "tests/gpu/test_decode_waits.py")
    assert "9 passed" in output, output


def test_prompts_of_packed_weights_and_a_run_of_training() -> None:
    output = _pytest(
        *("tests/gpu/test_layer_kernels.py", "tests/gpu/test_training.py"), "-k", "prompts_of_packed or has_the_losses"
    )
    assert "14 passed" in output, output


@pytest.mark.slow
def test_replayed_steps() -> None:
    assert "1 passed" in _pytest("tests/gpu/test_decode_graphs.py::test_replayed_steps_give_the_models_logits[1]")
