"""Freed memory that is used again: counted in page faults, in a process of its own."""

import platform
import subprocess
import sys

import pytest

_PROGRAM = """
import resource
import torch
from tightwire.kernels.heap import keep_freed_memory

keep_freed_memory()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        held = torch.empty(8 << 20, dtype=torch.uint8).fill_(1)  # while the one before is still held
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's options")
def test_a_block_of_the_same_size_is_not_mapped_again() -> None:
    run = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    pages_each = (8 << 20) // 4096
    assert int(run.stdout) < pages_each, "fewer faults in 20 uses, after 20, than one use has pages"
