"""What the kernel says of this machine's cores is taken as it is; binding is done in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tightwire.server.ranks import cores

_SOURCE = Path(cores.__file__).parents[2] / "src"


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
    assert cores.deal([4, 0, 5, 1, 6], num_ranks) == shares


def test_threads_of_one_core_are_neighbours(tmp_path: Path) -> None:
    for core, (package, physical) in enumerate([(0, 0), (0, 1), (1, 0), (0, 0), (0, 1)]):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "core_id").write_text(f"{physical}\n")
    assert sorted(range(5), key=lambda core: cores._place(core, tmp_path)) == [0, 3, 1, 4, 2]
    assert cores._place(9, tmp_path) == (0, 0, 9)


def _bound(rank: int, num_ranks: int, num_threads: int) -> tuple[list[int], list[int]]:
    """The share that a new process gets, and where its next thread may run."""
    code = (
        "import json, os, threading\n"
        "from tightwire.server.ranks.cores import bind_to_cores\n"
        f"share, seen = bind_to_cores({rank}, {num_ranks}, {num_threads}), []\n"
        "thread = threading.Thread(target=lambda: seen.extend(os.sched_getaffinity(0)))\n"
        "thread.start()\n"
        "thread.join()\n"
        "print(json.dumps([share, sorted(seen)]))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(_SOURCE)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    share, seen = json.loads(done.stdout)
    return share, seen


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_ranks_keep_to_cores_of_their_own() -> None:
    everywhere = sorted(os.sched_getaffinity(0))
    (first, first_seen), (second, second_seen) = _bound(0, 2, 1), _bound(1, 2, 1)
    assert first and second and not set(first) & set(second)
    assert (sorted(first), sorted(second)) == (first_seen, second_seen)
    for nothing in (_bound(0, 1, 1), _bound(0, len(everywhere) + 1, 1), _bound(0, 2, len(everywhere))):
        assert nothing == ([], everywhere)
