"""Rates of copies between GPUs, as a child states them; the measurement itself on an emulated device."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.kernels.interpreted import needs_triton

from tightwire import cuda_devices
from tightwire.server.plan import gpu_copies
from tightwire.server.plan.gpu_copies import CopyRates, copy_rates

_TESTS = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _nothing_known() -> Iterator[None]:
    copy_rates.cache_clear()
    yield
    copy_rates.cache_clear()


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("import sys; print(f'[{sys.argv[1]}e9, 25e9]')", (CopyRates(4e9, 25e9), "")),
        ("raise SystemExit('OutOfMemoryError: CUDA out of memory')", (None, "OutOfMemoryError: CUDA out of memory")),
        (
            r"raise SystemExit('AcceleratorError: CUDA error: busy\nCompile with DSA\n')",
            (None, "AcceleratorError: CUDA error: busy"),
        ),
        ("raise SystemExit(3)", (None, "its probe ended with 3")),
        ("import time; time.sleep(60)", (None, "CUDA did not answer within 0.5 s")),
    ],
)
def test_what_the_child_says(program: str, found: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_copies, "_CHILD", (sys.executable, "-c", program))
    if "sleep" in program:
        monkeypatch.setattr(cuda_devices, "_LIMIT_S", 0.5)
    assert copy_rates(4) == found


@needs_triton
def test_the_measurement_runs_on_emulated_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy's devices and streams are checked there; the rates are those of host memory."""
    path = os.pathsep.join(map(str, (_TESTS / "helpers/emulated/site", _TESTS.parent / "src", _TESTS)))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("EMULATED_CUDA_DEVICES", "3")
    rates, why = copy_rates(3)
    assert rates is not None and min(rates) > 0, why
    alone, why = copy_rates(1)
    assert alone is not None and alone.host > 0 == alone.gpus, why
    monkeypatch.setenv("EMULATED_CUDA_DEVICES", "2")
    program = "from tightwire.server.plan.gpu_copies import measure; measure(3, 1 << 20)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 1 and "invalid device ordinal 2" in run.stderr, "the emulated machine has two"
