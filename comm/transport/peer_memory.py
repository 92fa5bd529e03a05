"""AllReduces through GPU memory that the ranks of one host map from each other: one kernel each.

Messages, barriers and ``native`` go through the library: NCCL on GPUs, gloo for Triton's interpreter, in which the same
code runs on CPU processes that share memory.
"""

import mmap
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]
from torch.multiprocessing.reductions import reduce_tensor

from tightwire.comm.codec.codec import Carried, Codec, slices_for
from tightwire.comm.errors import CollectiveTimeoutError, CommError, name_ranks
from tightwire.comm.protocols import KernelSums
from tightwire.comm.transport.store_notes import FactExchange
from tightwire.kernels.cuda.all_reduce import Part, PeerBuffers, buffer_bytes, max_part_elems, one_shot, two_shot

# Polls of a word in local memory: about a microsecond each on a GPU, a thousand times that in the interpreter.
_DEVICE_POLLS_PER_S, _INTERPRETED_POLLS_PER_S = 1_000_000, 1_000


class PeerAllReduce:
    """One rank's AllReduces over ``buffers``.

    A rank that does not come within about ``timeout_s`` ends the group: no rank waits any more, results are NaN, and
    ``check`` raises. The host does not wait for GPU kernels, so the error is raised by the first call after the failed
    one, or by a ``check`` after a synchronization. Messages name the running collective by ``describe``. All calls
    must use one CUDA stream.
    """

    tells_coding = False
    in_kernel: KernelSums | None = None

    def __init__(
        self, buffers: PeerBuffers, *, timeout_s: float, describe: Callable[[], str | None] = lambda: None
    ) -> None:
        self._buffers, self._timeout_s, self._describe = buffers, timeout_s, describe
        on_cpu = buffers.addresses.device.type == "cpu"
        self._max_polls = min(2**31 - 1, int(timeout_s * (_INTERPRETED_POLLS_PER_S if on_cpu else _DEVICE_POLLS_PER_S)))
        self._failure: CommError | None = None

    def one_shot(self, x: Tensor) -> Tensor:
        self.check()
        x_N = x.view(-1)
        out_N = torch.empty_like(x_N)
        step = self._buffers.send_bytes // x_N.element_size()
        for part, out in zip(x_N.split(step), out_N.split(step), strict=True):
            one_shot(part, out, self._buffers, self._max_polls)
        self.check()
        return out_N.view_as(x)

    def flash(self, x: Tensor, reduce_codec: Codec, gather_codec: Codec, carried: Carried = (None, None)) -> Tensor:
        self.check()
        buffers, fmt, out_fmt = self._buffers, reduce_codec.format, gather_codec.format
        longest = slices_for(x.numel(), buffers.world_size, reduce_codec, gather_codec)[0]
        x_N = x.view(-1)
        out_N = torch.empty_like(x_N)
        step = max_part_elems(buffers, x.element_size(), fmt, out_fmt)
        if step == 0:
            raise ValueError(f"peer buffers of {buffers.send_bytes} bytes hold no slice of {buffers.world_size} ranks")
        for start in range(0, longest, step):
            part = Part(slice_elems=longest, start=start, num_elems=min(step, longest - start))
            two_shot(x_N, out_N, buffers, part, fmt, out_fmt, self._max_polls, carried)
        self.check()
        return out_N.view_as(x)

    def check(self) -> None:
        """Raise CollectiveTimeoutError with the ranks that did not arrive in a collective that the device reached."""
        late = int(self._buffers.failure)
        if self._failure is None and late:
            ranks = [rank for rank in range(self._buffers.world_size) if late >> rank & 1]
            self._failure = CollectiveTimeoutError(
                f"rank {self._buffers.rank} timed out waiting for {name_ranks(ranks)} of {self._buffers.world_size} in "
                f"{self._describe() or 'an earlier collective'}: waited about {self._timeout_s:g} s; hung, stopped or "
                "busy elsewhere. Results since then are NaN",
                ranks,
            )
        if self._failure is not None:
            raise self._failure


# Half of a rank's buffer: the bytes that one launch moves. Longer messages take several launches of about 10 us each.
SEND_BYTES = 16 << 20

_PATTERN_BYTES = 16
_IPC_DEVICE = 6  # place of the device among the arguments of torch.multiprocessing.reductions.rebuild_cuda_tensor
_PAGE = mmap.PAGESIZE

_Mapping = Callable[[int], tuple[list[Tensor], object]]


def map_peer_buffers(
    exchange: FactExchange, store: Store, device: torch.device, *, num_blocks: int, send_bytes: int = SEND_BYTES
) -> PeerBuffers:
    """Map GPU memory of every rank on all ranks, zeroed, and verified by writing to it.

    Uses torch's symmetric memory where that works, else CUDA IPC handles, which also join ranks that share a GPU.
    Raises CommError, the same on all ranks, if neither works; CollectiveTimeoutError if a rank does not arrive.
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
            # Opened under the owner's device, it would not be mapped for this rank's kernels.
            rebuild, args = pickle.loads(handle)
            views.append(rebuild(*args[:_IPC_DEVICE], device.index, *args[_IPC_DEVICE + 1 :]))
    return views, own


def _verify(views: Sequence[Tensor], exchange: FactExchange, name: str, device: torch.device) -> str | None:
    """Each rank writes its pattern into every rank's memory, then reads all patterns in all of it, by its device's kernels."""
    own = views[exchange.rank]
    own.zero_()
    torch.cuda.synchronize(device)
    exchange.share(f"{name}, zeroed", b"")
    start = exchange.rank * _PATTERN_BYTES
    for view in views:
        view[start : start + _PATTERN_BYTES].fill_(exchange.rank + 1)
    torch.cuda.synchronize(device)
    exchange.share(f"{name}, patterns", b"")
    want = torch.arange(1, exchange.world_size + 1, dtype=torch.uint8, device=device).repeat_interleave(_PATTERN_BYTES)
    off = torch.stack([view[: len(want)] != want for view in views]).view(len(views), -1, _PATTERN_BYTES)
    wrong = off.any(0).any(1).nonzero().flatten().tolist()
    exchange.share(f"{name}, read", b"")
    own.zero_()
    torch.cuda.synchronize(device)
    return f"writes of {name_ranks(wrong)} did not arrive" if wrong else None
