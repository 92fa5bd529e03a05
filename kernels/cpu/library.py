"""Loads the CPU kernels' shared library: ``lib`` has its functions, ``ffi`` its types (native/kernels.h).

The best level that this CPU runs is loaded, or the one that ``TIGHTWIRE_KERNELS`` names (``spec``: none; ``sanitize``: the
best one, built with address and undefined-behavior checks). A library that is missing, or that was built from other sources
than the checkout's, is built first. Without one, ``available()`` is False and callers use the torch reference of
kernels/spec; the log says so once. Imports no torch.
"""

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import cffi
from filelock import AcquireReturnProxy, FileLock, Timeout

from tightwire import native_build

_log = logging.getLogger(__name__)
_loading = threading.Lock()

ffi: Any = cffi.FFI()


def level() -> str:
    """The level in use, such as ``v4-bf16``; ``spec`` when the kernels are torch's reference."""
    return _load()[1]


def available() -> bool:
    """Whether the compiled kernels can be called."""
    return level() != "spec"


@cache
def has_pairs() -> bool:
    """Whether the kernels multiply bfloat16 in pairs, rounding packed weights to it first (AVX512-BF16)."""
    return available() and bool(lib.tw_has_pairs())


class _Library:
    """The functions of the library; the first use loads it."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(_load()[0], name)
        setattr(self, name, function)
        return function


lib: Any = _Library()


@cache
def _load() -> tuple[Any, str]:
    """The library and its level; (None, "spec") if there is none."""
    with _loading:  # two threads may both find the cache empty
        return _load_once()


@cache
def _load_once() -> tuple[Any, str]:
    usable, asked = native_build.usable_levels(), os.environ.get("TIGHTWIRE_KERNELS", "")
    if asked not in ("", "sanitize", "spec", *usable):
        raise ValueError(f"TIGHTWIRE_KERNELS={asked}: this CPU's levels are {', '.join([*usable, 'spec'])}")
    if not usable:
        needs = "x86 needs AVX2, FMA and F16C, ARM v8.2 with fp16"
        _log.warning("this CPU has no compiled kernels (%s); torch computes instead, slowly", needs)
    if asked == "spec" or not usable:
        return None, "spec"
    wanted = asked if asked in usable else usable[-1]
    try:
        return _open(wanted, sanitize=asked == "sanitize"), wanted
    except (OSError, RuntimeError) as error:
        if asked == "sanitize":
            raise
        _log.warning("the CPU kernels cannot be used, so torch computes instead, slowly: %s", error)
        return None, "spec"


def _open(wanted: str, *, sanitize: bool) -> Any:
    path = native_build.library_path(wanted, sanitize=sanitize)
    if native_build.SOURCES.exists() and not _is_current(path):
        try:
            native_build.BUILT.mkdir(exist_ok=True)
        except OSError as error:
            raise RuntimeError(
                f"{path} is missing and cannot be built there ({error}); install Tightwire again"
            ) from error
        with _lock_build(path):
            if not _is_current(path):  # another process may have built it meanwhile
                _log.warning("building the CPU kernels for level %s, about 20 s", wanted)
                native_build.build(wanted, sanitize=sanitize)
    lines = (native_build.SOURCES / "kernels.h").read_text().splitlines()
    ffi.cdef("\n".join(line.replace("TW_API ", "") for line in lines if not line.startswith("#")))
    return ffi.dlopen(str(path))


def _lock_build(path: Path) -> AcquireReturnProxy:
    """Become the only process that builds ``path``. The lock of a process that dies is free at once."""
    lock = FileLock(f"{path}.lock")
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        _log.warning("waiting for another process that builds the CPU kernels, at most %g s", native_build.DEADLINE_S)
    try:
        return lock.acquire(timeout=native_build.DEADLINE_S, poll_interval=0.1)
    except Timeout as error:
        raise RuntimeError(
            f"another process has held {lock.lock_file} for {native_build.DEADLINE_S:g} s to build them; "
            "end that process and start Tightwire again"
        ) from error


def _is_current(path: Path) -> bool:
    return path.exists() and native_build.source_hash().encode() in path.read_bytes()


def struct(name: str, values: Sequence[Any] | Mapping[str, Any]) -> Any:
    """A pointer to a new struct of native/kernels.h, with ``values`` in the order of its fields or by their names."""
    _load()  # declares the types
    return ffi.new(f"{name} *", values)
