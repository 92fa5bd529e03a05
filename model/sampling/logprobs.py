"""Computes log-probabilities of given tokens and of the most likely tokens, before sampling filters, from shards of logits."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from tightwire.kernels.best_number import MAX_ID, keys_of
from tightwire.model.sampling.draw import largest_keys, logits_and_ids, padded, top_keys
from tightwire.model.sampling.parameters import TokenScore

Gather = Callable[[Tensor], Sequence[Tensor]]  # all ranks' tensors, of one shape, in rank order
ROWS_AT_ONCE = 64  # of a GPU's large temporaries


def score_tokens(
    logits_SV: Tensor, rows_R: Tensor, ids_R: Tensor, num_top: int, first_id: int, gather: Gather
) -> Tensor:
    """Return (R, 3 + 2 num_top) int64: ids, logprobs and ranks, then most likely tokens, each with its logprob.

    ``logits_SV``: this rank's columns, from token ``first_id``, of which ``rows_R`` are scored, some at once. Logprobs are float32
    numbers as float64. A row's result does not depend on the other rows. Cost: two rounds, of 8 (3 + num_top) and of 8 bytes a row.
    """
    # On a CPU temporaries that fit in the cache: four times as large took three times as long.
    size = max(1, 8 * 49152 // logits_SV.shape[1]) if logits_SV.is_cpu else ROWS_AT_ONCE
    parts = [slice(start, start + size) for start in range(0, len(rows_R), size)]
    # Made before the temporaries: results between them would keep what they free from being used again.
    own, above_R = ids_R.new_empty(len(ids_R), 3 + num_top), torch.empty_like(ids_R)
    for part in parts:
        own[part] = _summary(logits_SV[rows_R[part]], ids_R[part], num_top, first_id)
    by_rank = torch.stack(list(gather(own)))
    most_WR, sum_WR = by_rank[:, :, :2].view(torch.float64).unbind(2)
    most_R, key_R = most_WR.amax(0), by_rank[:, :, 2].amax(0)
    log_sum_R1 = (most_R + (sum_WR * (most_WR - most_R).exp()).sum(0).log())[:, None]
    for part in parts:
        above_R[part] = _num_above(logits_SV[rows_R[part]], key_R[part], first_id)
    rank_R = torch.stack(list(gather(above_R))).sum(0) + 1
    top_RC = largest_keys(by_rank[:, :, 3:].transpose(0, 1).flatten(1), num_top)
    logit_RC, id_RC = logits_and_ids(torch.cat([key_R[:, None], padded(top_RC, num_top)], 1))
    # Rounded, because sums of more ranks differ in the last bits of float64.
    logprob_RC = (logit_RC - log_sum_R1).float().double().view(torch.int64)
    top_RC = torch.stack([id_RC[:, 1:], logprob_RC[:, 1:]], 2).flatten(1)
    return torch.cat([torch.stack([ids_R, logprob_RC[:, 0], rank_R], 1), top_RC], 1)


def _summary(logits_RV: Tensor, ids_R: Tensor, num_top: int, first_id: int) -> Tensor:
    """Return (R, 3 + num_top) int64: the largest logit, the sum of exponentials over it, the token's key, the largest keys."""
    most_R1 = logits_RV.amax(1, keepdim=True).clamp_(min=torch.finfo(torch.float32).min)
    sum_R1 = logits_RV.double().sub_(most_R1).exp_().sum(1, keepdim=True)
    sums_R2 = torch.cat([most_R1.double(), sum_R1], 1).view(torch.int64)
    column_R1 = ids_R[:, None] - first_id
    is_own_R1 = (column_R1 >= 0) & (column_R1 < logits_RV.shape[1])
    logit_R1 = logits_RV.gather(1, torch.where(is_own_R1, column_R1, 0))
    key_R1 = torch.where(is_own_R1, keys_of(logit_R1, ids_R[:, None]), torch.iinfo(torch.int64).min)
    top = [top_keys(logits_RV, num_top, first_id)] if num_top else []
    return torch.cat([sums_R2, key_R1, *top], 1)


def _num_above(logits_RV: Tensor, key_R: Tensor, first_id: int) -> Tensor:
    """Return (R,) int64, how many of these columns have a larger key."""
    logit_R, id_R = logits_and_ids(key_R)
    ids_V = torch.arange(first_id, first_id + logits_RV.shape[1], device=logits_RV.device)
    is_equal_RV = (logits_RV == logit_R[:, None]) & (ids_V < id_R[:, None])
    return (logits_RV > logit_R[:, None]).sum(1) + is_equal_RV.sum(1)


def unpacked_scores(numbers_RC: np.ndarray, top_n: Sequence[int]) -> list[TokenScore]:
    """Return the scores in the int64 that ``score_tokens`` made, each with its own ``top_n`` of most likely tokens."""
    logprobs_RC = numbers_RC.view(np.float64)
    columns = numbers_RC[:, 0], logprobs_RC[:, 1], numbers_RC[:, 2], numbers_RC[:, 3::2], logprobs_RC[:, 4::2], top_n
    return [
        TokenScore(
            token_id, logprob, rank, [pair for pair in zip(ids[:num], best[:num], strict=True) if pair[0] != MAX_ID]
        )
        for token_id, logprob, rank, ids, best, num in zip(*(np.asarray(x).tolist() for x in columns), strict=True)
    ]
