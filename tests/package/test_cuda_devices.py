"""CUDA devices, as a child that tries them states them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tightwire import cuda_devices as devices
from tightwire.cuda_devices import CudaDevice, cuda_devices, why_no_launch
from tightwire.server.ranks.processes import _environment


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A torch with CUDA, a driver, and a Triton that can launch."""
    monkeypatch.setattr(devices, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(devices, "has_driver", lambda: True)
    monkeypatch.setattr(devices, "why_no_launch", lambda: "")
    cuda_devices.cache_clear()
    yield monkeypatch
    cuda_devices.cache_clear()


def _child(program: str) -> tuple[str, ...]:
    return sys.executable, "-c", program


def test_devices_are_those_that_ran_a_kernel(cuda_build: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    old = "T4 has compute capability 7.5; 8.0 is needed"
    cuda_build.setattr(devices, "_CHILD", _child(f"print('[\"A\", 9, 8]'); raise SystemExit({old!r})"))
    assert cuda_devices() == ((CudaDevice("A", 9, 8),), old)
    assert old in caplog.text


def test_a_driver_that_torch_refuses_is_no_device(cuda_build: pytest.MonkeyPatch) -> None:
    """NVML would name the device, and the rank would end at its first call of CUDA."""
    cuda_build.setattr(devices, "_CHILD", _child("raise RuntimeError('The NVIDIA driver is too old')"))
    assert cuda_devices() == ((), "RuntimeError: The NVIDIA driver is too old")


def test_without_a_driver_nothing_is_tried_or_said(
    cuda_build: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where pip took its default, a CUDA build of torch, on a machine without a GPU."""
    cuda_build.setattr(devices, "has_driver", lambda: False)
    cuda_build.setattr(devices, "_CHILD", _child("print('[\"A\", 9, 8]')"))
    assert cuda_devices() == ((), "this machine has no NVIDIA driver (libcuda.so.1)")
    assert not devices.on_gpu("auto") and devices.on_gpu("cuda")
    assert not caplog.text and not capsys.readouterr().err


def test_a_device_that_hangs_is_given_up(cuda_build: pytest.MonkeyPatch) -> None:
    cuda_build.setattr(devices, "_CHILD", _child("import time; time.sleep(60)"))
    cuda_build.setattr(devices, "_LIMIT_S", 0.3)
    assert cuda_devices() == ((), "CUDA did not answer within 0.3 s")


def test_the_child_ends_with_torchs_reason(cuda_build: pytest.MonkeyPatch) -> None:
    """The probe itself, where there is no device."""
    cuda_build.setenv("CUDA_VISIBLE_DEVICES", "")
    found, reason = cuda_devices()
    assert not found and reason


def test_the_child_has_the_ranks_order_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's own is by speed: the memory of one device would be planned for another."""
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    asked = _child("import os; print(os.environ['CUDA_DEVICE_ORDER'])")
    assert devices.run_child(asked) == (_environment(1, "")["CUDA_DEVICE_ORDER"] + "\n", "")


def test_what_a_launch_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    assert "Triton is not installed" in why_no_launch()
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert "install gcc" in why_no_launch()
    monkeypatch.setenv("CC", "tcc")
    monkeypatch.setattr(devices.sysconfig, "get_config_var", lambda name: str(tmp_path))
    assert f"needs {tmp_path}/Python.h" in why_no_launch()
    (tmp_path / "Python.h").touch()
    assert why_no_launch() == ""
