"""Decides, on all ranks alike, whether ranks of one host can sum through each other's GPU memory; checks writes.

Ranks share facts through the store they join over. Does not import Triton, which may not be installed.
"""

import logging
import os
import socket
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.errors import CollectiveTimeoutError, CommError
from tightwire.comm.transport.process_group import ProcessGroupTransport
from tightwire.comm.transport.store_notes import FactExchange

_MAX_RANKS = 31  # one bit each in an int32
_CAPABILITY = (8, 0)  # as the other kernels need

_LOG = logging.getLogger(__name__)


def host_identity() -> str:
    """Return a string that is equal for two processes exactly when they share a loopback interface."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def why_unusable(exchange: FactExchange, device: torch.device) -> str | None:
    """Return why these ranks cannot sum through each other's GPU memory, according to CUDA, or None when they can."""
    objection = _own_objection(exchange.world_size, device)
    uuid = "" if objection else str(torch.cuda.get_device_properties(device).uuid)
    facts = exchange.share("gpu", f"{host_identity()}\n{uuid}".encode())
    objection = objection or _objection_to_peers(device, [fact.decode().split("\n") for fact in facts])
    return exchange.first_objection("access", objection)


def _own_objection(world_size: int, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"peer memory is between GPUs, and its device is {device}"
    if find_spec("triton") is None:
        return "Triton is not installed; python -m pip install triton"
    if torch.cuda.get_device_capability(device) < _CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is too old: its compute capability is below 8.0"
    if world_size > _MAX_RANKS:
        return f"{world_size} ranks are more than the {_MAX_RANKS} that a kernel's failure mask names"
    return None


def _objection_to_peers(device: torch.device, facts: Sequence[Sequence[str]]) -> str | None:
    local = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    for peer, (host, uuid) in enumerate(facts):
        if host != host_identity():
            return f"rank {peer} is on another host"
        if not uuid:
            continue  # that rank reports its own objection
        if uuid not in local:
            return f"rank {peer}'s GPU is not visible to it; give all ranks the same CUDA_VISIBLE_DEVICES"
        index = local[uuid]
        if index != device.index and not torch.cuda.can_device_access_peer(device, index):
            return f"CUDA offers no access from its GPU to rank {peer}'s (no NVLink, and no peer access over PCIe)"
    return None


def add_peer_memory(library: ProcessGroupTransport, store: Store, num_blocks: int) -> str:
    """Let ``library`` sum through peer memory, or log and return why not; CollectiveTimeoutError: a rank is late.

    All ranks reach ``store``, and nothing else writes to it.
    """
    device, timeout_s = library.device, library.timeout_s
    exchange = FactExchange(store, rank=library.rank, world_size=library.world_size, timeout_s=timeout_s)
    reason = why_unusable(exchange, device)
    if reason is None:
        # Imported only when Triton is installed.
        from tightwire.comm.transport.peer_memory import PeerAllReduce, map_peer_buffers

        try:
            buffers = map_peer_buffers(exchange, store, device, num_blocks=num_blocks)
        except CollectiveTimeoutError:
            raise
        except CommError as error:
            reason = str(error)
        else:
            sums = PeerAllReduce(buffers, timeout_s=timeout_s, describe=library.ledger.current)
            library.add_fused(sums, sums.check)
            return ""
    if library.rank == 0:
        _LOG.warning("sums go through the library (NCCL) and not through peer memory: %s", reason)
    return reason


_NUM_CHECKED = 1 << 20  # int32: several pages, many packets
_NUM_TIMED = 1 << 24  # 64 MiB: long compared with the start of a copy
_REPEATS = 5


class PeerCheck(NamedTuple):
    ok: bool
    detail: str
    gb_per_s: float | None  # rate of the copy engine, one direction; None when wrong values arrived


def claimed_peers() -> list[tuple[int, int]]:
    """(writer, owner) of every pair of devices for which the driver claims peer access."""
    count = torch.cuda.device_count()
    pairs = [(writer, owner) for writer in range(count) for owner in range(count) if writer != owner]
    return [(writer, owner) for writer, owner in pairs if torch.cuda.can_device_access_peer(writer, owner)]


def check_peer_writes(
    writer: torch.device, owner: torch.device, copy: Callable[[Tensor, Tensor], object] = Tensor.copy_
) -> PeerCheck:
    """Write a pattern from ``writer``'s memory into ``owner``'s in two ways, check it on the host, and time the first way.

    A contiguous copy uses the copy engine; a copy into every second element runs a kernel whose stores cross the link,
    as those of an AllReduce do. Tests replace ``copy``, (target, source).
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
