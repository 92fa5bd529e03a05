"""One process at a time compiles a kernel; one that waits too long compiles it too."""

import fcntl
from pathlib import Path

import pytest

from tightwire.kernels.cpu.vector import jit


def test_a_turn_ends_with_its_holder(tmp_path: Path) -> None:
    lock = tmp_path / "kernel.lock"
    with jit._turn(lock), lock.open("rb") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with lock.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_hanging_holder_does_not_block_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_TURN_S", 0.1)
    lock = tmp_path / "kernel.lock"
    went_on = False
    with lock.open("wb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with jit._turn(lock):
            went_on = True
    assert went_on
