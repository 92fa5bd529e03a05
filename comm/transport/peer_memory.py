"""A transport whose AllReduces go through peer GPU memory; everything else goes through the wrapped library transport.

One-shot, two-shot and flash are one kernel each (``peer_all_reduce``), without a copy through the host and without the
library's channels. Messages, barriers and ``native`` go to the wrapped transport: NCCL on GPUs, gloo for Triton's
interpreter. ``comm.transport.peer_buffers`` maps the memory.
"""

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from torch import Tensor

from tightwire.comm.protocols import FusedAllReduce, Moved, Transport, nothing_told
from tightwire.comm.transport.peer_all_reduce import PeerAllReduce
from tightwire.kernels.cuda.all_reduce import PeerBuffers

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


class PeerMemoryTransport:
    """``library`` with AllReduces over ``buffers``. All calls must use one CUDA stream."""

    def __init__(
        self,
        buffers: PeerBuffers,
        *,
        library: Transport,
        timeout_s: float,
        describe: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.rank, self.world_size = library.rank, library.world_size
        self.bytes_sent = library.bytes_sent
        self._library = library
        self._sums = PeerAllReduce(buffers, timeout_s=timeout_s, count=self._add_bytes, describe=describe)
        self.fused: FusedAllReduce | None = self._sums
        library.barrier()  # all ranks have mapped all buffers, and the library's connections exist

    def exchange(self, slices: Sequence[Tensor]) -> list[Tensor]:
        return self._counted(self._library.exchange, slices)

    def gather(self, buf: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        return self._counted(self._library.gather, buf, sizes)

    def gather_into(self, buf: Tensor, out: Tensor, moved: Moved = nothing_told) -> None:
        self._counted(self._library.gather_into, buf, out, moved)

    def shift(self, buf: Tensor, recv_bytes: int | None = None) -> Tensor:
        return self._counted(self._library.shift, buf, recv_bytes)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._counted(self._library.all_reduce, x)

    def barrier(self) -> None:
        self._sums.check()
        self._library.barrier()
        self._sums.check()  # the library's barrier has waited for the device

    def close(self) -> None:
        self._library.close()

    def _counted(self, method: Callable[_Params, _Result], *args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        self._sums.check()
        before = self._library.bytes_sent
        result = method(*args, **kwargs)
        self._add_bytes(self._library.bytes_sent - before)
        return result

    def _add_bytes(self, num_bytes: int) -> None:
        self.bytes_sent += num_bytes
