"""A transport for processes of one host that share memory: no system call while all ranks arrive in time.

A rank copies its message into its own part of the segment and increments its turn; the others poll the turn and copy
the message out. Correctness: turn n overwrites turn n - 2, after this rank has seen every other at n - 1; a rank
publishes n - 1 after its reads of n - 2. A rank that reads turn n finds it complete, because its owner increments the
turn after the last byte, with release and acquire order (kernels/cpu/native/shared_sums.cpp). Long messages take
several turns, and all ranks take the same number: the largest size, which all know or read in the first turn, decides.
"""

from collections.abc import Sequence

from torch import Tensor

from tightwire.comm.errors import CommError
from tightwire.comm.protocols import FusedAllReduce, Moved, nothing_told
from tightwire.comm.transport.process_group import ProcessGroupTransport
from tightwire.comm.transport.shared_all_reduce import SharedAllReduce
from tightwire.comm.transport.shared_board import BARRIER, EXCHANGE, GATHER, SHIFT, SharedTurns
from tightwire.kernels.cpu.shared_sums import call_word


class SharedMemoryTransport(SharedTurns):
    """One rank's end of a segment (``comm.transport.segment``). ``library`` runs its own all-reduce, for ``native``."""

    def __init__(self, fd: int, library: ProcessGroupTransport) -> None:
        super().__init__(fd, library.rank, library.world_size, library.timeout_s, library.ledger)
        self.fused: FusedAllReduce | None = SharedAllReduce(self)
        self._library = library
        self._others = self.board.others
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
            for peer in self._others:
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
            for peer in self._others:
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

    def all_reduce(self, x: Tensor) -> Tensor:
        self.board.announce()
        sent_before = self._library.bytes_sent
        try:
            result = self._library.all_reduce(x)
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
        """Write the pieces one after the other into the next turn's buffer, then publish the turn.

        ``size``: of the whole message, for calls where ranks do not know each other's sizes.
        """
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
