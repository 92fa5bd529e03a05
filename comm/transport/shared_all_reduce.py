"""AllReduces over a shared-memory segment: the ``FusedAllReduce`` of ranks that share memory.

One-shot and two-shot are one kernel call each (kernels/cpu/native/shared_sums.cpp). Flash encodes into the shared
buffers and decodes out of them. Long tensors go in chunks that fit the caches; the chunk boundaries do not change an
element's sum.
"""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from tightwire.comm.codec.codec import Codec
from tightwire.comm.codec.slices import slice_lengths, sum_and_encode
from tightwire.comm.ledger.recording import Series
from tightwire.comm.protocols import KernelSums
from tightwire.comm.transport.shared_board import FLASH, SharedTurns
from tightwire.kernels.cpu.library import ffi, lib, struct
from tightwire.kernels.cpu.run import NUMBER_KIND
from tightwire.kernels.cpu.shared_sums import DONE, call_word

_OP, _ALGORITHM = "all_reduce", "one-shot"  # the ledger's names of sums in a kernel
_FLASH_CHUNK_ELEMS = 1 << 19  # large enough to amortize the codec calls of a turn, small enough for the caches


class SharedAllReduce:
    """Runs its AllReduces on ``turns``, which the transport's messages use too."""

    tells_coding = True

    def __init__(self, turns: SharedTurns) -> None:
        self.in_kernel: KernelSums | None = SharedSums(turns)
        self._turns = turns
        self._board, self._announce = turns.board.native, turns.board.announce

    def one_shot(self, x: Tensor) -> Tensor:
        return self._in_one_call(lib.tw_one_shot, x)

    def _in_one_call(self, kernel: Callable[..., int], x: Tensor) -> Tensor:
        self._turns.check_open()
        self._announce()
        out = torch.empty_like(x)
        given = self._board, x.data_ptr(), out.data_ptr(), x.numel(), NUMBER_KIND[x.dtype]
        status = kernel(*given, 0)
        if status != DONE:
            self._turns.run(partial(kernel, *given), status)
        return out

    def flash(self, x: Tensor, reduce_codec: Codec, gather_codec: Codec) -> Tensor:
        """Raises ValueError when the segment's buffers do not hold one group of each rank's slice."""
        if reduce_codec.exact and gather_codec.exact:
            return self._in_one_call(lib.tw_two_shot, x)
        dtype, names = x.dtype, f"{reduce_codec.name},{gather_codec.name}".encode()
        call = call_word(FLASH, NUMBER_KIND[dtype], x.numel(), crc32(names) & 0xFFFF)
        result = torch.empty_like(x)
        step = self._flash_step(reduce_codec, gather_codec, dtype)
        for chunk, out in zip(x.view(-1).split(step), result.view(-1).split(step), strict=True):
            self._flash_chunk(chunk, out, call, reduce_codec, gather_codec)
        return result

    def _flash_chunk(self, x_N: Tensor, out_N: Tensor, call: int, reduce_codec: Codec, gather_codec: Codec) -> None:
        """Run two turns: the first carries encoded slices, the second encoded sums."""
        turns, dtype, coding = self._turns, x_N.dtype, self._turns.ledger.coding
        multiple = max(reduce_codec.group_elems, gather_codec.group_elems)  # both are powers of two
        lengths = slice_lengths(x_N.numel(), turns.world_size, multiple)
        sizes = [reduce_codec.wire_bytes(length, dtype.itemsize) for length in lengths]
        buffer, start = turns.open_turn(), 0
        with coding:
            for part, size in zip(x_N.split(lengths), sizes, strict=True):
                if size:
                    reduce_codec.encode(part, buffer[start : start + size])
                    start += size
        turns.publish_turn(call)

        own, start = lengths[turns.rank], sum(sizes[: turns.rank])
        received = [buffer[start : start + sizes[turns.rank]] for buffer in turns.read_turn(call)]
        buffer = turns.open_turn()
        if own:
            with coding:
                own_sum = sum_and_encode(received, own, reduce_codec, gather_codec, dtype).view(torch.uint8)
                buffer[: own_sum.numel()].copy_(own_sum)
        turns.publish_turn(call)

        buffers = turns.read_turn(call)
        with coding:
            for buffer, part in zip(buffers, out_N.split(lengths), strict=True):
                if num := part.numel():
                    gather_codec.decode(buffer[: gather_codec.wire_bytes(num, dtype.itemsize)], num, dtype, part)

    def _flash_step(self, reduce_codec: Codec, gather_codec: Codec, dtype: torch.dtype) -> int:
        """Elements of a chunk: whole groups for every rank, whose encoding fits in a buffer."""
        world_size, capacity = self._turns.world_size, self._turns.board.chunk_bytes
        group_elems = max(reduce_codec.group_elems, gather_codec.group_elems, 64)
        group_bytes = max(codec.wire_bytes(group_elems, dtype.itemsize) for codec in (reduce_codec, gather_codec))
        num_groups = min(_FLASH_CHUNK_ELEMS // (world_size * group_elems), capacity // (world_size * group_bytes))
        if num_groups == 0:
            raise ValueError(
                f"flash over {world_size} ranks needs {world_size * group_bytes} bytes in a buffer of the segment, "
                f"which has {capacity}; make the segment with larger chunks"
            )
        return num_groups * world_size * group_elems


class SharedSums:
    """One-shot sums that a caller's kernel runs by itself over a segment: the ``KernelSums`` of ranks that share memory.

    The kernel's side is ``tw_make_sum`` (kernels/cpu/native). This side counts in the ledger and in the bytes sent when
    all sums are done, and handles a sum that waits too long: deadlines, lost peers and mismatched calls.
    """

    def __init__(self, turns: SharedTurns) -> None:
        self._turns = turns
        self._note = turns.board.announcement(_OP, _ALGORITHM)
        self._note_words = self._note.numpy().view(np.int64)
        self._sums: Any = None  # a ``tw_sums *``
        self._stamps_ns = np.empty((0, 2), dtype=np.int64)
        self._given: tuple[Any, ...] = ()  # arguments of ``tw_one_shot``
        self._tensors: tuple[Tensor, ...] = ()  # keeps alive the tensors whose addresses the kernel has

    def begin(self, x: Tensor, out: Tensor, phase: str, sites: Sequence[str]) -> Any:
        turns, board, ledger = self._turns, self._turns.board, self._turns.ledger
        turns.check_open()
        num_before, num_bytes = ledger.number, x.nbytes
        self._note_words[:2] = num_before, num_bytes
        board.forget_announced()
        self._tensors = x, out
        self._given = board.native, x.data_ptr(), out.data_ptr(), x.numel(), NUMBER_KIND[x.dtype]
        # A new array each time: a thread that ends a recording may still read the last one.
        self._stamps_ns = stamps_ns = np.zeros((len(sites), 2), dtype=np.int64)
        note = self._note.data_ptr(), board.announced_at, self._note.numel()
        self._sums = struct("tw_sums", (*self._given, *note, stamps_ns.ctypes.data, DONE, 0, 0))
        words = np.frombuffer(ffi.buffer(self._sums), dtype=np.int64)
        ledger.begin_series(
            Series(
                op=_OP,
                algorithm=_ALGORITHM,
                phase=phase,
                num_bytes=num_bytes,
                bytes_sent=(turns.world_size - 1) * num_bytes,
                sites=sites,
                first_number=num_before,
                progress=words[-2:],  # num_begun and num_done
                stamps_ns=stamps_ns,
            )
        )
        return self._sums

    def wait(self) -> int:
        sums = self._sums
        if sums.status != DONE:
            self._turns.run(partial(lib.tw_one_shot, *self._given), sums.status)
            self._stamps_ns[sums.num_done, 1] = perf_counter_ns()
            sums.status = DONE
            sums.num_done += 1
        return sums.num_done

    def end(self) -> None:
        self._turns.bytes_sent += self._turns.ledger.end_series()
