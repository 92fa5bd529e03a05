"""Lets ranks that share a vocabulary send only the best few logits of a row.

A greedy token depends on the best logit only, a token drawn with top_k on the k best. Each rank sends that many of its own
part, eight bytes each. A whole row of a vocabulary of 128,000 is 256 kB from each of two ranks, ten milliseconds per token
at 200 Mbit/s.

A candidate is one int64 (``kernels.best_number``): larger is better; of equal logits, the lowest id.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tightwire.kernels.cpu.best_number import MAX_ID, best_keys, keys_of
from tightwire.model.sampling.draw import largest_keys
from tightwire.model.sampling.parameters import SamplingParams

KEY_BYTES = 8
MAX_CANDIDATES = 256  # per rank and row; selecting more costs more than sending the row


def candidates_needed(params: SamplingParams) -> int:
    """The number of best logits that decide the next token; 0: all may.

    ``draw`` subtracts the best logit in float32 and rounds the weights; it orders logits that become equal by id, while
    candidates keep their own order. So at the edge of top_k a different one of them may be kept.
    """
    if params.needs_all_logits:
        return 0
    if params.is_greedy:
        return 1
    return params.top_k if 0 < params.top_k <= MAX_CANDIDATES else 0


def candidates_pay(num_candidates: int, local_vocab_sizes: Sequence[int]) -> bool:
    """True if sending this many logits of each row is cheaper than all, for ranks with these numbers of columns."""
    return 0 < num_candidates <= min(local_vocab_sizes) and num_candidates * KEY_BYTES < 4 * max(local_vocab_sizes)


def best_candidates(logits_RV: Tensor, count: int, first_id: int) -> Tensor:
    """(R, count) keys of each row's best logits; ``first_id`` is that of column 0. A NaN counts as the best."""
    if count == 1:
        return best_keys(logits_RV, first_id)[:, None]
    ids_V = torch.arange(first_id, first_id + logits_RV.shape[1], device=logits_RV.device)
    return largest_keys(keys_of(logits_RV.float(), ids_V), count)


def scatter_candidates(keys_RC: Tensor, vocab_size: int) -> Tensor:
    """(R, V) float32 logits: the candidates' own, minus infinity elsewhere."""
    sorting_RC = keys_RC >> 32
    bits_RC = torch.where(sorting_RC < 0, sorting_RC ^ 0x7FFF_FFFF, sorting_RC).int()
    logits_RV = torch.full((len(keys_RC), vocab_size), -torch.inf, device=keys_RC.device)
    return logits_RV.scatter_(1, MAX_ID - (keys_RC & MAX_ID), bits_RC.view(torch.float32))
