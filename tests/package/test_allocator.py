import resource
import subprocess
import sys

import pytest

from tightwire import allocator

_PIECE_BYTES, _PIECES, _ROUNDS = 20 << 20, 3, 4

_USE_AND_FREE = f"""
import ctypes, resource, sys
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.memset.argtypes, libc.free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p]
def use_and_free():
    pieces = [libc.malloc({_PIECE_BYTES}) for _ in range({_PIECES})]
    for piece in pieces:
        libc.memset(piece, 1, {_PIECE_BYTES})
    for piece in pieces:
        libc.free(piece)
"""
_COUNT_FAULTS = f"""
{_USE_AND_FREE}
from tightwire.allocator import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit("no glibc")
for _ in range(3):
    use_and_free()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({_ROUNDS}):
    use_and_free()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", _COUNT_FAULTS, mode], capture_output=True, text=True, check=False)
    if "no glibc" in done.stderr:
        pytest.skip("the C library is not glibc")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_freed_memory_comes_back_without_page_faults() -> None:
    pages_of_a_piece = _PIECE_BYTES // resource.getpagesize()

    assert _faults("keep") < pages_of_a_piece
    # Otherwise, as nothing lies above them, they go back to the system in every round, but for the last pages.
    assert _faults("default") > _ROUNDS * (_PIECES - 1) * pages_of_a_piece


_HELD_AFTER_FREEING = f"""
{_USE_AND_FREE}
from pathlib import Path
from tightwire.allocator import keep_freed_memory, return_freed_memory
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * {resource.getpagesize()}
if not keep_freed_memory():
    sys.exit("no glibc")
before = resident()
use_and_free()
kept = resident() - before
return_freed_memory()
given_back = resident() - before
use_and_free()
print(kept, given_back, resident() - before)
"""


def test_freed_memory_goes_back_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _HELD_AFTER_FREEING], capture_output=True, text=True, check=False, timeout=60
    )
    if "no glibc" in done.stderr:
        pytest.skip("the C library is not glibc")
    assert done.returncode == 0, done.stderr
    kept, given_back, freed_again = map(int, done.stdout.split())

    assert kept > 0.9 * _PIECES * _PIECE_BYTES
    assert given_back < _PIECE_BYTES / 10
    assert freed_again < _PIECE_BYTES / 10


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda _: object())

    assert allocator.keep_freed_memory() is False
    assert allocator.return_freed_memory() is False
