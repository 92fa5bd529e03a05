"""Median microseconds of each AllReduce between processes of this host, and how much sooner each is done than gloo's own.

    python bench/scripts/all_reduce.py [--ranks 2,4] [--kib 8,32,128,512,2048,8192] [--dtypes bfloat16,float32]
                                    [--calls 60] [--transports shared-memory,gloo]

Every rank has one thread. ``native`` is gloo's all_reduce whatever the transport: the same processes, the same call of
this library around it. The algorithms take turns in blocks of ten calls in random order, so that what else runs hurts all of
them; every result is checked against the exact sum, outside the time. Prints Markdown tables of rank 0's medians, with the
factor over native in brackets, then one JSON line.
"""

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from harness import run_ranks

from tightwire.comm.all_reduce.registry import make_all_reduce
from tightwire.comm.group.group import Group

_BLOCK_CALLS = 10
_NAMES = ("native", "auto", "one-shot", "two-shot", "ring")


class Cell(NamedTuple):
    """One line of the table: median microseconds by algorithm."""

    ranks: int
    transport: str
    dtype: str
    kib: float
    median_us: dict[str, float]


def measure(
    group: Group, kibs: list[float], dtypes: list[str], num_calls: int
) -> list[tuple[str, float, dict[str, float]]]:
    """Median microseconds by dtype, KiB and algorithm."""
    arms = {name: make_all_reduce(name, group) for name in _NAMES}
    total = sum(range(1, group.world_size + 1))
    rows = []
    for dtype_name in dtypes:
        dtype = getattr(torch, dtype_name)
        for kib in kibs:
            x = torch.full((int(kib * 1024) // dtype.itemsize,), float(group.rank + 1), dtype=dtype)
            seconds: dict[str, list[float]] = {name: [] for name in _NAMES}
            for block in range(-(-num_calls // _BLOCK_CALLS)):
                for name in random.Random(block).sample(_NAMES, len(_NAMES)):  # on all ranks alike
                    group.transport.barrier()
                    for call in range(_BLOCK_CALLS + 1):
                        start = time.perf_counter()
                        result = arms[name](x)
                        if call:  # the first one of a block warms up
                            seconds[name].append(time.perf_counter() - start)
                        if not bool((result == total).all()):
                            raise AssertionError(f"{name} sums wrongly at {kib:g} KiB of {dtype_name}")
            rows.append((dtype_name, kib, {name: 1e6 * statistics.median(times) for name, times in seconds.items()}))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--kib", default="8,32,128,512,2048,8192")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--transports", default="shared-memory")
    parser.add_argument("--calls", type=int, default=60)
    given = parser.parse_args()
    kibs, dtypes = [float(kib) for kib in given.kib.split(",")], given.dtypes.split(",")
    cells = []
    sys.stdout.write(
        f"| ranks | transport | dtype | KiB | {' | '.join(_NAMES)} |\n|--:|---|---|--:|{'--:|' * len(_NAMES)}\n"
    )
    for world_size in map(int, given.ranks.split(",")):
        for transport in given.transports.split(","):
            rows = run_ranks(
                world_size,
                measure,
                kibs,
                dtypes,
                given.calls,
                timeout_s=600,
                shared_memory=transport == "shared-memory",
            )[0]
            for dtype, kib, medians in rows:
                cells.append(Cell(world_size, transport, dtype, kib, medians))
                native = medians["native"]
                columns = [f"{native:.0f}", *(f"{medians[n]:.1f} ({native / medians[n]:.1f}x)" for n in _NAMES[1:])]
                sys.stdout.write(f"| {world_size} | {transport} | {dtype} | {kib:g} | {' | '.join(columns)} |\n")
                sys.stdout.flush()
    sys.stdout.write(json.dumps({"benchmark": "all_reduce", "cells": [cell._asdict() for cell in cells]}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
