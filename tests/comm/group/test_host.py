"""Cores and memory, as the kernel's files state them."""

import os
from pathlib import Path

import pytest

from tightwire.comm.group import host

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 8 GiB available and no control groups."""
    write(tmp_path, "proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n")
    return tmp_path


def write(root: Path, path: str, text: object) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(f"{text}\n")


def test_without_control_groups_the_kernel_says_it(root: Path) -> None:
    assert host.available_host_bytes(root) == 8 * GIB
    assert host.num_cores(root) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("limited", ["sys/fs/cgroup/a/b", "sys/fs/cgroup/a", "sys/fs/cgroup"])
def test_a_limit_of_version_2_holds_on_any_parent(root: Path, limited: str) -> None:
    write(root, "proc/self/cgroup", "0::/a/b")
    write(root, "sys/fs/cgroup/a/b/memory.max", "max")
    write(root, f"{limited}/memory.max", 3 * GIB)
    write(root, f"{limited}/memory.current", 2 * GIB)
    write(root, f"{limited}/memory.stat", f"anon 5\ninactive_file {GIB}")
    assert host.available_host_bytes(root) == 2 * GIB


def test_a_limit_of_version_1_in_a_container_that_sees_only_the_mount(root: Path) -> None:
    write(root, "proc/self/cgroup", "4:memory:/docker/abc\n1:name=systemd:/docker/abc")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", 2 * GIB)
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", GIB)
    write(root, "sys/fs/cgroup/memory/memory.stat", "total_inactive_file 0")
    assert host.available_host_bytes(root) == GIB


def test_a_full_container_has_nothing_left(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/")
    write(root, "sys/fs/cgroup/memory.max", GIB)
    write(root, "sys/fs/cgroup/memory.current", 2 * GIB)
    write(root, "sys/fs/cgroup/memory.stat", "inactive_file 0")
    assert host.available_host_bytes(root) == 0


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", None), ("100000 100000", 1), ("20000 100000", 1)])
def test_a_quota_of_version_2_limits_the_cores(root: Path, quota: str, cores: int | None) -> None:
    write(root, "proc/self/cgroup", "0::/a")
    write(root, "sys/fs/cgroup/a/cpu.max", quota)
    assert host.num_cores(root) == (cores or len(os.sched_getaffinity(0)))


def test_a_quota_of_version_1_limits_the_cores(root: Path) -> None:
    write(root, "proc/self/cgroup", "1:cpu,cpuacct:/a")
    write(root, "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", 100_000)
    write(root, "sys/fs/cgroup/cpu/a/cpu.cfs_period_us", 100_000)
    assert host.num_cores(root) == 1


@pytest.mark.parametrize(
    ("num_ranks", "shares"),
    [
        (1, [(4, 0, 5, 1, 6)]),
        (2, [(4, 0), (5, 1)]),
        (5, [(4,), (0,), (5,), (1,), (6,)]),
        (6, [()] * 6),
    ],
)
def test_shares_are_equal_and_of_neighbours(num_ranks: int, shares: list[tuple[int, ...]]) -> None:
    assert host.deal([4, 0, 5, 1, 6], num_ranks) == shares


def test_threads_of_one_core_are_neighbours(tmp_path: Path) -> None:
    for core, (package, physical) in enumerate([(0, 0), (0, 1), (1, 0), (0, 0), (0, 1)]):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "core_id").write_text(f"{physical}\n")
    assert sorted(range(5), key=lambda core: host.core_order(core, tmp_path)) == [0, 3, 1, 4, 2]
    assert host.core_order(9, tmp_path) == (0, 0, 9)


def test_this_machine_has_memory() -> None:
    assert host.available_host_bytes() > 1 << 20
