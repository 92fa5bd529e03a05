"""A wheel built from the tracked files alone serves in an environment that does not see the checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.kernels.product import PRODUCT
from helpers.server.server_process import ServerProcess, complete, get
from tiny import make_tiny

import tightwire
from tightwire import native_build as build

pytestmark = [pytest.mark.slow, pytest.mark.alone]  # compiles every level on all cores
ROOT = Path(__file__).parents[3]


def _run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(command, cwd=cwd, env=environment, check=False, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    for name in _run("git", "ls-files", "-z").split("\0")[:-1]:
        if (ROOT / name).exists():
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / "tree" / name, follow_symlinks=False)
    # Kernels that are neither optimized nor inlined do the same, and are compiled in a quarter of the time.
    for name, option, instead in (
        ("src/tightwire/native_build.py", '"-O3"', '"-O0"'),
        ("kernels/cpu/native/vec.h", "__attribute__((always_inline))", ""),
    ):
        text = (folder / "tree" / name).read_text()
        assert option in text
        (folder / "tree" / name).write_text(text.replace(option, instead))
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, cwd=folder / "tree")
    (built,) = folder.glob("tightwire-*.whl")
    return built


@pytest.fixture(scope="module")
def program(wheel: Path) -> Iterator[Path]:
    """The command of an environment with the wheel, and with this one's packages but for the checkout.

    A folder named in a .pth file is searched, but the .pth files in it, such as that of an editable install, are not read.
    """
    folder = wheel.parent / "environment"
    _run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    _run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel)
    own = Path(_run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (own / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    yield folder / "bin" / "tightwire"
    shutil.rmtree(folder)


def test_it_holds_every_level_of_this_architecture_and_no_tests(wheel: Path) -> None:
    assert f"{tightwire.__version__}-py3-none-{build.platform_tag()}" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    levels = {Path(name).name for name in names if name.startswith("tightwire/kernels/cpu/built/")}
    assert levels == {build.library_path(level).name for level in build.machine_levels()}
    assert not [name for name in names if name.startswith(("tests", "tools", "tightwire/tests"))]


@pytest.mark.parametrize("name", build.usable_levels())
def test_a_named_level_is_loaded(name: str, program: Path, tmp_path: Path) -> None:
    assert _run(program.parent / "python", "-c", PRODUCT, cwd=tmp_path, TIGHTWIRE_KERNELS=name) == f"{name}\n"


def test_it_serves_outside_the_checkout(program: Path, tmp_path: Path) -> None:
    where = _run(program.parent / "python", "-c", "import tightwire; print(tightwire.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(program.parents[1])
    model = make_tiny(tmp_path / "model")
    command = ("env", "-u", "PYTHONPATH", "-C", str(tmp_path), str(program), "serve")
    with ServerProcess(tmp_path / "run", str(model), "--tp", "2", "--port", "0", command=command) as server:
        url = server.wait_ready()
        assert complete(url, 4).json()["usage"]["completion_tokens"] == 4
        assert "text/html" in get(f"{url}/dashboard").headers["content-type"]  # the pages are in the wheel too
        assert "building the CPU kernels" not in server.log and "torch computes instead" not in server.log
        assert server.end() == 0
