"""One-shots over a segment that a kernel of the caller's makes by itself: ``KernelSums`` of ranks that share memory.

``kernels.shared_sums`` is the kernel's side. Here is what Python has to do with them: the ledger's count and the bytes sent
when all are made, and while one of them waits too long what a wait means anywhere on the board.
"""

from collections.abc import Sequence
from functools import partial
from time import perf_counter_ns

import numpy as np
import torch
from torch import Tensor

from tightwire.comm.series import Series
from tightwire.comm.transport.shared_turns import SharedTurns
from tightwire.kernels import shared_sums as place
from tightwire.kernels.shared_all_reduce import DONE, one_shot
from tightwire.kernels.simd import NUMBER_KIND

_OP, _ALGORITHM = "all_reduce", "one-shot"  # as the ledger knows them


class SharedSums:
    """Takes the turns of ``turns``, between its messages."""

    def __init__(self, turns: SharedTurns) -> None:
        self._turns = turns
        self._note = turns.board.announcement(_OP, _ALGORITHM)
        self._table = np.empty(0, dtype=np.int64)
        self._stamps = np.empty((0, 2), dtype=np.int64)
        self._tensors: tuple[Tensor, ...] = ()  # kept alive as long as the table has their addresses

    def begin(self, x: Tensor, out: Tensor, sites: Sequence[str]) -> int:
        turns, board, ledger = self._turns, self._turns.board, self._turns.ledger
        turns.check_open()
        self._tensors = x, out
        # New ones each time: threads that record may still read the last.
        self._stamps = np.zeros((len(sites), 2), dtype=np.int64)
        self._table = table = np.zeros(place.SUMS_INTS, dtype=np.int64)
        table[place.BOARD : place.KIND + 1] = self._given = (
            board.table,
            x.data_ptr(),
            out.data_ptr(),
            x.numel(),
            NUMBER_KIND[x.dtype],
        )
        table[place.NOTE], table[place.SHOWN], table[place.NOTE_BYTES] = (
            self._note.data_ptr(),
            board.announced_at,
            self._note.numel(),
        )
        table[place.STAMPS], table[place.STATUS] = self._stamps.ctypes.data, DONE
        self._note.view(torch.int64)[:2] = torch.tensor([ledger.number, x.nbytes])
        board.forget_announced()
        ledger.begin_series(
            Series(
                op=_OP,
                algorithm=_ALGORITHM,
                num_bytes=x.nbytes,
                bytes_sent=(turns.world_size - 1) * x.nbytes,
                sites=sites,
                first_number=ledger.number,
                progress=table[place.NUM_BEGUN : place.NUM_DONE + 1],
                stamps_ns=self._stamps,
            )
        )
        return table.ctypes.data

    def wait(self) -> int:
        table, status = self._table, int(self._table[place.STATUS])
        if status != DONE:
            self._turns.run(partial(one_shot, *self._given), status)
            self._stamps[table[place.NUM_DONE], 1] = perf_counter_ns()
            table[place.STATUS] = DONE
            table[place.NUM_DONE] += 1
        return int(table[place.NUM_DONE])

    def end(self) -> None:
        turns, (x, _) = self._turns, self._tensors
        turns.bytes_sent += int(self._table[place.NUM_DONE]) * (turns.world_size - 1) * x.nbytes
        turns.ledger.end_series()
