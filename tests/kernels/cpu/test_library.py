"""Loading the library: the level, overrides, what happens without one; each in a fresh process."""

import os
import subprocess
import sys

import pytest

from tightwire.kernels.cpu import build
from tightwire.kernels.cpu.library import level

PRODUCT = """
import torch
from tightwire.kernels.cpu.library import level
from tightwire.kernels.linear import linear
torch.manual_seed(0)
x, weight = torch.randn(3, 64), torch.randn(5, 64)
assert torch.allclose(linear(x, weight), x @ weight.T, atol=1e-4)
print(level())
"""


def _run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=300, check=False
    )


def test_the_best_level_is_loaded() -> None:
    usable = build.usable_levels()
    assert level() == (usable[-1] if usable else "spec")


def test_a_named_level_is_loaded() -> None:
    for name in [*build.usable_levels(), "spec"]:
        done = _run(PRODUCT, TIGHTWIRE_KERNELS=name)
        assert done.stdout == f"{name}\n", done.stderr


def test_a_level_that_the_cpu_lacks_is_refused() -> None:
    done = _run(PRODUCT, TIGHTWIRE_KERNELS="v9")
    assert done.returncode != 0
    assert "TIGHTWIRE_KERNELS=v9: this CPU has no such level; it has" in done.stderr


BROKEN = """
from pathlib import Path
from tightwire.kernels.cpu import build
build.BUILT = Path({folder!r})
build.find_compiler = lambda: (_ for _ in ()).throw(build.NoCompilerError("no C++ compiler: install g++"))
"""


def test_without_a_compiler_torch_computes_and_the_log_says_so_once(tmp_path: object) -> None:
    done = _run(BROKEN.format(folder=str(tmp_path)) + PRODUCT, TIGHTWIRE_KERNELS="")
    assert done.stdout == "spec\n", done.stderr
    assert done.stderr.count("the CPU kernels cannot be used, so torch computes instead") == 1
    assert "install g++" in done.stderr


def test_an_install_that_cannot_be_written_says_what_to_do() -> None:
    done = _run(BROKEN.format(folder="/proc/kernels") + PRODUCT, TIGHTWIRE_KERNELS="")
    assert done.stdout == "spec\n", done.stderr
    assert "cannot be built there" in done.stderr and "install Tightwire again" in done.stderr


def test_a_library_that_does_not_load_is_not_fatal(tmp_path: object) -> None:
    code = f"""
from pathlib import Path
from tightwire.kernels.cpu import build
build.BUILT = Path({str(tmp_path)!r})
build.library_path(build.usable_levels()[-1]).write_bytes(build.source_hash().encode())  # not a library at all
"""
    done = _run(code + PRODUCT, TIGHTWIRE_KERNELS="")
    assert done.stdout == "spec\n", done.stderr
    assert done.stderr.count("cannot be used") == 1


def test_the_library_loads_without_torch() -> None:
    code = "import sys; from tightwire.kernels.cpu.library import level; level(); print('torch' in sys.modules)"
    assert _run(code).stdout == "False\n"


@pytest.mark.parametrize(
    "name", ["kernels.attention", "kernels.block_quant", "kernels.best_number", "kernels.row_runs"]
)
def test_kernels_import_without_the_library(name: str) -> None:
    assert _run(f"import tightwire.{name}", TIGHTWIRE_KERNELS="spec").returncode == 0


def test_threads_that_load_it_together_share_one_library() -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
from tightwire.kernels.cpu.library import lib, level
with ThreadPoolExecutor(8) as pool:
    assert len({f.result() for f in [pool.submit(level) for _ in range(64)]}) == 1
"""
    done = _run(code)
    assert done.returncode == 0, done.stderr
