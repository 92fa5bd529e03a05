"""A library in place of NVIDIA's libcuda, to which Triton's own launchers give what a GPU would be given.

They are C that is compiled when it is first needed; so this needs what a GPU needs too: a C compiler and Python.h.
"""

import ctypes
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tightwire.cuda_devices import why_no_launch

needs_launchers = pytest.mark.skipif(bool(why_no_launch()), reason=why_no_launch())
Run = Callable[[int, Sequence[int]], None]  # takes the number of programs and the addresses of a kernel's parameters
_CALLED = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(ctypes.c_void_p))
_SOURCE = """
int (*called)(unsigned *grid, void **parameters);
int cuLaunchKernelEx(unsigned *grid, void *function, void **given, void **more) { return called(grid, given); }
int cuPointerGetAttribute(unsigned long long *found, int kind, unsigned long long given) { *found = given; return 0; }
"""


class Launchers:
    """Triton's launchers of this process, and the library that they call."""

    def __init__(self) -> None:
        from triton import knobs
        from triton.backends.nvidia import driver

        Path(knobs.cache.dir).mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="libcuda-", dir=knobs.cache.dir))
        source, self._library = folder / "libcuda.c", folder / "libcuda.so.1"
        used = set(re.findall(r"\bcu[A-Z]\w+(?=\()", Path(driver.__file__).with_name("driver.c").read_text()))
        others = [f"int {name}(void) {{ return 0; }}\n" for name in used if name not in _SOURCE]
        source.write_text(_SOURCE + "".join(others))
        _compile(source, self._library)
        self._run: Run = lambda num_programs, parameters: None
        self._error: BaseException | None = None
        self._call = _CALLED(self._checked)  # C keeps its address
        address = ctypes.cast(self._call, ctypes.c_void_p)
        ctypes.c_void_p.in_dll(ctypes.CDLL(str(self._library)), "called").value = address.value
        knobs.nvidia.libcuda_path, knobs.build.impl = str(folder), self._build
        self.utils, self.launcher = driver.CudaUtils(), driver.CudaLauncher

    def launch(self, launcher: Any, run: Run, arguments: Sequence[Any]) -> None:
        """Call ``launcher`` with what a compiled kernel gives it; ``run`` takes the kernel's place. Raises what ``run`` raises."""
        self._run, self._error = run, None
        launcher(*arguments)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _checked(self, grid: Any, parameters: Any) -> int:
        try:
            self._run(grid[0], parameters)
        except BaseException as error:  # noqa: BLE001  C cannot pass it on
            self._error = error
        return 0

    def _build(self, name: str, source: str, folder: str, _: object, include: Sequence[str], *more: object) -> str:
        """Compile a launcher, which must not find the real library where a machine has it."""
        path = Path(folder, f"{name}-changed.c")
        path.write_text(Path(source).read_text().replace('"libcuda.so.1"', f'"{self._library}"'))
        folders = [f"-I{each}" for each in (*include, sysconfig.get_config_var("INCLUDEPY"))]
        return _compile(path, Path(folder, f"{name}.so"), *folders, str(self._library))


@cache
def launchers() -> Launchers:
    """Those of this process."""
    return Launchers()


def _compile(source: Path, made: Path, *more: str) -> str:
    compiler = os.environ.get("CC") or shutil.which("gcc") or "clang"
    subprocess.run([compiler, "-shared", "-fPIC", "-w", str(source), *more, "-o", str(made)], check=True)
    return str(made)
