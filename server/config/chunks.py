"""The sizes of the chunks of prompts that pass stages: chunks take equal time, and are neither few nor costly.

A chunk of x rows after L tokens of its prompt takes c + b x + a x (L + x / 2) in each of S stages that take equally long, and m x on the
wire between two. With n chunks the last stage ends after n c + T + (c + (T + M) / n) (S - 1), where T and M are the times of all rows:
soonest with n = sqrt((T + M) (S - 1) / c). So a short prompt passes in one chunk, and later chunks of a long one have fewer rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

_LEAST_ROWS = 16  # products of fewer take as long
_FIRST_ROWS = (16, 32, 64, 128, 16, 64)  # of the chunks from which the times are learned first
WARM_UP_ROWS = sum(_FIRST_ROWS)
_KEPT = 0.95  # of the weight of what was learned before, with each chunk
_HELD = 0.01  # weight of the last estimate, where the last chunks tell nothing else
_MOST_LATE = 3.0  # a chunk that takes so many times as long as predicted was disturbed, and counts as if it took this


@dataclass(frozen=True, slots=True)
class ChunkTimes:
    """Seconds of a chunk, of a row more, and for each token that a row attends to."""

    chunk_s: float
    row_s: float
    pair_s: float

    def rows_s(self, start: int, end: int) -> float:
        """The time of the rows of a prompt from ``start`` to ``end``."""
        return (end - start) * (self.row_s + self.pair_s * (start + end) / 2)

    def part_s(self, prompts: Sequence[tuple[int, int]], num_stages: int, moving_s: float = 0.0) -> float:
        """The time that the rows of one chunk should take. ``prompts``: from and to which token to compute; ``moving_s``: of a row."""
        total_s = sum(self.rows_s(*each) for each in prompts)
        both_s = total_s + moving_s * sum(end - start for start, end in prompts)
        return total_s / max(1, round(math.sqrt(both_s * (num_stages - 1) / max(self.chunk_s, 1e-9))))

    def num_rows(self, start: int, part_s: float) -> int:
        """The rows after ``start`` tokens that take ``part_s`` together; the last ones of equal parts are not left over."""
        each_s = self.row_s + self.pair_s * start
        root = math.sqrt(each_s * each_s + 2 * self.pair_s * part_s)
        return max(_LEAST_ROWS, math.ceil(2 * part_s / max(each_s + root, 1e-12) - 1e-6))


@dataclass(slots=True)
class ChunkSizes:
    """Chooses the rows of chunks on rank 0, whose plans all ranks follow, from the steps that it has measured."""

    times: ChunkTimes = ChunkTimes(0.0, 0.0, 0.0)
    num_learned: int = 0
    moving_s: float = 0.0  # of a row's hidden states on the wire between two stages
    _squares: np.ndarray = field(default_factory=lambda: np.zeros((3, 3)))
    _products: np.ndarray = field(default_factory=lambda: np.zeros(3))

    def choose(self, prompts: Sequence[tuple[int, int]], start: int, num_stages: int) -> int:
        """The rows of the next chunk, after ``start`` tokens of the first of ``prompts``."""
        if self.num_learned < len(_FIRST_ROWS):
            return _FIRST_ROWS[self.num_learned]
        return self.times.num_rows(start, self.times.part_s(prompts, num_stages, self.moving_s))

    def learn(self, chunks: Sequence[tuple[int, int]], seconds: float) -> None:
        """Correct the times by a step of these parts of prompts, by least squares of relative errors; no time is negative."""
        if seconds <= 0 or sum(end - start for start, end in chunks) < _LEAST_ROWS:
            return
        known = np.array([self.times.chunk_s, self.times.row_s, self.times.pair_s])
        terms = np.array([1.0, *np.sum([(end - start, (end - start) * (start + end) / 2) for start, end in chunks], 0)])
        if self.num_learned >= len(_FIRST_ROWS):
            seconds = min(seconds, _MOST_LATE * float(terms @ known))
        self._squares = _KEPT * self._squares + np.outer(terms, terms) / seconds**2
        self._products = _KEPT * self._products + terms / seconds
        held = _HELD * np.diag(self._squares) if self.num_learned else np.zeros(3)
        squares, products, used = self._squares + np.diag(held), self._products + held * known, [0, 1, 2]
        while (found := np.linalg.lstsq(squares[np.ix_(used, used)], products[used], rcond=1e-12)[0]).min() < 0:
            used.pop(int(found.argmin()))
        learned = np.zeros(3)
        learned[used] = found
        self.times, self.num_learned = ChunkTimes(*map(float, learned)), self.num_learned + 1
