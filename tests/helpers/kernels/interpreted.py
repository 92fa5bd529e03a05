"""Triton kernels on CPU tensors: processes of the test harness that import Triton as its interpreter.

Triton decides when it is imported, so what runs here must import kernels inside its functions, and never in a process that
has imported Triton already. ``needs_triton`` skips a module's tests, with the reason, where Triton is not installed.
"""

import os
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from harness import Ranks
from helpers.kernels.program_order import permute_interpreted_programs
from helpers.kernels.quick_interpreter import quicken_interpreter

from tightwire.comm.group.group import Group

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton is not installed (python -m pip install triton)"
)


class InterpretedRanks:
    """Processes with Triton as their interpreter, kept from call to call until closed or until a call fails."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._ranks: Ranks | None = None

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """``fn(group, *args)``, a function of a test module, in each process; results in rank order."""
        if self._ranks is None:
            _stop_fork_server()
            self._ranks = Ranks(self._world_size)
        try:
            return self._ranks.run(_call, fn, *args, timeout_s=120.0)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


class InterpretedRank(InterpretedRanks):
    """One such process."""

    def __init__(self) -> None:
        super().__init__(1)

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        """``fn(group, *args)``, a function of a test module, in that process."""
        (result,) = self.run(fn, *args)
        return result


def _stop_fork_server() -> None:
    """If it has imported Triton, as one that another test started may have; the next one starts with the harness's imports."""
    server: Any = forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]
    if server._forkserver_pid is not None and "libtriton" in Path(f"/proc/{server._forkserver_pid}/maps").read_text():
        server._stop()


_prepared = False


def _call(group: Group, fn: Callable[..., Any], *args: Any) -> Any:
    global _prepared
    os.environ["TRITON_INTERPRET"] = "1"
    # The interpreter computes in NumPy, which warns of infinities that the kernels handle.
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    if not _prepared:
        permute_interpreted_programs()
        quicken_interpreter()
        _prepared = True
    return fn(group, *args)
