"""Triton kernels on CPU tensors: processes of the test harness that import Triton as its interpreter.

Triton decides when it is imported, so what runs here must import kernels inside its functions, and never in a process that
has imported Triton already. ``needs_triton`` skips a module's tests, with the reason, where Triton is not installed.
"""

import os
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing import forkserver
from typing import Any

import pytest
from harness import Ranks, run_ranks

from tightwire.comm.group.group import Group

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton is not installed (python -m pip install 'tightwire[cuda]')"
)


def run_interpreted(world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """``run_ranks`` with Triton as its interpreter in every rank. ``fn`` is a function of a test module."""
    _stop_fork_server()
    return run_ranks(world_size, _call, fn, *args, timeout_s=timeout_s)


class InterpretedRank:
    """One process with Triton as its interpreter, kept from call to call until closed or until a call fails."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        """``fn(group, *args)``, a function of a test module, in that process."""
        if self._ranks is None:
            _stop_fork_server()
            self._ranks = Ranks(1)
        try:
            (result,) = self._ranks.run(_call, fn, *args, timeout_s=120.0)
        except BaseException:
            self.close()
            raise
        return result

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


def _stop_fork_server() -> None:
    """A fork server that another test started may have imported Triton; the next one starts with the harness's imports."""
    forkserver._forkserver._stop()  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]


def _call(group: Group, fn: Callable[..., Any], *args: Any) -> Any:
    interpret()
    return fn(group, *args)


def interpret() -> None:
    """From here on, in this process."""
    os.environ["TRITON_INTERPRET"] = "1"
    # The interpreter computes in NumPy, which warns of infinities that the kernels handle.
    warnings.filterwarnings("ignore", category=RuntimeWarning)
