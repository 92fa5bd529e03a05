"""Decides, on all ranks alike, whether ranks of one host can sum through each other's GPU memory.

A rank sees only its own GPU's properties, so ranks share facts through the store they join over, and all draw the same
conclusion. This module does not import Triton, which may not be installed.
"""

import logging
import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib.util import find_spec

import torch
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.errors import CollectiveTimeoutError, CommError, name_ranks
from tightwire.comm.protocols import Transport

_MAX_RANKS = 31  # one bit each in an int32
_CAPABILITY = (7, 0)  # Triton's minimum

_LOG = logging.getLogger(__name__)


def host_identity() -> str:
    """Return a string that is equal for two processes exactly when they share a loopback interface."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


class Council:
    """Shares small facts between ranks over a store, so that all decide alike."""

    def __init__(self, store: Store, *, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank, self.world_size = rank, world_size
        self._store, self._timeout_s = store, timeout_s

    def share(self, topic: str, fact: bytes) -> list[bytes]:
        """Return all ranks' facts on ``topic`` in rank order. Each topic can be shared once.

        Raises:
            CollectiveTimeoutError: some ranks did not share in time; names them.
        """
        keys = [f"{topic}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], fact)  # pyright: ignore[reportArgumentType]: bytes are taken too
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise CollectiveTimeoutError(
                f"rank {self.rank} waited {self._timeout_s:g} s for peer memory ({topic}); {name_ranks(absent)} of "
                f"{self.world_size} did not come",
                absent,
            ) from error
        return [self._store.get(key) for key in keys]

    def first_objection(self, topic: str, objection: str | None) -> str | None:
        """Return the objection of the lowest rank that has one, or None."""
        objections = [told.decode() for told in self.share(topic, (objection or "").encode())]
        return next((f"rank {rank}: {text}" for rank, text in enumerate(objections) if text), None)


def why_unusable(council: Council, device: torch.device) -> str | None:
    """Return why these ranks cannot sum through each other's GPU memory, according to CUDA; None when they can."""
    objection = _own_objection(council.world_size, device)
    uuid = "" if objection else str(torch.cuda.get_device_properties(device).uuid)
    facts = council.share("gpu", f"{host_identity()}\n{uuid}".encode())
    objection = objection or _objection_to_peers(device, [fact.decode().split("\n") for fact in facts])
    return council.first_objection("access", objection)


def _own_objection(world_size: int, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"peer memory is between GPUs, and its device is {device}"
    if find_spec("triton") is None:
        return "Triton is not installed; python -m pip install 'tightwire[cuda]'"
    if torch.cuda.get_device_capability(device) < _CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older than what Triton compiles for (compute capability 7.0)"
    if world_size > _MAX_RANKS:
        return f"{world_size} ranks are more than the {_MAX_RANKS} that a kernel's failure mask names"
    return None


def _objection_to_peers(device: torch.device, facts: Sequence[Sequence[str]]) -> str | None:
    """Check the peers. ``facts``: each rank's host and GPU."""
    local = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    for peer, (host, uuid) in enumerate(facts):
        if host != host_identity():
            return f"rank {peer} is on another host"
        if not uuid:
            continue  # that rank reports its own objection
        if uuid not in local:
            return f"rank {peer}'s GPU is hidden from it; show all ranks the same CUDA_VISIBLE_DEVICES"
        index = local[uuid]
        if index != device.index and not torch.cuda.can_device_access_peer(device, index):
            return f"CUDA offers no access from its GPU to rank {peer}'s (no NVLink, and no peer access over PCIe)"
    return None


def with_peer_memory(
    library: Transport,
    store: Store,
    *,
    device: torch.device,
    timeout_s: float,
    describe: Callable[[], str | None] = lambda: None,
) -> tuple[Transport, str]:
    """Return ``library`` with AllReduces through peer memory, or ``library`` itself and the reason, which is logged too.

    Args:
        store: one that all ranks reach and nothing else writes to.
        device: this rank's GPU; ``library`` is NCCL's transport on it.
    Raises:
        CollectiveTimeoutError: a rank did not come.
    """
    council = Council(store, rank=library.rank, world_size=library.world_size, timeout_s=timeout_s)
    reason = why_unusable(council, device)
    if reason is None:
        # Imported only when Triton is installed.
        from tightwire.comm.transport.peer_buffers import map_peer_buffers
        from tightwire.comm.transport.peer_memory import PeerMemoryTransport

        try:
            buffers = map_peer_buffers(council, store, device)
        except CollectiveTimeoutError:
            raise
        except CommError as error:
            reason = str(error)
        else:
            return PeerMemoryTransport(buffers, library=library, timeout_s=timeout_s, describe=describe), ""
    if library.rank == 0:
        _LOG.warning("sums go through the library (NCCL) and not through peer memory: %s", reason)
    return library, reason
