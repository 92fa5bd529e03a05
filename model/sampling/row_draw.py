"""Draws one row's token on a CPU, the same that ``choose`` draws on a device, from the few columns that can win (see ``draw``).

In NumPy: its operations on a few numbers take a quarter of the time of torch's.
"""

import math

import numpy as np
import torch

from tightwire.kernels.best_number import MAX_ID, NAN_BITS
from tightwire.model.sampling.draw import FACTORS, FRONT, NO_TOKEN, WEIGHT, logits_and_ids, scores_of, steps_of
from tightwire.model.sampling.rows import Column, Kind

_FAR = 5.0  # noise is larger for one token in 150
_NEAR_HASHES = int(1.001 * math.exp(-_FAR) * 2.0**64)


class RowDraw:
    """A rank's columns of a row, whose token ids begin at ``first_id``, and its parameters, from ``SampleRows.table_RC``."""

    def __init__(self, logits_V: np.ndarray, steps_V: np.ndarray, first_id: int, numbers_C: np.ndarray) -> None:
        self._logits_V, self._steps_V, self._first_id = logits_V, steps_V, first_id
        self._noise = numbers_C.view(np.int64)[Column.NOISE].item()
        self._temperature, self.top_p = numbers_C[[Column.TEMPERATURE, Column.TOP_P]].tolist()
        self._min_p, self._is_plain = np.float32(numbers_C[Column.MIN_P]), numbers_C[Column.KIND] == Kind.PLAIN

    def own_keys(self) -> np.ndarray:
        """Return the keys that other ranks need: of the front, best score first, padded; of a plain row the first."""
        columns = self._near_columns()
        found = self._front(self._logits_V[columns], columns + self._first_id, self._steps_V[columns])
        return np.array(found[:1] if self._is_plain else found + [NO_TOKEN] * (FRONT - len(found)))

    def front(self, keys_C: np.ndarray) -> list[int]:
        """Return the front of all ranks' keys, best score first; nothing if the largest logit is not finite."""
        logits_C, ids_C = (x.numpy() for x in logits_and_ids(torch.from_numpy(keys_C[keys_C > NO_TOKEN])))
        best = logits_C.max(initial=-np.inf)
        if self._min_p and np.isfinite(best):
            kept = self._shares(logits_C, best) > 0
            logits_C, ids_C = logits_C[kept], ids_C[kept]
        return self._front(logits_C, ids_C, steps_of(ids_C)) if np.isfinite(best) else []

    def masses(self, front: list[int]) -> np.ndarray:
        """Return (FRONT + 1,) int64: of this rank's columns, the mass of the tokens before each of the front, and of all."""
        logits_C = logits_and_ids(torch.tensor(front))[0].numpy()
        weights_V = (self._shares(self._logits_V, logits_C[-1]) * np.float32(WEIGHT)).astype(np.int64)
        columns = np.flatnonzero(self._logits_V >= logits_C[0])
        keys_C, weights_C = _keys(self._logits_V[columns], columns + self._first_id), weights_V[columns]
        before = [weights_C[keys_C > key].sum() for key in front]
        return np.array([*before, *[0] * (FRONT - len(front)), weights_V.sum()])

    def _near_columns(self) -> np.ndarray:
        """Return the columns that can be in the front, few of many.

        Each of a front has at least the best logit's score. So where ``logit / temperature`` is _FAR below that, the noise is above
        _FAR, and the hash among the lowest. Its last 33 bits, which are not made here, are far less than what is added to the limit.
        """
        hash_V = self._steps_V.view(np.uint64) + (self._noise + FACTORS[0] & (1 << 64) - 1)
        shifted_V = np.empty_like(hash_V)
        for shift, factor in zip((30, 27), FACTORS[1:], strict=True):
            hash_V ^= np.right_shift(hash_V, shift, out=shifted_V)
            hash_V *= factor & (1 << 64) - 1
        hash_V <<= 1  # the noise does not depend on the highest bit
        best = int(self._logits_V.argmax())
        logit, uniform = float(self._logits_V[best]), min((int(hash_V[best]) + 1) * 2.0**-64, 1 - 2.0**-24)
        below = math.log(-math.log1p(-uniform)) + _FAR + 0.01
        is_far_V = self._logits_V < logit - self._temperature * below - 1e-6 * abs(logit)
        is_far_V &= hash_V >= _NEAR_HASHES
        return np.flatnonzero(np.logical_not(is_far_V, out=is_far_V))

    def _front(self, logits_C: np.ndarray, ids_C: np.ndarray, steps_C: np.ndarray) -> list[int]:
        given = torch.from_numpy(logits_C), torch.from_numpy(steps_C), self._temperature, self._noise
        keys_C, scores_C, found = _keys(logits_C, ids_C), scores_of(*given).numpy(), list[int]()
        while len(keys_C):
            found.append(int(keys_C[scores_C.argmax()]))
            better = keys_C > found[-1]
            keys_C, scores_C = keys_C[better], scores_C[better]
        return found if len(found) <= FRONT else [*found[: FRONT - 1], found[-1]]

    def _shares(self, logits_C: np.ndarray, best: np.float32) -> np.ndarray:
        """Return each logit's weight, 1 for the best; 0 below min_p."""
        exponents_C = np.maximum((logits_C - best) / np.float32(self._temperature), np.float32(-40.0))
        shares_C = torch.from_numpy(exponents_C).exp_().numpy()
        return np.where(shares_C < self._min_p, np.float32(0.0), shares_C) if self._min_p else shares_C


def _keys(logits_C: np.ndarray, ids_C: np.ndarray) -> np.ndarray:
    bits_C = np.where(np.isnan(logits_C), NAN_BITS, (logits_C + np.float32(0.0)).view(np.int32)).astype(np.int64)
    return (bits_C ^ bits_C >> 31 & 0x7FFF_FFFF) << 32 | MAX_ID - ids_C
