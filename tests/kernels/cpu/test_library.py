"""Loading the library: the level, overrides, what happens without one; each in a fresh process."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from helpers.kernels.product import PRODUCT

from tightwire import native_build as build
from tightwire.kernels.cpu.library import level


def _run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=300, check=False
    )


def test_the_best_level_is_loaded() -> None:
    usable = build.usable_levels()
    assert level() == (usable[-1] if usable else "spec")


def test_a_named_level_is_loaded() -> None:
    """The best one. The others: tests/suites/servers/test_wheel, because a wheel has them."""
    done = _run(PRODUCT, TIGHTWIRE_KERNELS=build.usable_levels()[-1])
    assert done.stdout == f"{build.usable_levels()[-1]}\n", done.stderr


def test_a_level_that_the_cpu_lacks_is_refused() -> None:
    done = _run(PRODUCT, TIGHTWIRE_KERNELS="v9")
    assert done.returncode != 0
    assert "TIGHTWIRE_KERNELS=v9: this CPU's levels are" in done.stderr


BROKEN = """
from pathlib import Path
from tightwire import native_build as build
build.BUILT = Path({folder!r})
build.find_compiler = lambda: (_ for _ in ()).throw(build.NoCompilerError("no C++ compiler: install g++"))
"""


def test_without_a_compiler_torch_computes_and_the_log_says_so_once(tmp_path: Path) -> None:
    done = _run(BROKEN.format(folder=str(tmp_path)) + PRODUCT, TIGHTWIRE_KERNELS="")
    assert done.stdout == "spec\n", done.stderr
    assert done.stderr.count("the CPU kernels cannot be used, so torch computes instead") == 1
    assert "install g++" in done.stderr


def test_an_install_that_cannot_be_written_says_what_to_do() -> None:
    done = _run(BROKEN.format(folder="/proc/kernels") + PRODUCT, TIGHTWIRE_KERNELS="")
    assert done.stdout == "spec\n", done.stderr
    assert "cannot be built there" in done.stderr and "install Tightwire again" in done.stderr


def test_a_library_that_does_not_load_is_not_fatal(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from tightwire import native_build as build
build.BUILT = Path({str(tmp_path)!r})
build.library_path(build.usable_levels()[-1]).write_bytes(build.source_hash().encode())  # not a library at all
"""
    done = _run(code + PRODUCT, TIGHTWIRE_KERNELS="")
    assert done.stdout == "spec\n", done.stderr
    assert done.stderr.count("cannot be used") == 1


def test_the_library_loads_without_torch() -> None:
    code = "import sys; from tightwire.kernels.cpu.library import level; level(); print('torch' in sys.modules)"
    assert _run(code).stdout == "False\n"


def test_kernels_import_and_compute_without_the_library() -> None:
    names = ("attention", "block_quant", "best_number", "row_runs")
    imports = "\n".join(f"import tightwire.kernels.{name}" for name in names)
    done = _run(imports + PRODUCT, TIGHTWIRE_KERNELS="spec")
    assert done.stdout == "spec\n", done.stderr


class _FreshClone:
    """Small sources and no library, in ``folder``, and a compiler that notes its calls and waits for ``release``."""

    LOAD = """
from pathlib import Path
from tightwire import native_build as build
from tightwire.kernels.cpu import library
build.SOURCES, build.BUILT = Path({folder!r}) / "native", Path({folder!r}) / "built"
build.DEADLINE_S = {deadline_s}
print(library.level())
assert library.level() == "spec" or library.lib.one() == 1
"""

    def __init__(self, folder: Path) -> None:
        self.folder, self.hold = folder, folder / "hold"
        self.hold.touch()
        (folder / "native").mkdir()
        (folder / "native" / "kernels.h").write_text("int one(void);\n")
        exported = 'extern "C" __attribute__((visibility("default")))'
        (folder / "native" / "one.cpp").write_text(
            f"{exported} int one(void) {{ return 1; }}\n"
            f"{exported} const char *source_hash(void) {{ return TW_SOURCE_HASH; }}\n"
        )
        script = folder / "slow-c++"
        script.write_text(
            f"#!/bin/sh\necho $$ >> {folder}/calls\nwhile [ -e {self.hold} ]; do sleep 0.1; done\n"
            f'exec {" ".join(build.find_compiler())} "$@"\n'
        )
        script.chmod(0o755)

    def load(self, deadline_s: float = 60.0) -> subprocess.Popen[str]:
        """A process that prints the level it has loaded."""
        environment = {**os.environ, "CXX": str(self.folder / "slow-c++"), "TIGHTWIRE_KERNELS": ""}
        command = [sys.executable, "-c", self.LOAD.format(folder=str(self.folder), deadline_s=deadline_s)]
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
        )

    def load_while_another_builds(
        self, deadline_s: float = 60.0
    ) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
        """The one that builds, and one that waits for it and has said so."""
        builder = self.load()
        deadline = time.monotonic() + 60
        while not (self.folder / "calls").exists():
            assert time.monotonic() < deadline, "nothing was built"
            time.sleep(0.01)
        waiting = self.load(deadline_s)
        assert waiting.stderr is not None
        said = waiting.stderr.readline()
        assert f"waiting for another process that builds the CPU kernels, at most {deadline_s:g} s" in said
        return builder, waiting

    def num_compiler_calls(self) -> int:
        return len((self.folder / "calls").read_text().splitlines())


def test_of_two_processes_one_builds_and_the_other_waits(tmp_path: Path) -> None:
    clone = _FreshClone(tmp_path)
    builder, waiting = clone.load_while_another_builds()
    clone.hold.unlink()
    for process, built in ((builder, 1), (waiting, 0)):
        out, error = process.communicate(timeout=120)
        assert out == f"{build.usable_levels()[-1]}\n" and process.returncode == 0, error
        assert error.count("building the CPU kernels") == built
    assert clone.num_compiler_calls() == 2, "one source, and the link"


def test_a_killed_builder_is_followed_by_the_one_that_waits(tmp_path: Path) -> None:
    clone = _FreshClone(tmp_path)
    builder, waiting = clone.load_while_another_builds()
    builder.kill()
    clone.hold.unlink()
    out, error = waiting.communicate(timeout=120)
    assert out == f"{build.usable_levels()[-1]}\n" and waiting.returncode == 0, error
    assert "building the CPU kernels" in error
    builder.communicate(timeout=120)


def test_a_builder_that_never_ends_is_named_and_torch_computes(tmp_path: Path) -> None:
    clone = _FreshClone(tmp_path)
    builder, waiting = clone.load_while_another_builds(deadline_s=0.5)
    out, error = waiting.communicate(timeout=120)
    assert out == "spec\n"
    assert re.search(r"another process has held .*\.so\.lock for 0\.5 s to build them; end that process", error), error
    clone.hold.unlink()
    assert builder.communicate(timeout=120)[0] == f"{build.usable_levels()[-1]}\n"


def test_threads_that_load_it_together_share_one_library() -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
from tightwire.kernels.cpu.library import lib, level
with ThreadPoolExecutor(8) as pool:
    assert len({f.result() for f in [pool.submit(level) for _ in range(64)]}) == 1
"""
    done = _run(code)
    assert done.returncode == 0, done.stderr
