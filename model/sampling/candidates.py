"""Selects each row's largest logits, so that ranks that share a vocabulary need not send whole rows.

A greedy token depends only on the largest logit, a token drawn with top_k on the k largest. Each rank sends that many
keys (``kernels.best_number``) of eight bytes. A whole row of a vocabulary of 128,000 takes 256 kB from each of two
ranks, ten milliseconds per token at 200 Mbit/s.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tightwire.kernels.best_number import MAX_ID, best_keys, keys_of
from tightwire.model.sampling.draw import largest_keys
from tightwire.model.sampling.parameters import SamplingParams

KEY_BYTES = 8
MAX_CANDIDATES = 256  # per rank and row; selecting more takes longer than sending the row


def candidates_needed(params: SamplingParams) -> int:
    """Return the number of largest logits that determine the next token; 0: all logits may matter.

    Of several tokens whose logits ``draw`` rounds to equal weights, top_k may keep another one than without candidates.
    """
    if params.needs_all_logits:
        return 0
    if params.is_greedy:
        return 1
    return params.top_k if 0 < params.top_k <= MAX_CANDIDATES else 0


def candidates_pay(num_candidates: int, local_vocab_sizes: Sequence[int]) -> bool:
    """Return True if candidates are cheaper to send than whole rows, for ranks with these numbers of columns."""
    return 0 < num_candidates <= min(local_vocab_sizes) and num_candidates * KEY_BYTES < 4 * max(local_vocab_sizes)


def best_candidates(logits_RV: Tensor, count: int, first_id: int) -> Tensor:
    """Return (R, count) keys of each row's largest logits. ``first_id``: id of column 0. NaN counts as largest."""
    if count == 1:
        return best_keys(logits_RV, first_id)[:, None]
    ids_V = torch.arange(first_id, first_id + logits_RV.shape[1], device=logits_RV.device)
    return largest_keys(keys_of(logits_RV.float(), ids_V), count)


def scatter_candidates(keys_RC: Tensor, vocab_size: int) -> Tensor:
    """Return (R, V) float32 logits, minus infinity for tokens that are not candidates."""
    sorting_RC = keys_RC >> 32
    bits_RC = torch.where(sorting_RC < 0, sorting_RC ^ 0x7FFF_FFFF, sorting_RC).int()
    logits_RV = torch.full((len(keys_RC), vocab_size), -torch.inf, device=keys_RC.device)
    return logits_RV.scatter_(1, MAX_ID - (keys_RC & MAX_ID), bits_RC.view(torch.float32))
