"""Memory that ranks of one host map of each other, for ``transport.peer_memory``: where it can be had, and how.

Every rank calls these functions, and all get the same answer: what one rank finds out, all read from the store.
"""

import mmap
import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]
from torch.multiprocessing.reductions import reduce_tensor

from tightwire.comm.errors import CollectiveTimeoutError, CommError, name_ranks
from tightwire.comm.rendezvous import host_identity
from tightwire.kernels.all_reduce_triton import PeerBuffers, buffer_bytes

# Twice this for each rank: what one launch moves. Longer messages take several launches, each some ten microseconds.
SEND_BYTES = 16 << 20
# Enough to keep a link busy, and few enough for every GPU to run at once beside nothing else.
NUM_BLOCKS = 32

_MAX_RANKS = 31  # a bit for each in an int32
_CAPABILITY = (7, 0)  # Triton's
_PATTERN_BYTES = 16
_PAGE = mmap.PAGESIZE

_Mapping = Callable[[int], tuple[list[Tensor], object]]


class Council:
    """Ranks telling each other small facts over a store, to decide alike."""

    def __init__(self, store: Store, *, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank, self.world_size = rank, world_size
        self._store, self._timeout_s = store, timeout_s

    def share(self, topic: str, fact: bytes) -> list[bytes]:
        """All ranks' facts on a ``topic`` that was not shared before, in rank order.

        Raises:
            CollectiveTimeoutError: not all have told theirs in time.
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
        """The objection of the lowest rank that has one."""
        objections = [told.decode() for told in self.share(topic, (objection or "").encode())]
        return next((f"rank {rank}: {text}" for rank, text in enumerate(objections) if text), None)


def why_unusable(council: Council, device: torch.device) -> str | None:
    """The reason why these ranks cannot sum through each other's GPU memory, as far as CUDA tells; None when they can."""
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
    """``facts``: each rank's host and GPU."""
    local = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    for peer, (host, uuid) in enumerate(facts):
        if host != host_identity():
            return f"rank {peer} is on another host"
        if not uuid:
            continue  # that rank objects by itself
        if uuid not in local:
            return f"rank {peer}'s GPU is hidden from it; show all ranks the same CUDA_VISIBLE_DEVICES"
        index = local[uuid]
        if index != device.index and not torch.cuda.can_device_access_peer(device, index):
            return f"CUDA offers no access from its GPU to rank {peer}'s (no NVLink, and no peer access over PCIe)"
    return None


def map_peer_buffers(
    council: Council,
    store: Store,
    device: torch.device,
    *,
    send_bytes: int = SEND_BYTES,
    num_blocks: int = NUM_BLOCKS,
) -> PeerBuffers:
    """GPU memory of every rank, mapped by all, zero, and verified by writing to it.

    As torch's symmetric memory where that works, else by CUDA IPC handles, which also join ranks that share a GPU.

    Raises:
        CommError: neither can be had, or what a rank wrote did not arrive; the same on all ranks.
        CollectiveTimeoutError: a rank did not come.
    """
    world_size = council.world_size
    num_blocks = min(num_blocks, torch.cuda.get_device_properties(device).multi_processor_count)
    num_blocks = min(int(told) for told in council.share("blocks", str(num_blocks).encode()))
    size = buffer_bytes(send_bytes, num_blocks, world_size)
    ways: list[tuple[str, _Mapping]] = [
        ("symmetric memory", lambda size: _map_symmetric(size, council, store, device)),
        ("CUDA IPC", lambda size: _map_ipc(size, council, device)),
    ]
    uuids = council.share("device", str(torch.cuda.get_device_properties(device).uuid).encode())
    if len(set(uuids)) < world_size:
        ways = ways[1:]  # symmetric memory refuses ranks that share a GPU
    objections: list[str] = []
    for name, mapping in ways:
        views, memory, objection = _try(mapping, size)
        objection = council.first_objection(name, objection)
        if objection is None:
            objection = council.first_objection(f"{name}, written", _verify(views, council, name, device))
        if objection is None:
            return PeerBuffers(
                addresses=torch.tensor([view.data_ptr() for view in views], dtype=torch.int64, device=device),
                rank=council.rank,
                send_bytes=send_bytes,
                num_blocks=num_blocks,
                failure=torch.zeros(1, dtype=torch.int32).pin_memory(),
                memory=(views, memory),
            )
        objections.append(f"{name}: {objection}")
    raise CommError(f"peer memory cannot be had ({'; '.join(objections)})")


def _try(mapping: _Mapping, size: int) -> tuple[list[Tensor], object, str | None]:
    try:
        views, memory = mapping(size)
    except Exception as error:  # noqa: BLE001, whatever a driver or an alpha API raises, the other ranks must hear of it
        return [], None, (str(error).splitlines() or [type(error).__name__])[0]
    return views, memory, None


def _map_symmetric(size: int, council: Council, store: Store, device: torch.device) -> tuple[list[Tensor], object]:
    symmetric: Any = torch._C._distributed_c10d._SymmetricMemory  # pyright: ignore[reportAttributeAccessIssue]
    name = "tightwire-peer-memory"
    symmetric.set_group_info(name, council.rank, council.world_size, store)
    own = symmetric.empty_strided_p2p((size,), (1,), torch.uint8, device, name)
    handle = symmetric.rendezvous(own)
    return [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(council.world_size)], (own, handle)


def _map_ipc(size: int, council: Council, device: torch.device) -> tuple[list[Tensor], object]:
    own = torch.zeros(size, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    handles = council.share("handles", pickle.dumps(reduce_tensor(own)))
    views = []
    for rank, handle in enumerate(handles):
        if rank == council.rank:
            views.append(own)  # a process cannot open its own handle
        else:
            rebuild, args = pickle.loads(handle)
            views.append(rebuild(*args))
    return views, own


def _verify(views: Sequence[Tensor], council: Council, name: str, device: torch.device) -> str | None:
    """Every rank writes a pattern of its own into everyone's memory and looks for all patterns in its own."""
    own = views[council.rank]
    own.zero_()
    torch.cuda.synchronize(device)
    council.share(f"{name}, zeroed", b"")
    start = council.rank * _PATTERN_BYTES
    for view in views:
        view[start : start + _PATTERN_BYTES].fill_(council.rank + 1)
    torch.cuda.synchronize(device)
    council.share(f"{name}, patterns", b"")
    found = own[: council.world_size * _PATTERN_BYTES].view(council.world_size, _PATTERN_BYTES).cpu()
    wrong = [rank for rank in range(council.world_size) if not bool((found[rank] == rank + 1).all())]
    council.share(f"{name}, read", b"")
    own.zero_()
    torch.cuda.synchronize(device)
    return f"what {name_ranks(wrong)} wrote did not arrive" if wrong else None


# --- CPU ranks, whose kernels Triton's interpreter runs ---------------------------------------------------------------


def shared_file_bytes(world_size: int, send_bytes: int, num_blocks: int) -> int:
    """Size of the file for ``shared_peer_buffers``."""
    return world_size * _padded_bytes(world_size, send_bytes, num_blocks)


def shared_peer_buffers(fd: int, *, rank: int, world_size: int, send_bytes: int, num_blocks: int) -> PeerBuffers:
    """Peer buffers in a file that all ranks map, zero at first."""
    memory = mmap.mmap(fd, shared_file_bytes(world_size, send_bytes, num_blocks))
    view = torch.frombuffer(memory, dtype=torch.uint8)
    step = _padded_bytes(world_size, send_bytes, num_blocks)
    return PeerBuffers(
        addresses=torch.arange(world_size) * step + view.data_ptr(),
        rank=rank,
        send_bytes=send_bytes,
        num_blocks=num_blocks,
        failure=torch.zeros(1, dtype=torch.int32),
        memory=view,
    )


def _padded_bytes(world_size: int, send_bytes: int, num_blocks: int) -> int:
    return -(-buffer_bytes(send_bytes, num_blocks, world_size) // _PAGE) * _PAGE
