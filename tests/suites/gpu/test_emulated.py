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


_STEPS = "test_rules or test_decode_waits or models_logits[1] or (test_decode_work and not context[1])"
_STEPS += " or test_decode_work or form" * ALL
_MODELS = "prompts_of_packed or test_packed_model or quantized_on_the_device" + " or model_drafts" * ALL
_MODELS += (
    " or has_the_losses or one_rank[dtype0" + " or fused or recomputed or answer_as_one_rank or own_ones[none]" * ALL
)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("files", "chosen", "count"),
    [
        (("rules", "decode_waits", "decode_work", "decode_graphs"), _STEPS, 31 if ALL else 27),
        (("layer_kernels", "packed_model", "drafts", "training", "stages", "partition"), _MODELS, 25 if ALL else 20),
    ],
    ids=("steps", "models"),
)
def test_on_an_emulated_device(files: tuple[str, ...], chosen: str, count: int) -> None:
    """In a process of its own, in which Triton is an interpreter and torch has a device.

    The device refuses what CUDA refuses. Decode never waits for it, and gives it little to do beside a replay. Packed weights,
    training and stages give the right numbers; in `make aot` also drafts and shared layers.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "helpers.emulated.pytest_plugin", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, *(f"tests/gpu/test_{file}.py" for file in files), "-k", chosen],
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}/tests"},
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert run.returncode == 0, run.stdout[-8000:]
    assert f"{count} passed" in run.stdout, run.stdout
