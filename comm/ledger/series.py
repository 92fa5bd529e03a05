"""Totals of one kind of collective, and a series of equal collectives that a kernel runs without Python in between."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

NUM_RECENT = 512  # calls whose times are kept


@dataclass(slots=True)
class Totals:
    """``recent_s`` is a ring: a call writes entry ``calls % NUM_RECENT``."""

    calls: int = 0
    bytes_sent: int = 0
    exact_bytes: int = 0
    message_bytes: int = 0
    seconds: float = 0.0
    coding_s: float | None = 0.0
    recent_s: list[float] = field(default_factory=lambda: [0.0] * NUM_RECENT)
    first_timed: int = 0  # the first call that counts for latencies

    def add_calls(self, seconds: Sequence[float]) -> None:
        """Count calls with these times; the caller adds their bytes."""
        newest = seconds[-NUM_RECENT:]
        self.calls += len(seconds)
        self.seconds += sum(seconds)
        at = (self.calls - len(newest)) % NUM_RECENT
        before_end = min(len(newest), NUM_RECENT - at)
        self.recent_s[at : at + before_end] = newest[:before_end]
        self.recent_s[: len(newest) - before_end] = newest[before_end:]

    def quantiles_s(self, *shares: float) -> list[float]:
        """For each of ``shares``, the quantile of the newest calls' times; empty when there are none."""
        end, num = self.calls, min(self.calls - self.first_timed, NUM_RECENT)
        recent_s = sorted(self.recent_s[call % NUM_RECENT] for call in range(end - num, end))
        return [recent_s[int(num * share)] for share in shares] if num else []


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Collectives of a kernel, which writes their times (``kernels.cpu.shared_sums``); the ledger counts them afterwards.

    ``sites``: one per planned collective. ``first_number``: the number of the collective before the first of these."""

    op: str
    algorithm: str
    num_bytes: int  # of each tensor
    bytes_sent: int  # by this rank, for each that is done
    sites: Sequence[str]
    first_number: int
    progress: np.ndarray  # (2,) int64: the numbers of collectives begun and ended
    stamps_ns: np.ndarray  # (N, 2) int64: begin and end of each, on the clock of ``time.perf_counter``

    @property
    def num_begun(self) -> int:
        return int(self.progress[0])

    @property
    def num_done(self) -> int:
        return int(self.progress[1])

    @property
    def current(self) -> tuple[str, str, int, int, float] | None:
        """Op, algorithm, bytes, number and start of the running collective; None between collectives."""
        num_begun = self.num_begun
        return self.nth(num_begun - 1) if num_begun > self.num_done else None

    def nth(self, index: int) -> tuple[str, str, int, int, float]:
        """Op, algorithm, bytes, number and start of collective ``index``, which has begun."""
        return self.op, self.algorithm, self.num_bytes, self.number(index), float(self.stamps_ns[index, 0]) * 1e-9

    def number(self, index: int) -> int:
        return self.first_number + 1 + index

    def starts_s(self) -> list[float]:
        """The start of each ended collective."""
        return (self.stamps_ns[: self.num_done, 0] * 1e-9).tolist()

    def seconds(self) -> list[float]:
        """The duration of each ended collective."""
        stamps_ns = self.stamps_ns[: self.num_done]
        return ((stamps_ns[:, 1] - stamps_ns[:, 0]) * 1e-9).tolist()
