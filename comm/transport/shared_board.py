"""The header of a shared segment: each rank publishes its turn, its current call and whether it still takes part.

A rank's part of the header, in words of 8 bytes (a cache line is 8 of them):

    0        its turn, incremented after each write; other ranks poll it
    1, 2     its call, one word for even and one for odd turns: all must match (``kernels.cpu.shared_sums``)
    3, 4     the size of its message, the same way, for calls where ranks do not know each other's sizes
    16, 17   its process id; the reason why it stopped taking part, or 0
    32, 33   its latest collective: number, bytes; then, from word 34 to the end, the name

The header is plain memory, so other ranks can read it when a rank is stopped or dead. ``SharedTurns`` waits for turns, with
deadlines and errors that name ranks; the transport and the AllReduces that run in one kernel use it.
"""

import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tightwire.comm import errors
from tightwire.comm.ledger.ledger import Ledger
from tightwire.comm.transport.process_group import ProcessGroupTransport
from tightwire.comm.transport.segment import RANK_BYTES, header_bytes
from tightwire.kernels.cpu.library import lib
from tightwire.kernels.cpu.run import NUMBER_KIND
from tightwire.kernels.cpu.shared_sums import CALLS, DONE, MISMATCH, TURN, call_of, make_board, wake_on_time

# Why a rank stopped: it left, it failed because another rank failed, or the ranks called different collectives.
LEFT, FAILED, MISMATCHED = 1, 2, 3

# Operations of a call in addition to the kernels' own, and the names of all in messages.
FLASH, EXCHANGE, GATHER, SHIFT, BARRIER = range(3, 8)
_OPERATIONS = ("", "one-shot", "two-shot", "flash", "exchange", "gather", "shift", "barrier")
_DTYPES = {kind: str(dtype).removeprefix("torch.") for dtype, kind in NUMBER_KIND.items()}

_SIZES, _PID, _CLOSED, _NUMBER, _NUM_BYTES, _NAME = 3, 16, 17, 32, 33, 34
_NAME_BYTES = RANK_BYTES - 8 * _NAME

# Polling another rank's turn takes about 2 ns while it does not change. A rank with its own core polls for 10 us before it
# makes system calls; a rank that shares its core yields at once.
_NUM_SPINS = 5000
_NUM_NAPS = 100  # about 15 us each, before a kernel returns to check the clock and the peers
# Bytes that a fused kernel moves in a turn: two buffers of each size and the result fit in a core's second-level cache.
_FUSED_CHUNK_BYTES = 256 << 10


class SharedBoard:
    """One rank's view of a segment. Raises ValueError: another process has registered as this rank."""

    def __init__(self, fd: int, rank: int, world_size: int, ledger: Ledger) -> None:
        self.rank, self.world_size = rank, world_size
        self.others = [(rank + i) % world_size for i in range(1, world_size)]
        self._ledger = ledger
        self._announced: object = None
        self._announced_name: tuple[str, str] | None = None
        memory = mmap.mmap(fd, 0)
        start = header_bytes(world_size)
        self.chunk_bytes = (len(memory) - start) // (2 * world_size)
        self._bytes = memoryview(memory)[: world_size * RANK_BYTES]
        self._words = self._bytes.cast("q", (world_size, RANK_BYTES // 8))
        if self._words[rank, _PID]:
            raise ValueError(f"this segment already has a rank {rank}; each group needs its own segment")
        chunks = torch.frombuffer(memory, dtype=torch.uint8, offset=start).view(world_size, 2, self.chunk_bytes)
        self._chunks = [(chunks[peer, 0], chunks[peer, 1]) for peer in range(world_size)]
        base = chunks.data_ptr() - start
        places = [
            (base + peer * RANK_BYTES, (even.data_ptr(), odd.data_ptr()))
            for peer, (even, odd) in enumerate(self._chunks)
        ]
        num_spins = 1 if world_size > len(os.sched_getaffinity(0)) else _NUM_SPINS
        fused_bytes = min(self.chunk_bytes, _FUSED_CHUNK_BYTES)
        # The kernels' argument.
        self.native = make_board(rank, places, num_spins=num_spins, num_naps=_NUM_NAPS, chunk_bytes=fused_bytes)
        self.announced_at = base + rank * RANK_BYTES + 8 * _NUMBER
        self._words[rank, _PID] = os.getpid()
        wake_on_time()

    def turn(self, peer: int) -> int:
        return self._words[peer, TURN]

    @property
    def own_turn(self) -> int:
        return self._words[self.rank, TURN]

    def chunk(self, peer: int, turn: int) -> Tensor:
        """(chunk_bytes,) uint8: the buffer that ``peer`` writes in ``turn``."""
        return self._chunks[peer][turn & 1]

    def call(self, peer: int, turn: int) -> int:
        """The call of ``peer`` in ``turn``, which it has published."""
        return self._words[peer, CALLS + (turn & 1)]

    def size(self, peer: int, turn: int) -> int:
        return self._words[peer, _SIZES + (turn & 1)]

    def set_size(self, turn: int, size: int) -> None:
        self._words[self.rank, _SIZES + (turn & 1)] = size

    def announce(self) -> None:
        """Publish the collective that the ledger reports as running. Cheap when it is already published."""
        begun = self._ledger.begun
        if begun is None or begun is self._announced:
            return
        self._announced = begun
        op, algorithm, num_bytes, number, *_ = begun
        words, rank = self._words, self.rank
        words[rank, _NUMBER], words[rank, _NUM_BYTES] = number, num_bytes
        if (op, algorithm) != self._announced_name:
            self._announced_name = op, algorithm
            end = (rank + 1) * RANK_BYTES
            self._bytes[end - _NAME_BYTES : end] = _name_bytes(op, algorithm)

    def announcement(self, op: str, algorithm: str) -> Tensor:
        """(N,) uint8 that a kernel copies to ``announced_at``; the caller writes number and bytes into two words."""
        note = torch.zeros(RANK_BYTES - 8 * _NUMBER, dtype=torch.uint8)
        note[8 * (_NAME - _NUMBER) :] = torch.frombuffer(bytearray(_name_bytes(op, algorithm)), dtype=torch.uint8)
        return note

    def forget_announced(self) -> None:
        """Make the next ``announce`` write everything, because a kernel announces other collectives."""
        self._announced = self._announced_name = None

    def mark_closed(self, reason: int) -> None:
        """Tell the others that this rank stops taking part; the first reason stays."""
        if not self._words[self.rank, _CLOSED]:
            self._words[self.rank, _CLOSED] = reason

    def why_closed(self, peer: int) -> int:
        return self._words[peer, _CLOSED]

    def is_gone(self, peer: int) -> bool:
        return bool(self.why_closed(peer)) or not _is_alive(self._words[peer, _PID])

    def absent(self) -> list[int]:
        """The ranks that have not published this rank's turn: failed or slower."""
        turn = self.own_turn
        return [peer for peer in self.others if self.turn(peer) < turn]

    def mismatched(self, turn: int) -> list[int]:
        """The ranks whose call in ``turn`` differs from the majority's; all that have arrived when there is no majority."""
        arrived = [peer for peer in range(self.world_size) if self.turn(peer) >= turn]
        return errors.unlike_most({peer: (*self._latest(peer)[:2], self.call(peer, turn)) for peer in arrived})

    def last_collectives(self, turn: int | None = None) -> str:
        """Each rank's latest collective, such as ``rank 0: all_reduce ring 1152 B, #7``; with its call in ``turn``."""
        return "; ".join(f"rank {peer}: {self._describe(peer, turn)}" for peer in range(self.world_size))

    def _describe(self, peer: int, turn: int | None) -> str:
        name, num_bytes, number = self._latest(peer)
        words = f"{name} {num_bytes} B, #{number}" if number else "no collective yet"
        if reason := self.why_closed(peer):
            words += ", left" if reason == LEFT else ", gave up"
        elif not _is_alive(self._words[peer, _PID]):
            words += ", died"
        if turn is None or self.turn(peer) < turn:
            return words
        return f"{words} ({_call_in_words(self.call(peer, turn))})"

    def _latest(self, peer: int) -> tuple[str, int, int]:
        end = (peer + 1) * RANK_BYTES
        name = bytes(self._bytes[end - _NAME_BYTES : end]).rstrip(b"\0").decode(errors="replace")
        return name, self._words[peer, _NUM_BYTES], self._words[peer, _NUMBER]


def _name_bytes(op: str, algorithm: str) -> bytes:
    return f"{op} {algorithm}".encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")


def _call_in_words(word: int) -> str:
    operation, kind, num_elems = call_of(word)
    unit = _DTYPES[kind] if operation <= FLASH else "bytes"
    return _OPERATIONS[operation] + (f" of {num_elems} {unit}" if operation <= GATHER else "")


def _is_alive(pid: int) -> bool:
    """Whether a process runs; False for one that has ended but was not reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


# The longest wait after a mismatched call for the other ranks, to find the rank whose call differs.
_GRACE_S = 1.0
_GRACE_SHARE = 0.2


class SharedTurns:
    """One rank's turns. Every failure raises CommError and ends the group, because messages may be half read.

    Errors quote the running collective in the group's ``ledger`` and those of the other ranks.
    """

    def __init__(self, fd: int, library: ProcessGroupTransport) -> None:
        self.rank, self.world_size, self._numbered = library.rank, library.world_size, library.numbered
        self.bytes_sent = 0
        self.board = SharedBoard(fd, library.rank, library.world_size, library.ledger)
        self._timeout_s, self.ledger = library.timeout_s, library.ledger
        self._failure: errors.CommError | None = None

    def open_turn(self) -> Tensor:
        """Return this rank's buffer of the next turn once no rank reads it any more."""
        self.check_open()
        board = self.board
        board.announce()
        turn = board.own_turn
        self._await(lambda: lib.tw_wait_for_all(board.native, turn))
        return board.chunk(self.rank, turn + 1)

    def publish_turn(self, call: int) -> None:
        lib.tw_publish(self.board.native, self.board.own_turn + 1, call)

    def read_turn(self, call: int) -> list[Tensor]:
        """Return the buffers of all ranks once all have published this turn for the same call."""
        self.await_all(call)
        turn = self.board.own_turn
        return [self.board.chunk(peer, turn) for peer in range(self.world_size)]

    def run(self, kernel: Callable[[int], int], status: int) -> None:
        """Call ``kernel`` again with the step it returned until it is done; ``status`` is its first result."""
        deadline = time.monotonic() + self._timeout_s
        while status != DONE:
            if status == MISMATCH:
                self.fail_by_mismatch()
            self._check_peers(deadline)
            step, status = status, kernel(status)
            if status != step:
                deadline = time.monotonic() + self._timeout_s

    def check_open(self) -> None:
        if self._failure is not None:
            raise self._failure

    def await_one(self, peer: int, call: int) -> None:
        board, turn = self.board, self.board.own_turn
        self._await(lambda: lib.tw_wait_for(board.native, peer, turn))
        if board.call(peer, turn) != call:
            self.fail_by_mismatch()

    def await_all(self, call: int) -> None:
        """Wait until all ranks have published this turn, for the same call."""
        board, turn = self.board, self.board.own_turn
        self._await(lambda: lib.tw_wait_for_all(board.native, turn))
        if any(board.call(peer, turn) != call for peer in self.board.others):
            self.fail_by_mismatch()

    def close(self) -> None:
        """Tell the others, which fail at once if they wait for this rank. The memory is freed with its last user."""
        self.board.mark_closed(LEFT if self._failure is None else FAILED)
        self._failure = self._failure or errors.CommError(f"rank {self.rank}: this group is closed")

    def _await(self, has_arrived: Callable[[], bool]) -> None:
        """Wait until ``has_arrived``, which itself waits briefly, checking the clock and the peers in between."""
        if has_arrived():
            return
        deadline = time.monotonic() + self._timeout_s
        while not has_arrived():
            self._check_peers(deadline)

    def _check_peers(self, deadline: float) -> None:
        """Raise if the deadline has passed, an absent rank is gone, or another thread has closed this rank's end."""
        self.check_open()
        board = self.board
        gone = [peer for peer in board.absent() if board.is_gone(peer)]
        gone = [peer for peer in board.absent() if peer in gone]  # a peer may have published before it ended
        if gone:
            self._fail_without(gone)
        if time.monotonic() > deadline and (absent := board.absent()):
            self._fail(errors.CollectiveTimeoutError, "timed out waiting for", absent, f"waited {self._timeout_s:g} s")

    def _fail_without(self, gone: Sequence[int]) -> None:
        """Blame the ranks that died or left; if all that are gone failed themselves, blame the ranks they waited for."""
        board = self.board
        if mismatched := [peer for peer in gone if board.why_closed(peer) == MISMATCHED]:
            self.fail_by_mismatch(min(board.turn(peer) for peer in mismatched))
        absent = board.absent()
        failed = [peer for peer in absent if board.why_closed(peer) == FAILED]
        lost = [peer for peer in absent if peer not in failed and board.is_gone(peer)]
        if lost:
            self._fail(errors.PeerLostError, "lost", lost, "the process died or closed its group")
        silent = [peer for peer in absent if peer not in failed]
        reason = f"{errors.name_ranks(gone)} gave up waiting"
        self._fail(errors.CollectiveTimeoutError, "timed out waiting for", silent or failed, reason)

    def fail_by_mismatch(self, turn: int | None = None) -> None:
        """Raise the error for different calls in ``turn``, by default this rank's turn."""
        board = self.board
        turn = board.own_turn if turn is None else turn
        deadline = time.monotonic() + min(_GRACE_S, _GRACE_SHARE * self._timeout_s)
        while not lib.tw_wait_for_all(board.native, turn) and time.monotonic() < deadline:
            pass
        text = f"rank {self.rank} of {self.world_size}: the ranks called different collectives: {board.last_collectives(turn)}"
        self._failure = self._numbered(errors.CollectiveMismatchError(text, board.mismatched(turn)))
        board.mark_closed(MISMATCHED)
        self.close()
        raise self._failure

    def _fail(self, error: type[errors.CommError], verb: str, ranks: Sequence[int], reason: str) -> None:
        """Close the group and raise: messages may be half read, so the group cannot be used any more."""
        during = self.ledger.current() or "a barrier"
        text = f"rank {self.rank} {verb} {errors.name_ranks(ranks)} of {self.world_size} in {during}: {reason}. "
        text += f"Last collectives: {self.board.last_collectives()}"
        self._failure = self._numbered(error(text, ranks))
        self.close()
        raise self._failure
