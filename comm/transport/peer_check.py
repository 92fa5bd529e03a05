"""Tests whether one CUDA device can write into another's memory, because a driver's claim may be wrong.

Behind some IOMMUs and PCIe switches peer writes are lost, corrupted, or never complete. Run this in a process that may be
killed.
"""

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

_NUM_CHECKED = 1 << 20  # int32: several pages, many packets
_NUM_TIMED = 1 << 24  # 64 MiB: long compared with the start of a copy
_REPEATS = 5


class PeerCheck(NamedTuple):
    ok: bool
    detail: str
    gb_per_s: float | None  # of the copy engine, one direction; None when wrong values arrived


def claimed_peers() -> list[tuple[int, int]]:
    """(writer, owner) of every pair of devices for which the driver claims peer access."""
    count = torch.cuda.device_count()
    pairs = [(writer, owner) for writer in range(count) for owner in range(count) if writer != owner]
    return [(writer, owner) for writer, owner in pairs if torch.cuda.can_device_access_peer(writer, owner)]


def check_peer_writes(
    writer: torch.device, owner: torch.device, copy: Callable[[Tensor, Tensor], object] = Tensor.copy_
) -> PeerCheck:
    """Write a pattern from ``writer``'s memory into ``owner``'s in two ways, check it on the host, and time the first way.

    A contiguous copy uses the copy engine. A copy into every second element runs a kernel on the writer whose stores
    cross the link, as those of an AllReduce do.

    Args:
        copy: (target, source), for tests.
    """
    want_N = torch.arange(_NUM_CHECKED, dtype=torch.int32)
    source_N = want_N.to(writer)
    for way, target_N in (
        ("copy engine", torch.zeros(_NUM_CHECKED, dtype=torch.int32, device=owner)),
        ("kernel stores", torch.zeros(_NUM_CHECKED, 2, dtype=torch.int32, device=owner)[:, 0]),
    ):
        copy(target_N, source_N)
        _finish(writer, owner)
        num_wrong = int((target_N.cpu() != want_N).sum())
        if num_wrong:
            return PeerCheck(False, f"{way}: {num_wrong} of {_NUM_CHECKED} values arrived wrong", None)
    return PeerCheck(True, "copy engine and kernel stores arrive whole", _bandwidth(writer, owner, copy))


def _bandwidth(writer: torch.device, owner: torch.device, copy: Callable[[Tensor, Tensor], object]) -> float:
    source_N = torch.ones(_NUM_TIMED, dtype=torch.int32, device=writer)
    target_N = torch.zeros(_NUM_TIMED, dtype=torch.int32, device=owner)
    copy(target_N, source_N)
    _finish(writer, owner)
    start_s = perf_counter()
    for _ in range(_REPEATS):
        copy(target_N, source_N)
    _finish(writer, owner)
    return _REPEATS * source_N.nbytes / (perf_counter() - start_s) / 1e9


def _finish(*devices: torch.device) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
