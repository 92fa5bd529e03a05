"""A transport for processes of one host that share memory: no system call while all ranks arrive in time.

A rank copies its message into its own part of the segment and increments its turn; the others poll the turn and copy
the message out. Correctness: turn n overwrites turn n - 2, after this rank has seen every other at n - 1; a rank
publishes n - 1 after its reads of n - 2. A rank that reads turn n finds it complete, because its owner increments the
turn after the last byte, with release and acquire order (kernels/cpu/native/shared_sums.cpp). Long messages take
several turns, and all ranks take the same number: the largest size, which all know or read in the first turn, decides.

``SharedAllReduce`` is the ``FusedAllReduce`` of these ranks. One-shot and two-shot are one kernel call each. Flash encodes
into the shared buffers and decodes out of them. Long tensors go in chunks that fit the caches; the chunk boundaries do not
change an element's sum.
"""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any, ParamSpec, TypeVar
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from tightwire.comm.codec.codec import Carried, Codec, slices_for, split_carried, sum_and_encode
from tightwire.comm.errors import CommError
from tightwire.comm.ledger.recording import Series
from tightwire.comm.protocols import FusedAllReduce, KernelSums, Moved, nothing_told
from tightwire.comm.transport.process_group import ProcessGroupTransport
from tightwire.comm.transport.shared_board import BARRIER, EXCHANGE, FLASH, GATHER, SHIFT, SharedTurns
from tightwire.kernels.cpu.library import ffi, lib, struct
from tightwire.kernels.cpu.run import NUMBER_KIND
from tightwire.kernels.cpu.shared_sums import DONE, call_word

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class SharedMemoryTransport(SharedTurns):
    """One rank's end of a segment (``comm.transport.segment``). ``library`` runs its own all-reduce, for ``native``."""

    def __init__(self, fd: int, library: ProcessGroupTransport) -> None:
        super().__init__(fd, library)
        self.fused: FusedAllReduce | None = SharedAllReduce(self)
        self._library = library
        library.barrier()  # all ranks have registered, and gloo's connections exist before the first collective

    def exchange(self, slices: Sequence[Tensor]) -> list[Tensor]:
        sizes = [part.numel() for part in slices]
        own = sizes[self.rank]
        received = [part.new_empty(own) for part in slices]
        received[self.rank] = slices[self.rank]
        step, call = self.board.chunk_bytes // self.world_size, call_word(EXCHANGE, num_elems=sum(sizes))
        for start in range(0, max(sizes), step):
            pieces = [part[start : start + step] for part in slices]
            offset = sum(piece.numel() for piece in pieces[: self.rank])
            self._send(pieces, call)
            for peer in self.board.others:
                self._read(peer, received[peer][start : start + step], offset, call)
        self.bytes_sent += sum(sizes) - own
        return received

    def gather(self, buf: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        lengths = [buf.numel()] * self.world_size if sizes is None else sizes
        received = [buf if peer == self.rank else buf.new_empty(lengths[peer]) for peer in range(self.world_size)]
        self._gather(buf, received, lengths)
        return received

    def gather_into(self, buf: Tensor, out: Tensor, moved: Moved = nothing_told) -> None:
        self._gather(buf, out.view(self.world_size, buf.numel()).unbind(), [buf.numel()] * self.world_size, moved)

    def _gather(
        self, buf: Tensor, parts: Sequence[Tensor], lengths: Sequence[int], moved: Moved = nothing_told
    ) -> None:
        step, call, own = self.board.chunk_bytes, call_word(GATHER, num_elems=sum(lengths)), parts[self.rank]
        for start in range(0, max(lengths), step):
            piece = buf[start : start + step]
            self._send([piece], call)
            if own is not buf:
                own[start : start + step].copy_(piece)
            for peer in self.board.others:
                self._read(peer, parts[peer][start : start + step], 0, call)
            moved(self.world_size * len(piece))
        self.bytes_sent += (self.world_size - 1) * buf.numel()

    def shift(self, buf: Tensor, recv_bytes: int | None = None) -> Tensor:
        received = buf.new_empty(buf.numel() if recv_bytes is None else recv_bytes)
        before, step, call = (self.rank - 1) % self.world_size, self.board.chunk_bytes, call_word(SHIFT)
        start = largest = 0
        while start <= largest:
            self._send([buf[start : start + step]], call, size=buf.numel())
            self._read(before, received[start : start + step], 0, call)
            if start == 0:
                # Ranks may send different sizes, but all must publish equally often: the largest message decides.
                self.await_all(call)
                turn = self.board.own_turn
                largest = max(0, *(self.board.size(peer, turn) for peer in range(self.world_size))) - 1
                if self.board.size(before, turn) != received.numel():
                    self.fail_by_mismatch()
            start += step
        self.bytes_sent += buf.numel()
        return received

    def deliver(self, parts: Sequence[Tensor], recv_bytes: Sequence[int]) -> list[Tensor]:
        return self._by_library(self._library.deliver, parts, recv_bytes)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._by_library(self._library.all_reduce, x)

    def _by_library(self, call: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        self.board.announce()
        sent_before = self._library.bytes_sent
        try:
            result = call(*args, **kwargs)
        except CommError as error:
            self._failure = type(error)(f"{error} Last collectives: {self.board.last_collectives()}", error.ranks)
            self.close()
            raise self._failure from error
        self.bytes_sent += self._library.bytes_sent - sent_before
        return result

    def barrier(self) -> None:
        call = call_word(BARRIER)
        self._send([], call)
        self.await_all(call)

    def close(self) -> None:
        super().close()
        self._library.close()

    def _send(self, pieces: Sequence[Tensor], call: int, size: int = 0) -> None:
        """Write the pieces to the next turn's buffer and publish it, with the message's ``size`` if not all know it."""
        chunk, offset = self.open_turn(), 0
        for piece in pieces:
            if length := piece.numel():
                chunk[offset : offset + length].copy_(piece)
                offset += length
        self.board.set_size(self.board.own_turn + 1, size)
        self.publish_turn(call)

    def _read(self, peer: int, target: Tensor, offset: int, call: int) -> None:
        self.await_one(peer, call)
        if size := target.numel():
            target.copy_(self.board.chunk(peer, self.board.own_turn)[offset : offset + size])


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

    def flash(self, x: Tensor, reduce_codec: Codec, gather_codec: Codec, carried: Carried = (None, None)) -> Tensor:
        """Raises ValueError when the segment's buffers do not hold one group of each rank's slice."""
        if reduce_codec.exact and gather_codec.exact:
            return self._in_one_call(lib.tw_two_shot, x)
        dtype, names = x.dtype, f"{reduce_codec.name},{gather_codec.name}".encode()
        call = call_word(FLASH, NUMBER_KIND[dtype], x.numel(), crc32(names) & 0xFFFF)
        result = torch.empty_like(x)
        step = self._flash_step(reduce_codec, gather_codec, dtype)
        codecs, x_N, out_N = (reduce_codec, gather_codec), x.view(-1), result.view(-1)
        for start in range(0, x_N.numel(), step):
            part = slice(start, start + step)
            reduce, gather = (None if each is None else each[part] for each in carried)
            self._flash_chunk(x_N[part], out_N[part], call, codecs, (reduce, gather))
        return result

    def _flash_chunk(
        self, x_N: Tensor, out_N: Tensor, call: int, codecs: tuple[Codec, Codec], carried: Carried
    ) -> None:
        """Run two turns: the first carries encoded slices, the second encoded sums."""
        turns, dtype, coding, (reduce_codec, gather_codec) = self._turns, x_N.dtype, self._turns.ledger.coding, codecs
        lengths = slices_for(x_N.numel(), turns.world_size, *codecs)
        sizes = [reduce_codec.wire_bytes(length, dtype.itemsize) for length in lengths]
        buffer, start = turns.open_turn(), 0
        with coding:
            for part, size, lost in zip(
                x_N.split(lengths), sizes, split_carried(carried[0], lengths, reduce_codec), strict=True
            ):
                if size:
                    reduce_codec.encode(part, buffer[start : start + size], lost)
                    start += size
        turns.publish_turn(call)

        own, start = lengths[turns.rank], sum(sizes[: turns.rank])
        received = [buffer[start : start + sizes[turns.rank]] for buffer in turns.read_turn(call)]
        buffer = turns.open_turn()
        if own:
            with coding:
                lost = split_carried(carried[1], lengths, gather_codec)[turns.rank]
                own_sum = sum_and_encode(received, own, *codecs, dtype, lost).view(torch.uint8)
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
    """One-shot sums that a kernel (``tw_make_sum``) runs by itself; this side counts them and handles late ranks."""

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
