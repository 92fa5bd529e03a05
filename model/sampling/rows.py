"""Tables of what ranks need to choose the tokens of a step: a row for each row of logits, and edits of single logits."""

from collections.abc import Sequence
from enum import IntEnum

import msgspec
import numpy as np

from tightwire.model.sampling.parameters import GREEDY_BELOW, SamplingParams


class Kind(IntEnum):
    """What a row's token depends on."""

    GREEDY = 0  # the largest logit
    TOP_K = 1  # the top_k largest logits, and then perhaps min_p and top_p
    PLAIN = 2  # the best score
    FRONT = 3  # min_p or top_p, without top_k


class Column(IntEnum):
    """Columns of the table; each has eight bytes, of an int64 (the first) or a float64."""

    NOISE = 0  # hash of seed and position
    TARGET = 1  # the token to score, for prompts; -1: choose one
    TOP_N = 2  # how many most likely tokens to report with the token's score; -1: no score
    KIND = 3
    MASKED = 4  # 1: the row has its own mask of banned tokens
    TEMPERATURE = 5  # 0: the largest logit
    TOP_P = 6
    TOP_K = 7  # 0: all
    MIN_P = 8
    REPETITION = 9
    FREQUENCY = 10
    PRESENCE = 11


class SampleRows(msgspec.Struct, frozen=True, array_like=True):
    """The R rows of a step, as sent to each rank of a replica."""

    table: bytes = b""  # (R, len(Column)) float64
    bias: bytes = b""  # entries of ``_EDIT``: what is added to a logit
    counts: bytes = b""  # how often the output has a token of prompt or output, of rows with penalties

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
    def num_results(self) -> int:
        """The number of int64 that ``TokenChooser.choose`` returns."""
        return len(self.table_RC) + len(self.scored) * (3 + 2 * self.num_top)


NO_ROWS = SampleRows()
_EDIT = np.dtype([("row", np.int32), ("id", np.int32), ("number", np.float32)])  # of a single logit
_UNUSED = (0.0,) * (len(Column) - 3)


def sampled_row(params: SamplingParams, vocab_size: int) -> tuple[float, ...]:
    """Return the table's row of a sequence that chooses a token, without noise."""
    top_k, top_n = min(params.top_k, vocab_size), -1 if params.logprobs is None else params.logprobs
    kind = Kind.FRONT if params.top_p < 1 or params.min_p > 0 else Kind.PLAIN
    if params.temperature < GREEDY_BELOW or top_k == 1:
        kind = Kind.GREEDY
    elif 0 < top_k < vocab_size:
        kind = Kind.TOP_K
    filters = params.temperature, params.top_p, top_k, params.min_p
    penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    return (0.0, -1.0, top_n, kind, params.has_mask, *filters, *penalties)


def scored_row(target: int, top_n: int) -> tuple[float, ...]:
    """Return the table's row of a prompt's token that is scored; -1 and -1: a row that chooses the largest logit."""
    return (0.0, float(target), float(top_n), *_UNUSED)


def greedy_rows(num_rows: int) -> SampleRows:
    """Return rows that choose the largest logit, for runs without requests."""
    return SampleRows(np.array([scored_row(-1, -1)] * num_rows).tobytes())


def packed_edits(edits: Sequence[tuple[int, np.ndarray, np.ndarray]]) -> bytes:
    """Return ``SampleRows.bias`` or ``counts`` of rows, their token ids, and a number for each."""
    made = [np.empty(len(ids), _EDIT) for _, ids, _ in edits]
    for each, edit in zip(made, edits, strict=True):
        each["row"], each["id"], each["number"] = edit
    return b"".join(each.tobytes() for each in made)


def unpacked_edits(edits: bytes, ids: range) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rows, token ids counted from ``ids.start``, and numbers, of the tokens among ``ids``."""
    found = np.frombuffer(edits, _EDIT)
    found = found[(found["id"] >= ids.start) & (found["id"] < ids.stop)]
    return found["row"].astype(np.int64), found["id"].astype(np.int64) - ids.start, found["number"]
