"""Median microseconds of each AllReduce between processes of this host, by message size and transport.

    python benchmarks/all_reduce.py [--ranks 2,3,4] [--calls 50]

Every rank has one thread. The algorithms take turns call by call, so that what else runs hurts all of them; every
result is checked against the exact sum. Prints Markdown tables.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from harness import run_ranks

from tightwire.comm.group import Group
from tightwire.comm.registry import make_all_reduce

_KIB = (1.125, 18, 72, 288, 576, 2304)  # SmolLM2: a token is 1.125 KiB, a prompt of 512 tokens 576
_NAMES = ("native", "one-shot", "two-shot", "ring")


def measure(group: Group, num_calls: int) -> dict[float, dict[str, float]]:
    """Median seconds by KiB and algorithm."""
    arms = {name: make_all_reduce(name, group) for name in _NAMES}
    medians: dict[float, dict[str, float]] = {}
    for kib in _KIB:
        x = torch.full((int(kib * 512),), float(group.rank + 1), dtype=torch.bfloat16)
        total = sum(range(1, group.world_size + 1))
        seconds: dict[str, list[float]] = {name: [] for name in _NAMES}
        for _ in range(num_calls):
            for name, all_reduce in arms.items():
                start = time.perf_counter()
                result = all_reduce(x)
                seconds[name].append(time.perf_counter() - start)
                assert bool((result == total).all()), f"{name} sums wrongly at {kib} KiB"
        medians[kib] = {name: statistics.median(times) for name, times in seconds.items()}
    return medians


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,3,4")
    parser.add_argument("--calls", type=int, default=50)
    given = parser.parse_args()
    sys.stdout.write(f"| ranks | transport | KiB | {' | '.join(_NAMES)} |\n|--:|---|--:|{'--:|' * len(_NAMES)}\n")
    for world_size in map(int, given.ranks.split(",")):
        for shared_memory in (False, True):
            medians = run_ranks(world_size, measure, given.calls, timeout_s=300, shared_memory=shared_memory)[0]
            for kib, row in medians.items():
                cells = " | ".join(f"{row[name] * 1e6:.0f}" for name in _NAMES)
                transport = "shared memory" if shared_memory else "gloo"
                sys.stdout.write(f"| {world_size} | {transport} | {kib:g} | {cells} |\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
