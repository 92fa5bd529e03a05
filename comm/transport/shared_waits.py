"""Opens, publishes and reads turns of a shared board, with a deadline for every wait and errors that name ranks.

``SharedTurns`` is the base of the shared-memory transport. AllReduces that run in one kernel use the same turns.
"""

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from tightwire.comm.errors import CollectiveMismatchError, CollectiveTimeoutError, CommError, PeerLostError, name_ranks
from tightwire.comm.ledger.ledger import Ledger
from tightwire.comm.transport.shared_board import FAILED, LEFT, MISMATCHED, SharedBoard
from tightwire.kernels.cpu.library import lib
from tightwire.kernels.cpu.shared_sums import DONE, MISMATCH

# The longest wait after a mismatched call for the other ranks, to find the rank whose call differs.
_GRACE_S = 1.0
_GRACE_SHARE = 0.2


class SharedTurns:
    """One rank's turns. Every failure raises CommError and ends the group, because messages may be half read.

    ``ledger``: the group's; errors quote its running collective and those of the other ranks.
    """

    def __init__(self, fd: int, rank: int, world_size: int, timeout_s: float, ledger: Ledger) -> None:
        self.rank, self.world_size = rank, world_size
        self.bytes_sent = 0
        self.board = SharedBoard(fd, rank, world_size, ledger)
        self._timeout_s, self.ledger = timeout_s, ledger
        self._failure: CommError | None = None

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
        self._failure = self._failure or CommError(f"rank {self.rank}: this group is closed")

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
            self._fail(CollectiveTimeoutError, "timed out waiting for", absent, f"waited {self._timeout_s:g} s")

    def _fail_without(self, gone: Sequence[int]) -> None:
        """Blame the ranks that died or left; if all that are gone failed themselves, blame the ranks they waited for."""
        board = self.board
        if mismatched := [peer for peer in gone if board.why_closed(peer) == MISMATCHED]:
            self.fail_by_mismatch(min(board.turn(peer) for peer in mismatched))
        absent = board.absent()
        failed = [peer for peer in absent if board.why_closed(peer) == FAILED]
        lost = [peer for peer in absent if peer not in failed and board.is_gone(peer)]
        if lost:
            self._fail(PeerLostError, "lost", lost, "the process died or closed its group")
        silent = [peer for peer in absent if peer not in failed]
        reason = f"{name_ranks(gone)} gave up waiting"
        self._fail(CollectiveTimeoutError, "timed out waiting for", silent or failed, reason)

    def fail_by_mismatch(self, turn: int | None = None) -> None:
        """Raise the error for different calls in ``turn`` (None: this rank's turn)."""
        board = self.board
        turn = board.own_turn if turn is None else turn
        deadline = time.monotonic() + min(_GRACE_S, _GRACE_SHARE * self._timeout_s)
        while not lib.tw_wait_for_all(board.native, turn) and time.monotonic() < deadline:
            pass
        self._failure = CollectiveMismatchError(
            f"rank {self.rank} of {self.world_size}: the ranks called different collectives: {board.last_collectives(turn)}",
            board.mismatched(turn),
        )
        board.mark_closed(MISMATCHED)
        self.close()
        raise self._failure

    def _fail(self, error: type[CommError], verb: str, ranks: Sequence[int], reason: str) -> None:
        """Close the group and raise: messages may be half read, so the group cannot be used any more."""
        self._failure = error(
            f"rank {self.rank} {verb} {name_ranks(ranks)} of {self.world_size} in {self.ledger.current() or 'a barrier'}: "
            f"{reason}. Last collectives: {self.board.last_collectives()}",
            ranks,
        )
        self.close()
        raise self._failure
