"""Compiles CPU kernels with numba, without the GIL, and caches them on disk.

A kernel takes integers and floats only (addresses, sizes, strides), so it has one specialization, its call costs well
under a microsecond of dispatch, and the first start on a machine compiles each kernel once.
"""

import logging
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def require_numba() -> None:
    """Raise unless numba can be imported and compile for this CPU; the CPU kernels cannot do without it.

    Raises:
        RuntimeError: numba is missing, or is installed and fails to import (a NumPy it does not know, say), or the CPU
            is an x86 older than 2013, for which LLVM would call conversion routines that are not there and abort.
    """
    try:
        import numba  # noqa: F401
        from llvmlite.binding import get_host_cpu_features
    except ImportError as error:
        raise RuntimeError(
            f"the CPU kernels need numba, which cannot be imported here ({error}); "
            "install it with: python -m pip install 'numba>=0.61'"
        ) from error
    features = get_host_cpu_features() if platform.machine() in ("x86_64", "AMD64") else {"fma": True, "f16c": True}
    missing = [name for name in ("fma", "f16c") if not features.get(name)]
    if missing:
        raise RuntimeError(f"this CPU lacks {' and '.join(missing)}; the CPU kernels need an x86 with both, or ARM")


require_numba()

import numba
from filelock import FileLock, Timeout
from numba.core.compiler_lock import global_compiler_lock

# Longer than any kernel takes to compile on a busy laptop; then another process is taken for stuck.
_TURN_S = 60.0
_POLL_S = 0.02

_log = logging.getLogger(__name__)


def helper(function: Callable[..., Any]) -> Any:
    """Compile a function that kernels call; it becomes part of each of them."""
    return numba.njit(nogil=True, error_model="numpy", forceinline=True)(function)


def routine(function: Callable[..., Any]) -> Any:
    """Compile a function that kernels call and that stays one: for large ones, of which LLVM then sees one at a time."""
    return numba.njit(nogil=True, error_model="numpy")(function)


def kernel(function: Callable[..., Any]) -> Any:
    """Compile an entry point at its first call and cache the machine code.

    The cache lies beside the source, or in the user's cache folder when that is read-only; with neither, the kernel is
    compiled anew at each start, and the log says so. numba never contracts or reorders float operations unless told
    to, and it is not told: equal inputs give equal bits.
    """
    dispatcher: Any = numba.njit(nogil=True, error_model="numpy")(function)
    try:
        dispatcher.enable_caching()
    except RuntimeError as error:
        _log.warning("kernel %s is compiled at every start: %s", function.__name__, error)
        return dispatcher
    # numba looks at the age of the kernel's own file alone; a changed helper in a neighbour must count as well.
    cache_file = dispatcher._cache._cache_file
    cache_file._source_stamp = (cache_file._source_stamp, _sources_stamp())
    _compile_in_turn(dispatcher, Path(cache_file._cache_path) / f"{cache_file._index_name}.lock")
    return dispatcher


def _compile_in_turn(dispatcher: Any, lock: Path) -> None:
    """Let one process at a time compile this kernel: ranks that start together find in the cache what the first made."""
    compile_or_load = dispatcher.compile

    def compile_in_turn(signature: Any) -> Any:
        # numba's own lock first: threads of one process must not meet at the file.
        with global_compiler_lock, _turn(lock):
            return compile_or_load(signature)

    dispatcher.compile = compile_in_turn


@contextmanager
def _turn(lock: Path) -> Iterator[None]:
    """Hold ``lock`` against other processes; after ``_TURN_S`` go on without, because compiling twice does no harm."""
    held = FileLock(lock, timeout=_TURN_S, poll_interval=_POLL_S)
    with suppress(Timeout):
        held.acquire()
    try:
        yield
    finally:
        held.release()


def _sources_stamp() -> tuple[tuple[str, int, int], ...]:
    """Path, age and size of every source file that CPU kernels are made of."""
    kernels = Path(__file__).parents[2]
    files = [file for file in kernels.rglob("*.py") if "cuda" not in file.parts]
    return tuple(
        sorted((str(file.relative_to(kernels)), file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    )
