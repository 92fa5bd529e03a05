"""How far a model's next-token distributions are from the exact ones: KL, surprise, top-1.

With l and m the logits of both, p the exact distribution and d = m - l,

    KL(p || q) = log sum p e^d - sum p d = log1p(sum p expm1(d - c)),  c = sum p d,

which keeps its digits when q is close to p, where the difference of two logarithms has none left; equal logits give 0.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ROWS = 128  # whose logits are in memory at once, for each thread

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """One number for each position: the surprise at the token that came (nats), KL (nats), whether top-1 is the same."""

    nll_T: Floats
    kl_T: Floats
    same_top_T: Floats  # 0 or 1


class Scorer:
    """Compares final hidden states through one head. ``pool``'s threads have one torch thread each."""

    def __init__(self, head_VD: Tensor, pool: ThreadPoolExecutor) -> None:
        self._head_DV, self._pool = head_VD.T, pool

    def score(
        self, exact_TD: Tensor, others: Mapping[str, Tensor], next_ids_T: Tensor
    ) -> tuple[Scores, dict[str, Scores]]:
        """Of the exact states, and of each of the others; ``next_ids_T`` came after each position."""
        starts = range(0, len(exact_TD), _ROWS)
        parts = list(self._pool.map(lambda at: self._score_rows(exact_TD, others, next_ids_T, at), starts))
        return (
            _joined([exact for exact, _ in parts]),
            {name: _joined([scores[name] for _, scores in parts]) for name in others},
        )

    @torch.inference_mode()
    def _score_rows(
        self, exact_TD: Tensor, others: Mapping[str, Tensor], next_ids_T: Tensor, start: int
    ) -> tuple[Scores, dict[str, Scores]]:
        rows = slice(start, start + _ROWS)
        next_ids_R1 = next_ids_T[rows].long().unsqueeze(1)
        exact_RV = exact_TD[rows].float() @ self._head_DV
        log_sum_R = exact_RV.logsumexp(1)
        p_RV = (exact_RV - log_sum_R.unsqueeze(1)).exp_()
        top_R = exact_RV.argmax(1)
        nll_R = log_sum_R - exact_RV.gather(1, next_ids_R1).squeeze(1)
        scores: dict[str, Scores] = {}
        for name, hidden_TD in others.items():
            other_RV = hidden_TD[rows].float() @ self._head_DV
            same_R = other_RV.argmax(1) == top_R
            d_RV = other_RV.sub_(exact_RV)
            next_d_R = d_RV.gather(1, next_ids_R1).squeeze(1)
            center_R = torch.linalg.vecdot(p_RV, d_RV)
            kl_R = torch.linalg.vecdot(p_RV, d_RV.sub_(center_R.unsqueeze(1)).expm1_()).double().log1p()
            # log sum e^m = log sum e^l + c + KL
            other_nll_R = nll_R.double() + center_R.double() + kl_R - next_d_R.double()
            scores[name] = _scores(other_nll_R, kl_R.clamp_min(0), same_R)
        return _scores(nll_R, torch.zeros_like(nll_R), torch.ones_like(nll_R)), scores


def _scores(nll_R: Tensor, kl_R: Tensor, same_R: Tensor) -> Scores:
    return Scores(nll_T=nll_R.double().numpy(), kl_T=kl_R.double().numpy(), same_top_T=same_R.double().numpy())


def _joined(parts: Sequence[Scores]) -> Scores:
    return Scores(
        nll_T=np.concatenate([part.nll_T for part in parts]),
        kl_T=np.concatenate([part.kl_T for part in parts]),
        same_top_T=np.concatenate([part.same_top_T for part in parts]),
    )
