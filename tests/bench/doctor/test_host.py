"""Facts of the host, read from a tree of files like the kernel's."""

import os
from pathlib import Path

import pytest

from tightwire.bench.doctor.host import read_host

MEMINFO = "MemTotal:  2048 kB\nMemFree: 9 kB\nMemAvailable:  1024 kB"


def write(root: Path, **files: str) -> Path:
    """Files of a tree; ``__`` in a name stands for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_an_empty_tree(tmp_path: Path) -> None:
    host = read_host(write(tmp_path, proc__meminfo=MEMINFO))
    assert (host.total_bytes, host.available_bytes, host.shm_bytes) == (2 << 20, 1 << 20, None)
    assert host.numa_nodes == []
    assert 1 <= host.num_usable <= host.num_allowed
    assert {"tightwire", "python", "torch"} <= host.software.keys()


def test_numa_nodes_and_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    write(tmp_path, proc__meminfo=MEMINFO)
    for number, cpus in ((10, "20-21"), (2, "4-5,36-37")):
        write(tmp_path / f"sys/devices/system/node/node{number}", cpulist=cpus)
    (tmp_path / "dev/shm").mkdir(parents=True)
    host = read_host(tmp_path)
    assert host.numa_nodes == [
        "2: cores 4-5,36-37, 0B free, distances ",
        "10: cores 20-21, 0B free, distances ",
    ]
    assert (host.shm_bytes or 0) > 0
