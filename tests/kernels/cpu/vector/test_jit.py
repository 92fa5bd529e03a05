"""The cache of compiled kernels: fresh when a neighbour changed, and no cause of failure when there is no folder."""

import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tightwire.kernels
from tightwire.kernels.cpu.vector import jit

SCRIPT = """
import torch
from tightwire.kernels.qkv import apply_rope
print(apply_rope(torch.ones(1, 1, 2), torch.ones(1, 1), torch.zeros(1, 1)).flatten().tolist())
"""


def _run(folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_changed_helper_is_compiled_into_cached_kernels(tmp_path: Path) -> None:
    source = Path(tightwire.kernels.__file__).parent
    copy = tmp_path / "tightwire" / "kernels"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tightwire" / "__init__.py").touch()

    assert _run(tmp_path) == "[1.0, 1.0]"
    assert list(copy.glob("cpu/__pycache__/rope.*.nbi")), "the kernel was not cached beside its source"
    numbers = copy / "cpu" / "vector" / "numbers.py"
    numbers.write_text(numbers.read_text().replace("        return value\n", "        return simd.add(value, value)\n"))
    assert _run(tmp_path) == "[8.0, 8.0]"  # cos doubled, then the product, then what is stored


def test_without_a_cache_folder_a_kernel_is_compiled_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    names: dict[str, object] = {}
    exec("def twice(x):\n    return 2 * x", names)  # noqa: S102  a function without a file has no cache folder

    with caplog.at_level(logging.WARNING):
        twice = jit.kernel(names["twice"])  # pyright: ignore[reportArgumentType]

    assert twice(21) == 42
    assert "twice is compiled at every start" in caplog.text


def test_missing_numba_is_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    jit.require_numba()
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(RuntimeError, match="pip install 'numba"):
        jit.require_numba()


def test_a_cpu_too_old_is_an_error_that_names_the_missing_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: {"fma": True, "f16c": False})
    with pytest.raises(RuntimeError, match="lacks f16c; the CPU kernels need"):
        jit.require_numba()
