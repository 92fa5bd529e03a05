"""Like collectives that a kernel makes one after the other, without Python between them: how far it is, and what was when.

The kernel writes and any thread may read (``kernels.shared_sums``); the ledger counts them when it has returned.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """``sites`` has as many as there are to be. ``first_number``: that of the collective before the first of these."""

    op: str
    algorithm: str
    num_bytes: int  # of each tensor
    bytes_sent: int  # by this rank, for each that is done
    sites: Sequence[str]
    first_number: int
    progress: np.ndarray  # (2,) int64: how many were begun, and how many are done
    stamps_ns: np.ndarray  # (N, 2) int64: of each its begin and its end, on the clock of ``time.perf_counter``

    @property
    def num_begun(self) -> int:
        return int(self.progress[0])

    @property
    def num_done(self) -> int:
        return int(self.progress[1])

    @property
    def current(self) -> tuple[str, str, int, int, float] | None:
        """Op, algorithm, bytes, number and start of the one that runs now; None between them."""
        num_begun = self.num_begun
        return self.nth(num_begun - 1) if num_begun > self.num_done else None

    def nth(self, index: int) -> tuple[str, str, int, int, float]:
        """Op, algorithm, bytes, the ledger's number, and start of one that was begun."""
        return self.op, self.algorithm, self.num_bytes, self.number(index), float(self.stamps_ns[index, 0]) * 1e-9

    def number(self, index: int) -> int:
        return self.first_number + 1 + index

    def starts_s(self) -> list[float]:
        """Of each that is done."""
        return (self.stamps_ns[: self.num_done, 0] * 1e-9).tolist()

    def seconds(self) -> list[float]:
        """Of each that is done, how long it took."""
        stamps_ns = self.stamps_ns[: self.num_done]
        return ((stamps_ns[:, 1] - stamps_ns[:, 0]) * 1e-9).tolist()
