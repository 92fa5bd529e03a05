"""One-shot sums that a caller's kernel runs by itself over a segment: ``KernelSums`` of ranks that share memory.

``kernels.cpu.shared_sums`` is the kernel's side. This side counts in the ledger and in the bytes sent when all sums are done,
and handles a sum that waits too long: deadlines, lost peers and mismatched calls.
"""

from collections.abc import Sequence
from functools import partial
from time import perf_counter_ns

import numpy as np
from torch import Tensor

from tightwire.comm.ledger.series import Series
from tightwire.comm.transport.shared_turns import SharedTurns
from tightwire.kernels.cpu import shared_sums as place
from tightwire.kernels.cpu.shared_all_reduce import DONE, one_shot
from tightwire.kernels.cpu.vector.simd import NUMBER_KIND

_OP, _ALGORITHM = "all_reduce", "one-shot"  # the ledger's names


class SharedSums:
    """Runs its sums on ``turns``, which the transport's messages use too."""

    def __init__(self, turns: SharedTurns) -> None:
        self._turns = turns
        self._note = turns.board.announcement(_OP, _ALGORITHM)
        self._note_words = self._note.numpy().view(np.int64)
        self._table = np.empty(0, dtype=np.int64)
        self._stamps_ns = np.empty((0, 2), dtype=np.int64)
        self._given: tuple[int, ...] = ()
        self._tensors: tuple[Tensor, ...] = ()  # keeps alive the tensors whose addresses are in the table

    def begin(self, x: Tensor, out: Tensor, sites: Sequence[str]) -> int:
        turns, board, ledger = self._turns, self._turns.board, self._turns.ledger
        turns.check_open()
        num_before, num_bytes = ledger.number, x.nbytes
        self._note_words[:2] = num_before, num_bytes
        board.forget_announced()
        self._tensors = x, out
        self._given = board.table, x.data_ptr(), out.data_ptr(), x.numel(), NUMBER_KIND[x.dtype]
        # A new array each time: a thread that ends a recording may still read the last one.
        self._stamps_ns = stamps_ns = np.zeros((len(sites), 2), dtype=np.int64)
        values = {
            **dict(zip((place.BOARD, place.X, place.OUT, place.NUM_ELEMS, place.KIND), self._given, strict=True)),
            place.NOTE: self._note.data_ptr(),
            place.SHOWN: board.announced_at,
            place.NOTE_BYTES: self._note.numel(),
            place.STAMPS: stamps_ns.ctypes.data,
            place.STATUS: DONE,
            place.NUM_BEGUN: 0,
            place.NUM_DONE: 0,
        }
        self._table = table = np.array([values[field] for field in range(place.SUMS_INTS)], dtype=np.int64)
        ledger.begin_series(
            Series(
                op=_OP,
                algorithm=_ALGORITHM,
                num_bytes=num_bytes,
                bytes_sent=(turns.world_size - 1) * num_bytes,
                sites=sites,
                first_number=num_before,
                progress=table[place.NUM_BEGUN : place.NUM_DONE + 1],
                stamps_ns=stamps_ns,
            )
        )
        return table.ctypes.data

    def wait(self) -> int:
        table, status = self._table, int(self._table[place.STATUS])
        if status != DONE:
            self._turns.run(partial(one_shot, *self._given), status)
            self._stamps_ns[table[place.NUM_DONE], 1] = perf_counter_ns()
            table[place.STATUS] = DONE
            table[place.NUM_DONE] += 1
        return int(table[place.NUM_DONE])

    def end(self) -> None:
        self._turns.bytes_sent += self._turns.ledger.end_series()
