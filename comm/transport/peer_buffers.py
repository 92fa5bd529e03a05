"""GPU memory that ranks of one host map from each other, for ``transport.peer_memory``. All functions are collective."""

import mmap
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]
from torch.multiprocessing.reductions import reduce_tensor

from tightwire.comm.errors import CommError, name_ranks
from tightwire.comm.transport.store_notes import FactExchange
from tightwire.kernels.cuda.all_reduce import PeerBuffers, buffer_bytes

# Half of a rank's buffer: the bytes that one launch moves. Longer messages take several launches of about 10 us each.
SEND_BYTES = 16 << 20
# Enough blocks to keep a link busy, and few enough that every GPU runs all of them at once.
NUM_BLOCKS = 32

_PATTERN_BYTES = 16
_PAGE = mmap.PAGESIZE

_Mapping = Callable[[int], tuple[list[Tensor], object]]


def map_peer_buffers(
    exchange: FactExchange,
    store: Store,
    device: torch.device,
    *,
    send_bytes: int = SEND_BYTES,
    num_blocks: int = NUM_BLOCKS,
) -> PeerBuffers:
    """Map GPU memory of every rank on all ranks, zeroed, and verified by writing to it.

    Uses torch's symmetric memory where that works, else CUDA IPC handles, which also join ranks that share a GPU.

    Raises:
        CommError: neither works, or a rank's test pattern did not arrive; the same on all ranks.
        CollectiveTimeoutError: a rank did not arrive.
    """
    world_size = exchange.world_size
    num_blocks = min(num_blocks, torch.cuda.get_device_properties(device).multi_processor_count)
    num_blocks = min(int(told) for told in exchange.share("blocks", str(num_blocks).encode()))
    size = buffer_bytes(send_bytes, num_blocks, world_size)
    ways: list[tuple[str, _Mapping]] = [
        ("symmetric memory", lambda size: _map_symmetric(size, exchange, store, device)),
        ("CUDA IPC", lambda size: _map_ipc(size, exchange, device)),
    ]
    uuids = exchange.share("device", str(torch.cuda.get_device_properties(device).uuid).encode())
    if len(set(uuids)) < world_size:
        ways = ways[1:]  # symmetric memory does not support ranks that share a GPU
    objections: list[str] = []
    for name, mapping in ways:
        views, memory, objection = _try(mapping, size)
        objection = exchange.first_objection(name, objection)
        if objection is None:
            objection = exchange.first_objection(f"{name}, written", _verify(views, exchange, name, device))
        if objection is None:
            return PeerBuffers(
                addresses=torch.tensor([view.data_ptr() for view in views], dtype=torch.int64, device=device),
                rank=exchange.rank,
                send_bytes=send_bytes,
                num_blocks=num_blocks,
                failure=torch.zeros(1, dtype=torch.int32).pin_memory(),
                memory=(views, memory),
            )
        objections.append(f"{name}: {objection}")
    raise CommError(f"peer memory is unavailable ({'; '.join(objections)})")


def _try(mapping: _Mapping, size: int) -> tuple[list[Tensor], object, str | None]:
    try:
        views, memory = mapping(size)
    except Exception as error:  # noqa: BLE001, the other ranks must learn of any error of a driver or an alpha API
        return [], None, (str(error).splitlines() or [type(error).__name__])[0]
    return views, memory, None


def _map_symmetric(
    size: int, exchange: FactExchange, store: Store, device: torch.device
) -> tuple[list[Tensor], object]:
    symmetric: Any = torch._C._distributed_c10d._SymmetricMemory  # pyright: ignore[reportAttributeAccessIssue]
    # Torch keeps groups by name for a whole process; all ranks must use the same name.
    name = exchange.share("symmetric group", f"tightwire-peer-memory-{os.getpid()}-{id(exchange)}".encode())[0].decode()
    symmetric.set_group_info(name, exchange.rank, exchange.world_size, store)
    own = symmetric.empty_strided_p2p((size,), (1,), torch.uint8, device, name)
    handle = symmetric.rendezvous(own)
    return [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(exchange.world_size)], (own, handle)


def _map_ipc(size: int, exchange: FactExchange, device: torch.device) -> tuple[list[Tensor], object]:
    own = torch.zeros(size, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    handles = exchange.share("handles", pickle.dumps(reduce_tensor(own)))
    views = []
    for rank, handle in enumerate(handles):
        if rank == exchange.rank:
            views.append(own)  # a process cannot open its own handle
        else:
            rebuild, args = pickle.loads(handle)
            views.append(rebuild(*args))
    return views, own


def _verify(views: Sequence[Tensor], exchange: FactExchange, name: str, device: torch.device) -> str | None:
    """Each rank writes its own pattern into every rank's memory, then checks its own memory for all patterns."""
    own = views[exchange.rank]
    own.zero_()
    torch.cuda.synchronize(device)
    exchange.share(f"{name}, zeroed", b"")
    start = exchange.rank * _PATTERN_BYTES
    for view in views:
        view[start : start + _PATTERN_BYTES].fill_(exchange.rank + 1)
    torch.cuda.synchronize(device)
    exchange.share(f"{name}, patterns", b"")
    found = own[: exchange.world_size * _PATTERN_BYTES].view(exchange.world_size, _PATTERN_BYTES).cpu()
    wrong = [rank for rank in range(exchange.world_size) if not bool((found[rank] == rank + 1).all())]
    exchange.share(f"{name}, read", b"")
    own.zero_()
    torch.cuda.synchronize(device)
    return f"writes of {name_ranks(wrong)} did not arrive" if wrong else None
