"""Microseconds of ``kernels.linear`` by number of rows, on one thread, weights out of cache, plain ones against ``F.linear``.

    python bench/scripts/linear.py [--outputs 3072] [--inputs 576]

Each call takes the next of so many weight matrices that none is still cached when its turn comes again. Those that are
compared take turns; minima over the rounds. Packed weights are multiplied with bfloat16 rows. Prints a Markdown table, and
the rate at which a single row reads its weights.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tightwire.kernels.linear import linear
from tightwire.kernels.spec.packed import Matrix, quantize
from tightwire.kernels.spec.packed_format import PACKED_FORMATS

_ROWS = (1, 2, 4, 16, 64, 512)
_OUT_OF_CACHE_BYTES = 256 << 20
_ROUNDS = 20

Product = Callable[[Tensor, Matrix], Tensor]


def measure(arms: Mapping[str, Product], x: Tensor, make_weight: Callable[[], Matrix]) -> dict[str, float]:
    """Least seconds of each arm."""
    first = make_weight()
    num_weights = min(1 + _OUT_OF_CACHE_BYTES // first.nbytes, len(arms) * _ROUNDS)
    weights = [first, *(make_weight() for _ in range(num_weights - 1))]
    best = dict.fromkeys(arms, float("inf"))
    for turn in range(_ROUNDS):
        for offset, (name, product) in enumerate(arms.items()):
            weight = weights[(len(arms) * turn + offset) % num_weights]
            start = time.perf_counter()
            product(x, weight)
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def measure_all(num_outputs: int, num_inputs: int, num_rows: int) -> dict[str, tuple[float, int]]:
    """Least seconds and bytes of the weights, by column of the table."""
    found: dict[str, tuple[float, int]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        x, name = torch.randn(num_rows, num_inputs).to(dtype), str(dtype).removeprefix("torch.")
        arms: dict[str, Product] = {f"{name} ours": linear, f"{name} torch": F.linear}
        best = measure(arms, x, lambda dtype=dtype: torch.randn(num_outputs, num_inputs).to(dtype))
        found |= {arm: (seconds, num_outputs * num_inputs * dtype.itemsize) for arm, seconds in best.items()}
    x = torch.randn(num_rows, num_inputs).bfloat16()
    for packed in PACKED_FORMATS.values():
        best = measure(
            {packed.name: linear}, x, lambda packed=packed: quantize(torch.randn(num_outputs, num_inputs), packed)
        )
        found[packed.name] = best[packed.name], num_outputs * packed.row_bytes(num_inputs)
    return found


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outputs", type=int, default=3072)
    parser.add_argument("--inputs", type=int, default=576, help="a multiple of 32")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rates = ""
    for num_rows in _ROWS:
        found = measure_all(given.outputs, given.inputs, num_rows)
        if num_rows == _ROWS[0]:
            sys.stdout.write(_row(["rows", *found]) + _row(["--:"] * (1 + len(found))))
            rates = ", ".join(f"{name} {size / seconds / 1e9:.1f}" for name, (seconds, size) in found.items())
        sys.stdout.write(_row([str(num_rows), *(f"{seconds * 1e6:.0f}" for seconds, _ in found.values())]))
        sys.stdout.flush()
    sys.stdout.write(f"\nGB/s of weights at {_ROWS[0]} row: {rates}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
