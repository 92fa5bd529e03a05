import resource
import subprocess
import sys

import pytest

from tightwire.kernels import allocator

_COUNT_FAULTS = """
import resource, sys
import torch
from tightwire.kernels.allocator import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit("no glibc")
def step():
    held = [torch.ones(16 << 20, dtype=torch.uint8) for _ in range(3)]  # all freed at the end
for _ in range(20):
    step()  # the heap grows until every aligned tensor finds a gap of its size
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", _COUNT_FAULTS, mode], capture_output=True, text=True, check=False)
    if "no glibc" in done.stderr:
        pytest.skip("the C library is not glibc")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_freed_memory_comes_back_without_page_faults() -> None:
    pages_of_one_tensor = (16 << 20) // resource.getpagesize()

    assert _faults("keep") < pages_of_one_tensor  # of the twelve tensors that are made


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda _: object())

    assert allocator.keep_freed_memory() is False
