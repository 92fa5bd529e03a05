"""Log-probabilities of tokens in the model's own distribution, before any processing, and the best beside them."""

from typing import NamedTuple

import torch
from torch import Tensor

_ID_BITS = 20
_ID_MASK = (1 << _ID_BITS) - 1
_CPU_ROWS = 8  # temporaries stay in the cache
_DEVICE_ROWS = 64  # about 60 MB of temporaries for 49152 tokens


class TokenScore(NamedTuple):
    """``rank`` is the token's place, from 1, in the order of ``top``: by probability, equal ones by token id."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


def score_tokens(logits_RV: Tensor, target_R: Tensor, top_n: list[int]) -> list[TokenScore]:
    """Score ``target_R[r]`` under row r, with the ``top_n[r]`` best tokens beside it.

    Every row is computed on its own (log_softmax works row by row), so results do not depend on the other rows.
    Works through a few rows at a time, whose temporaries take about 20 V bytes each.
    """
    num_rows = _CPU_ROWS if logits_RV.is_cpu else _DEVICE_ROWS
    scores: list[TokenScore] = []
    for first in range(0, len(target_R), num_rows):
        part = slice(first, first + num_rows)
        scores += _score(logits_RV[part].float(), target_R[part], top_n[part])
    return scores


def _score(logits_RV: Tensor, target_R: Tensor, top_n: list[int]) -> list[TokenScore]:
    logprob_RV = logits_RV.log_softmax(-1)
    keys_RV = _sort_keys(logits_RV)
    target_R1 = target_R[:, None]
    rank_R = (keys_RV > keys_RV.gather(1, target_R1)).sum(-1) + 1
    width = min(max(top_n), logits_RV.shape[1])
    top_RC = _ID_MASK - (keys_RV.topk(width).values & _ID_MASK)
    chosen = logprob_RV.gather(1, target_R1)[:, 0].tolist()
    best_ids, best = top_RC.tolist(), logprob_RV.gather(1, top_RC).tolist()
    return [
        TokenScore(token_id, chosen[r], rank, list(zip(best_ids[r][: top_n[r]], best[r][: top_n[r]], strict=True)))
        for r, (token_id, rank) in enumerate(zip(target_R.tolist(), rank_R.tolist(), strict=True))
    ]


def _sort_keys(logits_RV: Tensor) -> Tensor:
    """Unique int64 keys that sort like (logit, lower id first), so that equal logits have one order everywhere."""
    bits = (logits_RV + 0.0).view(torch.int32)  # + 0.0 makes the two zeros one
    bits = bits ^ ((bits >> 31) & 0x7FFF_FFFF)  # negative floats count downwards
    ids = torch.arange(_ID_MASK, _ID_MASK - logits_RV.shape[1], -1, device=logits_RV.device)
    return bits.long().bitwise_left_shift_(_ID_BITS).add_(ids)
