"""Runs AllReduce kernels on one GPU: ranks are buffers and streams of one process. The barriers between them are real."""

import torch
from torch import Tensor

from tightwire.comm.codec.codec import Codec, parse_codec, slice_lengths
from tightwire.comm.errors import CommError
from tightwire.comm.transport.peer_memory import PeerAllReduce
from tightwire.kernels.cuda.all_reduce import PeerBuffers, buffer_bytes
from tightwire.kernels.spec import block_quant as reference

ALGORITHMS = ("one-shot", "two-shot", "flash-int8", "flash-int4")
_NUM_BLOCKS = 16  # of each rank: all ranks' blocks must run at once
_SEND_BYTES = 16 << 20
_TIMEOUT_S = 5.0


class SimulatedRanks:
    """``world_size`` ranks on ``device``."""

    def __init__(self, world_size: int, device: torch.device) -> None:
        size = buffer_bytes(_SEND_BYTES, _NUM_BLOCKS, world_size)
        memory = torch.zeros(world_size, -(-size // 512) * 512, dtype=torch.uint8, device=device)
        addresses = torch.arange(world_size, device=device) * memory.stride(0) + memory.data_ptr()
        self.world_size = world_size
        self._streams = [torch.cuda.Stream(device) for _ in range(world_size)]
        self._ranks = [
            PeerAllReduce(
                PeerBuffers(
                    addresses=addresses,
                    rank=rank,
                    send_bytes=_SEND_BYTES,
                    num_blocks=_NUM_BLOCKS,
                    failure=torch.zeros(1, dtype=torch.int32).pin_memory(),
                    memory=memory,
                ),
                timeout_s=_TIMEOUT_S,
            )
            for rank in range(world_size)
        ]

    def is_right(self, algorithm: str, num_bytes: int, dtype: torch.dtype) -> bool:
        """True if one AllReduce of all ranks, each on a side stream, gives the reference's bits on every rank."""
        device = self._streams[0].device
        generator = torch.Generator(device=device).manual_seed(0)
        shape = self.world_size, num_bytes // dtype.itemsize
        inputs = list(torch.randn(shape, generator=generator, device=device).to(dtype))
        for stream, x_N in zip(self._streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                torch.empty_like(x_N)  # so that no call asks the driver for memory while a kernel waits for the next
        results = self._sum(algorithm, inputs)
        torch.cuda.synchronize(device)
        try:
            for rank in self._ranks:
                rank.check()
        except CommError:
            return False
        want = expected(algorithm, inputs)
        return all(torch.equal(result, want) for result in results)

    def _sum(self, algorithm: str, inputs: list[Tensor]) -> list[Tensor]:
        current = torch.cuda.current_stream()
        results = []
        for rank, stream, x_N in zip(self._ranks, self._streams, inputs, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                results.append(_run(rank, algorithm, x_N))
        for stream in self._streams:
            current.wait_stream(stream)
        return results


def expected(algorithm: str, inputs: list[Tensor]) -> Tensor:
    """The generic algorithm's result, by the references of the codec."""
    if algorithm in ("one-shot", "two-shot"):
        total = inputs[0].float()
        for x_N in inputs[1:]:
            total = total + x_N.float()
        return total.to(inputs[0].dtype)
    fmt = _codec(algorithm).format
    assert fmt is not None
    lengths = slice_lengths(inputs[0].numel(), len(inputs), fmt.group_elems)
    parts = []
    for index, length in enumerate(lengths):
        if length:
            slices = [x_N.split(lengths)[index] for x_N in inputs]
            bufs = [reference.encode_reference(part, fmt) for part in slices]
            own = reference.decode_reduce_encode_reference(bufs, fmt, fmt, length)
            parts.append(reference.decode_reference(own, fmt, length, inputs[0].dtype))
    return torch.cat(parts)


def _run(rank: PeerAllReduce, algorithm: str, x_N: Tensor) -> Tensor:
    if algorithm == "one-shot":
        return rank.one_shot(x_N)
    return rank.flash(x_N, _codec(algorithm), _codec(algorithm))


def _codec(algorithm: str) -> Codec:
    return parse_codec("none" if algorithm == "two-shot" else algorithm.removeprefix("flash-"))
