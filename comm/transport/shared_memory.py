"""Ranks as processes of one host that share memory: no system call while all come in time.

A rank copies its message into its own part of the segment and raises its sequence number; the others poll that number
and copy the message out. Two buffers alternate: a rank reuses one only when all others have published their next
message, which they do after reading this one, so no second round of waiting is needed.

Why that is enough: turn n is written over turn n - 2, after this rank has seen every other at n - 1; a rank publishes
n - 1 after its reads of n - 2. A rank that reads turn n finds it whole, because its owner raises the number after the
last byte, and x86 shows stores in the order they were made. Messages longer than a buffer take several turns, and all
ranks take equally many: the largest size, which all know or are told in the first turn, decides.

Polling yields the core to whoever needs it, so more ranks than cores make progress. Every wait has a deadline and
notices a peer that closed its group or died.
"""

import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tightwire.comm.errors import CollectiveTimeoutError, CommError, PeerLostError, name_ranks
from tightwire.comm.protocols import FusedAllReduce, Transport
from tightwire.comm.segment import WORDS_PER_LINE, header_bytes

# Words of a rank's line.
_SEQUENCE, _PID, _CLOSED, _SIZES = 0, 1, 2, 3  # two sizes, which alternate as the buffers do
# What _CLOSED says of a rank that takes part no more: it left, or it failed for want of another.
_LEFT, _FAILED = 1, 2

_SPINS = 50  # polls before the core is offered to others: about 5 us
_YIELDS_PER_LOOK = 256  # offers between two looks at the clock and at the peers


class SharedMemoryTransport:
    """One rank's end of a segment (``comm.segment``). ``library`` does what only it can: its own all-reduce."""

    def __init__(
        self,
        fd: int,
        *,
        rank: int,
        world_size: int,
        library: Transport,
        timeout_s: float,
        describe: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.bytes_sent = 0
        self.fused: FusedAllReduce | None = None
        self._library, self._timeout_s, self._describe = library, timeout_s, describe
        memory = mmap.mmap(fd, 0)
        start = header_bytes(world_size)
        self._chunk_bytes = (len(memory) - start) // (2 * world_size)
        self._words = memoryview(memory)[:start].cast("q")
        chunks = torch.frombuffer(memory, dtype=torch.uint8, offset=start).view(world_size, 2, self._chunk_bytes)
        self._chunks = [(chunks[peer, 0], chunks[peer, 1]) for peer in range(world_size)]
        self._others = [(rank + i) % world_size for i in range(1, world_size)]
        self._sequence = 0
        self._line = rank * WORDS_PER_LINE
        self._failure: CommError | None = None
        if self._words[self._line + _PID]:
            raise ValueError(f"this segment already carries a group's rank {rank}; each group needs one of its own")
        self._words[self._line + _PID] = os.getpid()
        library.barrier()  # all have signed in, and gloo's connections are made before the first collective

    def exchange(self, slices: Sequence[Tensor]) -> list[Tensor]:
        sizes = [part.numel() for part in slices]
        own = sizes[self.rank]
        received = [part.new_empty(own) for part in slices]
        received[self.rank] = slices[self.rank]
        step = self._chunk_bytes // self.world_size
        for start in range(0, max(sizes), step):
            pieces = [part[start : start + step] for part in slices]
            offset = sum(piece.numel() for piece in pieces[: self.rank])
            self._publish(pieces)
            for peer in self._others:
                target = received[peer][start : start + step]
                self._read(peer, target, offset)
        self.bytes_sent += sum(sizes) - own
        return received

    def gather(self, buf: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        lengths = [buf.numel()] * self.world_size if sizes is None else sizes
        received = [buf if peer == self.rank else buf.new_empty(lengths[peer]) for peer in range(self.world_size)]
        step = self._chunk_bytes
        for start in range(0, max(lengths), step):
            self._publish([buf[start : start + step]])
            for peer in self._others:
                self._read(peer, received[peer][start : start + step])
        self.bytes_sent += (self.world_size - 1) * buf.numel()
        return received

    def shift(self, buf: Tensor, recv_bytes: int | None = None) -> Tensor:
        received = buf.new_empty(buf.numel() if recv_bytes is None else recv_bytes)
        before, step = (self.rank - 1) % self.world_size, self._chunk_bytes
        start = largest = 0
        while start <= largest:
            self._publish([buf[start : start + step]], size=buf.numel())
            self._read(before, received[start : start + step])
            if start == 0:
                # Ranks may send unlike sizes, but all must publish equally often: the largest message decides.
                largest = max(0, *map(self._size_of, range(self.world_size))) - 1
            start += step
        self.bytes_sent += buf.numel()
        return received

    def all_reduce(self, x: Tensor) -> Tensor:
        sent_before = self._library.bytes_sent
        result = self._library.all_reduce(x)
        self.bytes_sent += self._library.bytes_sent - sent_before
        return result

    def barrier(self) -> None:
        self._publish([])
        for peer in self._others:
            self._await(peer, self._sequence)

    def close(self) -> None:
        """Tell the others, who fail at once if they wait for this rank. The memory goes with its last holder."""
        if not self._words[self._line + _CLOSED]:
            self._words[self._line + _CLOSED] = _FAILED if self._failure else _LEFT
        self._failure = self._failure or CommError(f"rank {self.rank}: this group is closed")
        self._library.close()

    def _publish(self, pieces: Sequence[Tensor], size: int = 0) -> None:
        """Write the pieces one after the other into this turn's buffer, then say that they are there.

        ``size`` is for ``_size_of``: that of the whole message, where ranks do not know each other's.
        """
        if self._failure is not None:
            raise self._failure
        for peer in self._others:
            self._await(peer, self._sequence)  # it has read what this turn's buffer holds from two turns ago
        self._sequence += 1
        chunk, offset = self._chunks[self.rank][self._sequence & 1], 0
        for piece in pieces:
            if length := piece.numel():
                chunk[offset : offset + length].copy_(piece)
                offset += length
        self._words[self._line + _SIZES + (self._sequence & 1)] = size
        self._words[self._line + _SEQUENCE] = self._sequence

    def _read(self, peer: int, target: Tensor, offset: int = 0) -> None:
        """Copy out what ``peer`` published this turn."""
        self._await(peer, self._sequence)
        if size := target.numel():
            target.copy_(self._chunks[peer][self._sequence & 1][offset : offset + size])

    def _size_of(self, peer: int) -> int:
        """The ``size`` that ``peer`` published this turn."""
        self._await(peer, self._sequence)
        return self._words[peer * WORDS_PER_LINE + _SIZES + (self._sequence & 1)]

    def _await(self, peer: int, sequence: int) -> None:
        words, word = self._words, peer * WORDS_PER_LINE + _SEQUENCE
        for _ in range(_SPINS):
            if words[word] >= sequence:
                return
        deadline = time.monotonic() + self._timeout_s
        while True:
            for _ in range(_YIELDS_PER_LOOK):
                if words[word] >= sequence:
                    return
                os.sched_yield()
            self._look_after(peer, sequence, deadline)

    def _look_after(self, peer: int, sequence: int, deadline: float) -> None:
        """Raise if ``peer`` will not come any more."""
        gone = self._is_gone(peer)
        if self._words[peer * WORDS_PER_LINE + _SEQUENCE] >= sequence:
            return  # it came before it went
        if gone:
            self._fail_without(peer)
        if time.monotonic() > deadline:
            self._fail(CollectiveTimeoutError, "missed", self._absent(), f"waited {self._timeout_s:g} s")

    def _is_gone(self, peer: int) -> bool:
        line = peer * WORDS_PER_LINE
        return bool(self._words[line + _CLOSED]) or not _is_alive(self._words[line + _PID])

    def _absent(self) -> list[int]:
        """Who has not published this turn, at fault or merely slower."""
        return [p for p in self._others if self._words[p * WORDS_PER_LINE + _SEQUENCE] < self._sequence]

    def _fail_without(self, peer: int) -> None:
        """``peer`` is gone. Blame those that died or left; when all who are gone failed themselves, whom they missed."""
        absent = self._absent()
        failed = [p for p in absent if self._words[p * WORDS_PER_LINE + _CLOSED] == _FAILED]
        lost = [p for p in absent if p not in failed and self._is_gone(p)]
        if lost:
            self._fail(PeerLostError, "lost", lost, "the process died or closed its group")
        silent = [p for p in absent if p not in failed]
        self._fail(CollectiveTimeoutError, "missed", silent or failed, f"{name_ranks([peer])} gave up waiting")

    def _fail(self, error: type[CommError], verb: str, ranks: Sequence[int], reason: str) -> None:
        """The first error is the last: messages may have been half read, so the group is of no use any more."""
        doing = self._describe() or "a barrier"
        self._failure = error(
            f"rank {self.rank} {verb} {name_ranks(ranks)} of {self.world_size} in {doing}: {reason}", ranks
        )
        self.close()
        raise self._failure


def _is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended but was not reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False
