"""Microseconds of ``kernels.linear`` against ``F.linear`` by number of rows, on one thread, weights out of cache.

    python benchmarks/linear.py [--outputs 3072] [--inputs 576]

Each call takes the next of so many weight matrices that none is still cached when its turn comes again. The two take
turns; minima over the rounds. Prints a Markdown table.
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tightwire.kernels.linear import linear

_ROWS = (1, 4, 16, 64, 512)
_OUT_OF_CACHE_BYTES = 256 << 20
_ROUNDS = 20


def measure(num_outputs: int, num_inputs: int, num_rows: int, dtype: torch.dtype) -> dict[str, float]:
    """Least seconds of either."""
    num_weights = 1 + _OUT_OF_CACHE_BYTES // (num_outputs * num_inputs * dtype.itemsize)
    weights = [torch.randn(num_outputs, num_inputs).to(dtype) for _ in range(min(num_weights, 2 * _ROUNDS))]
    x = torch.randn(num_rows, num_inputs).to(dtype)
    arms: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"ours": linear, "torch": F.linear}
    best = dict.fromkeys(arms, float("inf"))
    for turn in range(_ROUNDS):
        for offset, (name, product) in enumerate(arms.items()):
            weight = weights[(2 * turn + offset) % len(weights)]
            start = time.perf_counter()
            product(x, weight)
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outputs", type=int, default=3072)
    parser.add_argument("--inputs", type=int, default=576)
    given = parser.parse_args()
    torch.set_num_threads(1)
    sys.stdout.write(
        "| rows | bfloat16 ours | bfloat16 torch | float32 ours | float32 torch |\n|--:|--:|--:|--:|--:|\n"
    )
    for num_rows in _ROWS:
        times = [measure(given.outputs, given.inputs, num_rows, dtype) for dtype in (torch.bfloat16, torch.float32)]
        cells = " | ".join(f"{arm[name] * 1e6:.0f}" for arm in times for name in ("ours", "torch"))
        sys.stdout.write(f"| {num_rows} | {cells} |\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
