"""AllReduces through GPU memory that the ranks of one host map from each other: one kernel each.

Messages, barriers and ``native`` go through the library: NCCL on GPUs, gloo for Triton's interpreter, in which the same
code runs on CPU processes that share memory.
"""

import mmap
import os
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]
from torch.multiprocessing.reductions import reduce_tensor

from tightwire.comm.codec.codec import Carried, Codec, slices_for
from tightwire.comm.errors import CollectiveTimeoutError, CommError, name_ranks
from tightwire.comm.protocols import KernelSums
from tightwire.comm.transport.deadline import within
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

_T = TypeVar("_T")


_Mapped = tuple[list[Tensor], object]  # views of all ranks' memory, and what keeps it mapped


class _Way(NamedTuple):
    """A way to map memory of other ranks. A rank may fail in each part, after which none begins the next."""

    name: str
    offer: Callable[[int], Any]  # this rank's memory, of so many bytes
    join: Callable[[Any], _Mapped]  # given what was offered


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
    ways = [
        _Way(
            "symmetric memory",
            partial(_offer_symmetric, exchange, store, device),
            partial(_join_symmetric, exchange, device),
        ),
        _Way("CUDA IPC", partial(_offer_ipc, device), partial(_join_ipc, exchange, device)),
    ]
    uuids = exchange.share("device", str(torch.cuda.get_device_properties(device).uuid).encode())
    if len(set(uuids)) < world_size:
        ways = ways[1:]  # symmetric memory does not support ranks that share a GPU
    objections: list[str] = []
    for way in ways:
        mapped, objection = _map(way, size, exchange, device)
        if mapped is not None and objection is None:
            return PeerBuffers(
                addresses=torch.tensor([view.data_ptr() for view in mapped[0]], dtype=torch.int64, device=device),
                rank=exchange.rank,
                send_bytes=send_bytes,
                num_blocks=num_blocks,
                failure=torch.zeros(1, dtype=torch.int32).pin_memory(),
                memory=mapped,
            )
        objections.append(f"{way.name}: {objection}")
    raise CommError(f"peer memory is unavailable ({'; '.join(objections)})")


def _map(way: _Way, size: int, exchange: FactExchange, device: torch.device) -> tuple[_Mapped | None, str | None]:
    """What a way maps, or the objection of one rank."""
    offered, objection = _try(partial(way.offer, size))
    if objection := exchange.first_objection(f"{way.name}, own", objection):
        return None, objection
    mapped, objection = _try(partial(way.join, offered))
    objection = exchange.first_objection(way.name, objection)
    if mapped is None or objection:
        return None, objection
    return mapped, exchange.first_objection(f"{way.name}, written", _verify(mapped[0], exchange, way.name, device))


def _try(make: Callable[[], _T]) -> tuple[_T | None, str | None]:
    """The result or an objection, which the other ranks must learn, whatever error of a driver or an alpha API it is."""
    try:
        return make(), None
    except Exception as error:  # noqa: BLE001
        return None, (str(error).splitlines() or [type(error).__name__])[0]


def _symmetric() -> Any:
    return torch._C._distributed_c10d._SymmetricMemory  # pyright: ignore[reportAttributeAccessIssue]


def _offer_symmetric(exchange: FactExchange, store: Store, device: torch.device, size: int) -> Tensor:
    # Torch keeps groups by name for a whole process; all ranks must use the same name.
    name = exchange.share("symmetric group", f"tightwire-peer-memory-{os.getpid()}-{id(exchange)}".encode())[0].decode()
    # A store of its own: one that waits lets no other thread in, also when its rendezvous is given up.
    own: Any = store
    own = own.clone() if hasattr(own, "clone") else own  # older versions of torch cannot
    _symmetric().set_group_info(name, exchange.rank, exchange.world_size, own)
    return _symmetric().empty_strided_p2p((size,), (1,), torch.uint8, device, name)


def _join_symmetric(exchange: FactExchange, device: torch.device, own: Tensor) -> _Mapped:
    def meet() -> Any:
        with torch.cuda.device(device):  # a thread begins with the first device
            return _symmetric().rendezvous(own)

    # Half, because ranks whose own call has ended wait for this rank's objection.
    limit_s = exchange.timeout_s / 2
    handle = within(limit_s, meet, lambda: f"torch's rendezvous did not end in {limit_s:g} s")
    views = [handle.get_buffer(rank, (len(own),), torch.uint8) for rank in range(exchange.world_size)]
    return views, (own, handle)


def _offer_ipc(device: torch.device, size: int) -> tuple[Tensor, bytes]:
    own = torch.zeros(size, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    return own, pickle.dumps(reduce_tensor(own))


def _join_ipc(exchange: FactExchange, device: torch.device, offered: tuple[Tensor, bytes]) -> _Mapped:
    own, own_handle = offered
    views = []
    for rank, handle in enumerate(exchange.share("handles", own_handle)):
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
