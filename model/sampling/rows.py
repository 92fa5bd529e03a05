"""Tables of what ranks need to choose the tokens of a step: a row for each row of logits, and edits of single logits."""

from collections.abc import Sequence
from enum import IntEnum

import msgspec
import numpy as np


class Kind(IntEnum):
    """What a row's token depends on."""

    GREEDY = 0  # the largest logit
    PLAIN = 1  # the best score
    TOP_K = 2  # the top_k largest logits, and then perhaps min_p and top_p
    FRONT = 3  # min_p or top_p, without top_k


class Column(IntEnum):
    """Columns of the table; each has eight bytes, of an int64 (the first) or a float64."""

    NOISE = 0  # hash of seed and position
    TEMPERATURE = 1  # 0: the largest logit
    TOP_P = 2
    TOP_K = 3  # 0: all
    MIN_P = 4
    TARGET = 5  # the token to score, for prompts; -1: choose one
    TOP_N = 6  # how many most likely tokens to report with the token's score; -1: no score
    MASKED = 7  # 1: the row has its own mask of banned tokens
    REPETITION = 8
    FREQUENCY = 9
    PRESENCE = 10
    KIND = 11


class SampleRows(msgspec.Struct, frozen=True, array_like=True):
    """The R rows of a step, as sent to each rank of a replica."""

    table: bytes = b""  # (R, len(Column)) float64
    # (N, 3) float32 pairs of row and token id, as int32, with what is added to the logit, or how often the output has the token.
    bias: bytes = b""
    counts: bytes = b""  # of tokens in prompt or output, of rows with penalties

    @property
    def table_RC(self) -> np.ndarray:
        return np.frombuffer(self.table).reshape(-1, len(Column))

    def column(self, column: Column) -> np.ndarray:
        return self.table_RC[:, column]

    @property
    def scored(self) -> np.ndarray:
        """The rows that get a score."""
        return np.flatnonzero(self.column(Column.TOP_N) >= 0)

    @property
    def num_top(self) -> int:
        """The largest number of most likely tokens that a row wants."""
        return max(0, int(self.column(Column.TOP_N).max(initial=0)))

    @property
    def num_masked(self) -> int:
        return int(self.column(Column.MASKED).sum())

    @property
    def num_results(self) -> int:
        """The number of int64 that ``TokenChooser.choose`` returns."""
        return len(self.table_RC) + len(self.scored) * (3 + 2 * self.num_top)


NO_ROWS = SampleRows()


def greedy_rows(num_rows: int) -> SampleRows:
    """Return rows that choose the largest logit, for runs without requests."""
    table_RC = np.zeros((num_rows, len(Column)))
    table_RC[:, (Column.TARGET, Column.TOP_N)] = -1
    return SampleRows(table_RC.tobytes())


def packed_edits(edits: Sequence[tuple[int, np.ndarray, np.ndarray]]) -> bytes:
    """Return ``SampleRows.bias`` or ``counts`` of rows, their token ids, and a number for each."""
    made = [np.empty((len(ids), 3), np.float32) for _, ids, _ in edits]
    for each, (row, ids, values) in zip(made, edits, strict=True):
        each[:, 0].view(np.int32)[:] = row
        each[:, 1].view(np.int32)[:] = ids
        each[:, 2] = values
    return b"".join(each.tobytes() for each in made)


def unpacked_edits(edits: bytes, ids: range) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rows, token ids counted from ``ids.start``, and numbers, of the tokens among ``ids``."""
    numbers = np.frombuffer(edits, np.float32).reshape(-1, 3)
    places = numbers.view(np.int32)
    own = (places[:, 1] >= ids.start) & (places[:, 1] < ids.stop)
    return places[own, 0].astype(np.int64), places[own, 1].astype(np.int64) - ids.start, numbers[own, 2]
