"""Draws tokens of rows on a CPU, the same that ``choose`` draws on a device, from the few columns that can win (see ``draw``).

In NumPy: its operations on a few numbers take a quarter of the time of torch's.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tightwire.kernels.best_number import MAX_ID, NAN_BITS
from tightwire.model.sampling.draw import FIRST, FRONT, NO_TOKEN, SECOND, WEIGHT, logits_and_ids, scores_of, steps_of
from tightwire.model.sampling.logprobs import Gather
from tightwire.model.sampling.rows import Column, Kind

_STEPS_C = steps_of(np.arange(1 << 15)).view(np.uint64)  # of columns whose hashes the cache holds


class HostDraw:
    """A rank's columns of rows, whose token ids begin at ``first_id``, and their parameters, from ``SampleRows.table_RC``."""

    def __init__(self, logits_RV: Sequence[np.ndarray], first_id: int, numbers_RC: np.ndarray) -> None:
        self._logits_RV, self._first_id = logits_RV, first_id
        self._noise_R1 = numbers_RC.view(np.int64)[:, [Column.NOISE]]
        self._temperature_R1, self._top_p_R1 = numbers_RC[:, [Column.TEMPERATURE]], numbers_RC[:, [Column.TOP_P]]
        self._min_p_R1 = numbers_RC[:, [Column.MIN_P]].astype(np.float32)
        # A plain row sends the best score alone.
        self._is_sent_RC = (numbers_RC[:, [Column.KIND]] != Kind.PLAIN) | (np.arange(FRONT) == 0)

    def own_keys(self) -> Tensor:
        """Return the keys that other ranks need, those of all rows in one: of the front, best score first, padded."""
        rows = zip(self._logits_RV, self._noise_R1[:, 0].tolist(), strict=True)
        near = [near_columns(logits_V, self._first_id, noise) for logits_V, noise in rows]
        shape = len(near), max(map(len, near))
        logits_RC, ids_RC = np.full(shape, -np.inf, np.float32), np.full(shape, MAX_ID)
        for row, columns in enumerate(near):
            logits_RC[row, : len(columns)] = self._logits_RV[row][columns]
            ids_RC[row, : len(columns)] = columns + self._first_id
        return torch.from_numpy(self._fronts(logits_RC, ids_RC)[self._is_sent_RC])

    def tokens(self, keys_by_rank: Sequence[Tensor], gather: Gather) -> tuple[Tensor, Tensor]:
        """Return each row's largest logit and, if that is finite, its token, from all ranks' keys."""
        keys = np.full((len(keys_by_rank), *self._is_sent_RC.shape), NO_TOKEN)
        keys[:, self._is_sent_RC] = torch.stack(list(keys_by_rank)).numpy()
        logits_RC, ids_RC = (x.numpy() for x in logits_and_ids(torch.from_numpy(np.concatenate(keys, 1))))
        best_R1 = logits_RC.max(1, keepdims=True)
        if self._min_p_R1.any():
            logits_RC = np.where(self._shares(logits_RC, best_R1, slice(None)) == 0, np.float32(-np.inf), logits_RC)
        fronts_RC = self._fronts(logits_RC, ids_RC)
        # If only the best is in a front, nothing is before it, which all ranks see alike.
        cut = np.flatnonzero((self._top_p_R1[:, 0] < 1) & (fronts_RC[:, 1] > NO_TOKEN))
        if len(cut):
            masses = torch.from_numpy(np.stack([self._masses(row, fronts_RC[row]) for row in cut.tolist()]))
            masses_RC = torch.stack(list(gather(masses))).sum(0).numpy()
            most_R1 = np.maximum(1.0, self._top_p_R1[cut] * masses_RC[:, FRONT:].astype(float))
            fronts_RC[cut, 0] = fronts_RC[cut, (masses_RC[:, :FRONT] < most_R1).argmax(1)]
        return torch.from_numpy(best_R1[:, 0]), torch.from_numpy(MAX_ID - (fronts_RC[:, 0] & MAX_ID))

    def _masses(self, row: int, front_C: np.ndarray) -> np.ndarray:
        """Return (FRONT + 1,) int64: of this rank's columns, the mass of the tokens before each of the front, and of all."""
        logits_V, front_C = self._logits_RV[row], front_C[front_C > NO_TOKEN]
        logits_C = logits_and_ids(torch.from_numpy(front_C))[0].numpy()
        shares_V = self._shares(logits_V, logits_C[-1], row)
        weights_V = np.multiply(shares_V, np.float32(WEIGHT), out=shares_V).astype(np.int64)
        columns = np.flatnonzero(logits_V >= logits_C[0])
        keys_C, weights_C = _keys(logits_V[columns], columns + self._first_id), weights_V[columns]
        before = [weights_C[keys_C > key].sum() for key in front_C]
        return np.array([*before, *[0] * (FRONT - len(before)), weights_V.sum()])

    def _fronts(self, logits_RC: np.ndarray, ids_RC: np.ndarray) -> np.ndarray:
        """Return (R, FRONT) keys: each row's front, best score first, padded."""
        logits, temperature = torch.from_numpy(logits_RC), torch.from_numpy(self._temperature_R1)
        scores_RC = scores_of(logits, steps_of(ids_RC), temperature, self._noise_R1).numpy()
        keys_RC = _keys(logits_RC, ids_RC)
        rows, best_R, fronts_RC = np.arange(len(keys_RC)), keys_RC.max(1), np.full(self._is_sent_RC.shape, NO_TOKEN)
        fronts_RC[:, 0], is_open_R = best_R, np.isfinite(logits_RC.max(1))
        for place in range(FRONT):
            found_R = keys_RC[rows, scores_RC.argmax(1)]
            fronts_RC[is_open_R, place] = found_R[is_open_R]
            is_open_R &= (found_R < best_R) & self._is_sent_RC[:, 1]
            if not is_open_R.any():
                break
            np.copyto(scores_RC, -np.inf, where=keys_RC <= found_R[:, None])
        fronts_RC[is_open_R, -1] = best_R[is_open_R]
        return fronts_RC

    @np.errstate(invalid="ignore")
    def _shares(self, logits: np.ndarray, best: np.ndarray, row: int | slice) -> np.ndarray:
        """Return each logit's weight, 1 for the best; 0 below min_p. NaN if the best is not finite."""
        shares, min_p = (logits - best) / self._temperature_R1[row].astype(np.float32), self._min_p_R1[row]
        np.exp(shares, out=shares)
        return np.where(shares < min_p, np.float32(0.0), shares) if min_p.any() else shares


def near_columns(logits_V: np.ndarray, first_id: int, noise: int) -> np.ndarray:
    """Return the columns of a row that can be in its front, few of many, some of them twice. ``first_id``: of column 0.

    The lower a hash, the larger the noise. So of columns whose hash is not low, the one of the low with the largest logit beats
    all with a smaller logit. Hashes are made but for their last 33 bits, shifted left by one: noise has not the highest bit.
    """
    low = []
    for start in range(0, len(logits_V), len(_STEPS_C)):
        state = noise + steps_of(1 + first_id + start) & (1 << 64) - 1
        hash_C = _STEPS_C[: len(logits_V) - start] + np.uint64(state)
        for shift, factor in ((30, FIRST), (27, SECOND << 1)):
            hash_C ^= hash_C >> shift
            hash_C *= factor & (1 << 64) - 1
        low.append(np.flatnonzero(hash_C < 1 << 56) + start)  # one in 256
    columns = np.concatenate(low)
    least = logits_V[columns].max(initial=np.finfo(np.float32).min)
    # A NaN is larger than all; never no column.
    return np.concatenate([columns, np.flatnonzero(~(logits_V < least)), [0]])


def _keys(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    bits = np.where(np.isnan(logits), NAN_BITS, (logits + np.float32(0.0)).view(np.int32)).astype(np.int64)
    return (bits ^ bits >> 31 & 0x7FFF_FFFF) << 32 | MAX_ID - ids
