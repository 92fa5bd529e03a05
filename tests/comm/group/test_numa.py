"""NUMA nodes from a made sysfs; binding in processes of their own, on the node that there is."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tightwire.comm.group import numa
from tightwire.comm.group.numa import NumaNode, describe_numbers, describe_placement, place_ranks, read_numa_nodes

_SOURCE = Path(numa.__file__).parents[3]
GIB = 1 << 30


def make_nodes(root: Path, cores: Sequence[str]) -> None:
    for number, cpulist in enumerate(cores):
        folder = root / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpulist}\n")
        (folder / "distance").write_text(" ".join("10" if number == other else "21" for other in range(len(cores))))
        prefix = f"Node {number}"
        (folder / "meminfo").write_text(
            f"{prefix} MemTotal: 9437184 kB\n{prefix} MemFree: 1048576 kB\n{prefix} Inactive(file): 1048576 kB\n"
        )


def two_nodes(free_bytes: int = 8 * GIB) -> list[NumaNode]:
    return [
        NumaNode(number=n, cores=tuple(range(8 * n, 8 * n + 8)), free_bytes=free_bytes, distances=(10, 21))
        for n in range(2)
    ]


def test_nodes_hold_the_cores_that_this_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_nodes(tmp_path, ["0-1,4-5", "2-3,6-7", ""])  # the third has memory only
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 3, 4})
    first, second = read_numa_nodes(tmp_path)
    assert (first.number, first.cores, first.free_bytes) == (0, (0, 1, 4), 2 * GIB)
    assert (second.number, second.cores, second.distances) == (1, (3,), (21, 10, 21))


def test_a_kernel_that_reports_no_nodes_has_none(tmp_path: Path) -> None:
    assert read_numa_nodes(tmp_path) == ()


@pytest.mark.parametrize("num_ranks", [2, 4, 16])
def test_ranks_share_the_cores_of_one_node(num_ranks: int) -> None:
    places = place_ranks(num_ranks, two_nodes())
    assert places is not None
    for rank, (cores, nodes) in enumerate(places):
        assert nodes == (2 * rank // num_ranks,)
        assert len(cores) == 16 // num_ranks and all(core // 8 == nodes[0] for core in cores)
    assert len({core for cores, _ in places for core in cores}) == 16


def test_one_rank_takes_turns_between_all_nodes() -> None:
    assert place_ranks(1, two_nodes()) == [(tuple(range(16)), (0, 1))]


def test_three_ranks_do_not_divide_over_two_nodes() -> None:
    assert place_ranks(3, two_nodes()) is None
    assert describe_placement(3, two_nodes(), [1, 1, 1]).startswith(
        "warning: 3 ranks cannot be divided over the 2 NUMA"
    )


def test_the_line_says_where_ranks_run_and_what_does_not_fit() -> None:
    assert describe_placement(2, two_nodes()[:1], [1, 1]) == ""
    line = "memory and threads by NUMA node: rank 0 on node 0, rank 1 on node 1"
    assert describe_placement(2, two_nodes(), [GIB, GIB]) == line
    over = describe_placement(2, two_nodes(GIB), [2 * GIB, GIB])
    assert over == f"warning: {line}; too little is free on 0: the rest comes from another node"
    assert "rank 0 on nodes 0 and 1" in describe_placement(1, two_nodes(GIB), [2 * GIB])


def test_numbers_are_written_as_the_kernel_does() -> None:
    assert describe_numbers([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def _run(code: str) -> object:
    env = {**os.environ, "PYTHONPATH": str(_SOURCE)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    return json.loads(done.stdout)


def _bound(rank: int, num_ranks: int, num_threads: int) -> object:
    """The cores that a new process gets, and where its next thread may run."""
    return _run(
        "import json, os, threading\n"
        "from tightwire.comm.group.numa import bind_rank\n"
        f"place, seen = bind_rank({rank}, {num_ranks}, {num_threads}, numa=True), []\n"
        "thread = threading.Thread(target=lambda: seen.extend(os.sched_getaffinity(0)))\n"
        "thread.start()\n"
        "thread.join()\n"
        "print(json.dumps([place.cores, sorted(seen)]))\n"
    )


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_ranks_keep_to_cores_of_their_own() -> None:
    everywhere = sorted(os.sched_getaffinity(0))
    (first, first_seen), (second, second_seen) = _bound(0, 2, 1), _bound(1, 2, 1)  # type: ignore[misc]
    assert first and second and not set(first) & set(second)
    assert (sorted(first), sorted(second)) == (first_seen, second_seen)
    for nothing in (_bound(0, 1, 1), _bound(0, len(everywhere) + 1, 1), _bound(0, 2, len(everywhere))):
        assert nothing == [[], everywhere]


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="a kernel without NUMA")
@pytest.mark.parametrize(("nodes", "policy"), [((0,), "prefer:0"), ((0, 0), "interleave:0")])
def test_pages_written_later_follow_the_policy_also_in_other_threads(nodes: tuple[int, ...], policy: str) -> None:
    pages = _run(
        "import ctypes, json, mmap, threading\n"
        "from tightwire.comm.group import numa\n"
        f"agreed, found = numa._set_memory_policy({nodes}), []\n"
        "def write():\n"
        "    memory = mmap.mmap(-1, 1 << 24)\n"
        "    memory.write(b'x' * (1 << 24))\n"
        "    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))\n"
        "    lines = open('/proc/thread-self/numa_maps').read().splitlines()\n"
        "    found.extend(line for line in lines if int(line.split()[0], 16) == start)\n"
        "thread = threading.Thread(target=write)\n"
        "thread.start()\n"
        "thread.join()\n"
        "print(json.dumps([agreed, found]))\n"
    )
    agreed, found = pages  # type: ignore[misc]
    assert agreed
    assert len(found) == 1 and found[0].split()[1] == policy and "N0=4096" in found[0]
