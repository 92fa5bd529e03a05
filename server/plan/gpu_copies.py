"""Measures how fast this host's GPUs copy from its memory and from each other, for ``--weights auto``.

``python -m tightwire.server.plan.gpu_copies N`` measures the first N, and prints a line of JSON.
"""

import sys
import time
from collections.abc import Sequence
from functools import cache
from json import dumps, loads
from typing import NamedTuple

import torch
from torch import Tensor

from tightwire.cuda_devices import run_child
from tightwire.parent_death import die_with_parent

_CHILD = sys.executable, "-m", __name__
_NUM_BYTES, _REPEATS = 64 << 20, 16


class CopyRates(NamedTuple):
    """Bytes that each GPU receives per second while all receive. ``gpus``: from the others, of the slowest pairs; 0 of one GPU."""

    host: float
    gpus: float


@cache
def copy_rates(num_gpus: int) -> tuple[CopyRates | None, str]:
    """The rates of copies between so many GPUs, or None and why there are none. A child measures them."""
    printed, why = run_child((*_CHILD, str(num_gpus)))
    return None if why else CopyRates(*loads(printed)), why


def measure(num_gpus: int, num_bytes: int = _NUM_BYTES) -> CopyRates:
    """Cost: on each GPU ``num_bytes`` twice, on the host ``num_bytes`` for each, pinned."""
    devices = [torch.device("cuda", number) for number in range(num_gpus)]
    own, into = ([torch.ones(num_bytes, dtype=torch.uint8, device=device) for device in devices] for _ in range(2))
    pinned = [torch.ones(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in devices]
    turned = [[own[(number + shift) % num_gpus] for number in range(num_gpus)] for shift in range(1, num_gpus)]
    return CopyRates(_rate(pinned, into), min((_rate(sources, into) for sources in turned), default=0.0))


def _rate(sources: Sequence[Tensor], into: Sequence[Tensor]) -> float:
    """Bytes per second of each of the copies, which run at once."""
    # A copy between GPUs waits for the current stream of both. With a stream each to send and to receive, none waits for another.
    sends, receives = ([torch.cuda.Stream(target.device) for target in into] for _ in range(2))
    send_of = {target.device: stream for target, stream in zip(into, sends, strict=True)}

    def copy_all() -> None:
        for source, target, receive in zip(sources, into, receives, strict=True):
            with torch.cuda.stream(send_of.get(source.device, receive)), torch.cuda.stream(receive):
                target.copy_(source, non_blocking=True)

    def finish() -> None:
        for target in into:
            torch.cuda.synchronize(target.device)

    copy_all()  # the first opens the access
    finish()
    start_s = time.perf_counter()
    for _ in range(_REPEATS):
        copy_all()
    finish()
    return _REPEATS * into[0].nbytes / (time.perf_counter() - start_s)


if __name__ == "__main__":
    die_with_parent()
    sys.stdout.write(dumps(measure(int(sys.argv[1]))) + "\n")
