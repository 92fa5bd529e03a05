"""GB/s of bfloat16 numbers through each codec on one core, beside the torch reference and what memory allows.

    python bench/scripts/codec.py [--codecs int8,int4,...] [--elems 65536,16777216] [--rounds 200]

For every size and codec: encode, decode to bfloat16, decode and add to float32, and the step in the middle of a
quantized AllReduce: add two messages and encode the sum. A rate counts two bytes for each number, whatever the codec
makes of them, from the least time of many calls. The limits of memory are torch's copy of bfloat16 and its addition of
float32 to float32, measured before and after the codecs. A result that differs from the reference's is an error. Prints
Markdown tables, then one JSON line.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable

import numba
import torch
from torch import Tensor

from tightwire.bench.report.quiet import OthersWatch
from tightwire.comm.codec.codec import parse_codec
from tightwire.kernels import block_quant
from tightwire.kernels.spec import block_quant as reference
from tightwire.kernels.spec.block_format import BlockFormat

_CODECS = "int8,int6,int5,int4,int3,int2,int8-g32,int4-g32,int8-sym,int4-had,int4-g64-sr,fp8"
_OPERATIONS = ("encode", "decode", "decode-add", "reduce-encode")
_BYTES = 2  # that a number counts
_REFERENCE_ROUNDS = 2

Arm = Callable[[], object]
Pair = tuple[float, float]  # ours, the reference


def arms(fmt: BlockFormat, x_N: Tensor) -> dict[str, tuple[Arm, Arm]]:
    """By operation: ours, the reference; memory is made beforehand for ours, as in an AllReduce."""
    num_elems, dtype = x_N.numel(), x_N.dtype
    buf, again = block_quant.encode(x_N, fmt), torch.empty(fmt.encoded_bytes(num_elems), dtype=torch.uint8)
    back, sum_N = torch.empty_like(x_N), torch.zeros(num_elems)
    return {
        "encode": (
            lambda: block_quant.encode(x_N, fmt, again),
            lambda: reference.encode_reference(x_N, fmt),
        ),
        "decode": (
            lambda: block_quant.decode(buf, fmt, num_elems, dtype, back),
            lambda: reference.decode_reference(buf, fmt, num_elems, dtype),
        ),
        "decode-add": (
            lambda: block_quant.decode_add(buf, fmt, sum_N),
            lambda: reference.decode_add_reference(buf, fmt, sum_N),
        ),
        "reduce-encode": (
            lambda: block_quant.decode_reduce_encode([buf, buf], fmt, fmt, num_elems, again),
            lambda: reference.decode_reduce_encode_reference([buf, buf], fmt, fmt, num_elems),
        ),
    }


def limits(x_N: Tensor) -> dict[str, Arm]:
    copy_N, sum_N, term_N = torch.empty_like(x_N), torch.zeros(x_N.numel()), torch.ones(x_N.numel())
    return {"copy bfloat16": lambda: copy_N.copy_(x_N), "add float32": lambda: sum_N.add_(term_N)}


def least_seconds(arm: Arm, rounds: int) -> float:
    arm()
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        arm()
        best = min(best, time.perf_counter() - start)
    return best


def check(name: str, fmt: BlockFormat, x_N: Tensor) -> None:
    """A wrong answer is no result, however fast."""
    want = reference.encode_reference(x_N, fmt)
    if not torch.equal(block_quant.encode(x_N, fmt), want):
        raise SystemExit(f"{name}: encode differs from the reference")
    back = block_quant.decode(want, fmt, x_N.numel(), x_N.dtype)
    if not torch.equal(back, reference.decode_reference(want, fmt, x_N.numel(), x_N.dtype)):
        raise SystemExit(f"{name}: decode differs from the reference")


def measure(names: list[str], num_elems: int, rounds: int) -> tuple[dict[str, float], dict[str, dict[str, Pair]]]:
    """GB/s: of the limits, and by codec and operation of ours and the reference."""
    x_N = torch.randn(num_elems, generator=torch.Generator().manual_seed(0)).bfloat16()
    rounds = max(5, min(rounds, (rounds << 16) // num_elems))

    def rate(arm: Arm, rounds: int) -> float:
        return round(_BYTES * num_elems / least_seconds(arm, rounds) / 1e9, 3)

    bounds = {name: rate(arm, rounds) for name, arm in limits(x_N).items()}
    rates: dict[str, dict[str, Pair]] = {}
    for name in names:
        fmt = parse_codec(name).format
        if fmt is None:
            raise SystemExit(f"{name} encodes nothing; name codecs that do, of {_CODECS} for instance")
        check(name, fmt, x_N)
        rates[name] = {
            operation: (rate(ours, rounds), rate(reference, _REFERENCE_ROUNDS))
            for operation, (ours, reference) in arms(fmt, x_N).items()
        }
    return {name: max(bounds[name], rate(arm, rounds)) for name, arm in limits(x_N).items()}, rates


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codecs", default=_CODECS)
    parser.add_argument("--elems", default=f"{1 << 16},{1 << 24}")
    parser.add_argument("--rounds", type=int, default=200, help="of 65536 numbers; fewer of more")
    given = parser.parse_args()
    torch.set_num_threads(1)
    watch, cells = OthersWatch(), []
    for num_elems in map(int, given.elems.split(",")):
        bounds, rates = measure(given.codecs.split(","), num_elems, given.rounds)
        cells.append({"elems": num_elems, "limits": bounds, "codecs": rates})
        limit_words = ", ".join(f"{name} {rate:.1f}" for name, rate in bounds.items())
        sys.stdout.write(f"\n{num_elems} numbers; limits of memory: {limit_words} GB/s. Ours (reference):\n\n")
        sys.stdout.write(f"| codec | {' | '.join(_OPERATIONS)} |\n|---|{'--:|' * len(_OPERATIONS)}\n")
        for name, row in rates.items():
            columns = [f"{ours:.2f} ({reference:.2f})" for ours, reference in (row[each] for each in _OPERATIONS)]
            sys.stdout.write(f"| {name} | {' | '.join(columns)} |\n")
        sys.stdout.flush()
    sys.stdout.write(
        f"\nOther processes used {100 * watch.share():.0f} % of the cores meanwhile; "
        f"torch {torch.__version__}, numba {numba.__version__}.\n"
    )
    sys.stdout.write(json.dumps({"benchmark": "codec", "unit": "GB/s", "cells": cells}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
