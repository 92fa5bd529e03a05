"""A transport whose AllReduces go through peer GPU memory; everything else goes through the wrapped library transport.

One-shot, two-shot and flash are one kernel each (``kernels.cuda.all_reduce``), without a copy through the host and without
the library's channels; this module splits long messages, counts bytes and reports failures. Messages, barriers and ``native``
go to the wrapped transport: NCCL on GPUs, gloo for Triton's interpreter, in which the same code runs on CPU processes that
share memory. ``comm.transport.peer_buffers`` maps the memory.
"""

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from tightwire.comm.codec.codec import Codec
from tightwire.comm.codec.slices import slice_lengths
from tightwire.comm.errors import CollectiveTimeoutError, CommError, name_ranks
from tightwire.comm.protocols import FusedAllReduce, KernelSums, Moved, Transport, nothing_told
from tightwire.kernels.cuda.all_reduce import Part, PeerBuffers, max_part_elems, one_shot, two_shot
from tightwire.kernels.spec.block_format import BlockFormat

# Polls of a word in local memory: about a microsecond each on a GPU, a thousand times that in the interpreter.
_DEVICE_POLLS_PER_S, _INTERPRETED_POLLS_PER_S = 1_000_000, 1_000


class PeerAllReduce:
    """One rank's AllReduces over ``buffers``.

    A rank that does not come within about ``timeout_s`` ends the group: no rank waits any more, results are NaN, and
    ``check`` raises. The host does not wait for GPU kernels, so the error is raised by the first call after the failed
    one, or by a ``check`` after a synchronization.

    Args:
        count: called with the bytes that each call sent to others, by the algorithm's formula.
        describe: names the running collective, for messages.
    """

    tells_coding = False
    in_kernel: KernelSums | None = None

    def __init__(
        self,
        buffers: PeerBuffers,
        *,
        timeout_s: float,
        count: Callable[[int], None],
        describe: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._buffers, self._timeout_s, self._count, self._describe = buffers, timeout_s, count, describe
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
        self._count((self._buffers.world_size - 1) * x_N.nbytes)
        self.check()
        return out_N.view_as(x)

    def two_shot(self, x: Tensor) -> Tensor:
        lengths = slice_lengths(x.numel(), self._buffers.world_size)
        return self._in_slices(x.view(-1), lengths, None, None).view_as(x)

    def flash(self, x: Tensor, reduce_codec: Codec, gather_codec: Codec) -> Tensor:
        multiple = max(reduce_codec.group_elems, gather_codec.group_elems)  # both are powers of two
        lengths = slice_lengths(x.numel(), self._buffers.world_size, multiple)
        return self._in_slices(x.view(-1), lengths, reduce_codec.format, gather_codec.format).view_as(x)

    def check(self) -> None:
        """Raise if a rank did not arrive in a collective that the device has reached.

        Raises:
            CollectiveTimeoutError: names the ranks. The group cannot be used any more.
        """
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

    def _in_slices(self, x: Tensor, lengths: list[int], fmt: BlockFormat | None, out_fmt: BlockFormat | None) -> Tensor:
        self.check()
        buffers, elem_bytes = self._buffers, x.element_size()
        result = torch.empty_like(x)
        x_N, out_N = x.view(-1), result.view(-1)
        step = max_part_elems(buffers, elem_bytes, fmt, out_fmt)
        if step == 0:
            raise ValueError(f"peer buffers of {buffers.send_bytes} bytes hold no slice of {len(lengths)} ranks")
        for start in range(0, lengths[0], step):
            part = Part(slice_elems=lengths[0], start=start, num_elems=min(step, lengths[0] - start))
            two_shot(x_N, out_N, buffers, part, fmt, out_fmt, self._max_polls)
        own = lengths[buffers.rank]
        others = [length for rank, length in enumerate(lengths) if rank != buffers.rank]
        self._count(
            sum(_wire_bytes(length, elem_bytes, fmt) for length in others)
            + len(others) * _wire_bytes(own, elem_bytes, out_fmt)
        )
        self.check()
        return result


def _wire_bytes(num_elems: int, elem_bytes: int, fmt: BlockFormat | None) -> int:
    return num_elems * elem_bytes if fmt is None else fmt.encoded_bytes(num_elems)


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
