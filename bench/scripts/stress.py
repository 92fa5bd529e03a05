"""Alternating AllReduces over shared memory until the count is reached: every sum checked, a hang ends in an error.

python bench/scripts/stress.py [--ranks 2,4,8] [--calls 50000] [--seed 0] [--transport shared-memory|gloo]
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from harness import run_ranks
from helpers.comm.stress_calls import alternating_calls


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--calls", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transport", choices=["shared-memory", "gloo"], default="shared-memory")
    given = parser.parse_args()
    for world_size in map(int, given.ranks.split(",")):
        seconds = run_ranks(
            world_size,
            alternating_calls,
            given.calls,
            given.seed,
            timeout_s=max(120.0, given.calls * world_size * 0.01),
            shared_memory=given.transport == "shared-memory",
        )
        sys.stdout.write(f"{world_size} ranks: {given.calls} calls, {1e6 * seconds[0] / given.calls:.0f} us each\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
