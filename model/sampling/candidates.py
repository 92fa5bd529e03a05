"""The best few logits of a row in place of all of them: what ranks that share a vocabulary need to send.

A greedy token is decided by the best logit, one drawn with top_k by the k best. So each rank sends as many of its own
part, eight bytes each, where the whole row of a vocabulary of 128,000 is 256 kB from each of two ranks: at 200 Mbit/s ten
milliseconds a token.

A candidate is one int64 (``kernels.best_number``), of which larger is better, and of equal logits the lowest id's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tightwire.kernels.cpu.best_number import MAX_ID, best_keys, keys_of
from tightwire.model.sampling.draw import largest_keys
from tightwire.model.sampling.parameters import SamplingParams

KEY_BYTES = 8
MAX_CANDIDATES = 256  # of a rank and row; beyond, selecting them costs more than sending the row


def candidates_needed(params: SamplingParams) -> int:
    """How many of the best logits decide the next token; 0: all of them may.

    Logits that the draw (``draw``) cannot tell apart, once the best one is subtracted in float32 and its weights are
    rounded, stand in order of id there and in their own order here: at top_k's edge another of them may be kept.
    """
    if params.needs_all_logits:
        return 0
    if params.is_greedy:
        return 1
    return params.top_k if 0 < params.top_k <= MAX_CANDIDATES else 0


def candidates_pay(num_candidates: int, local_vocab_sizes: Sequence[int]) -> bool:
    """Whether so many of each row are sent in place of all, by ranks that have so many columns of it each."""
    return 0 < num_candidates <= min(local_vocab_sizes) and num_candidates * KEY_BYTES < 4 * max(local_vocab_sizes)


def best_candidates(logits_RV: Tensor, count: int, first_id: int) -> Tensor:
    """(R, count) keys of each row's best logits; ``first_id`` is that of column 0. A NaN is the best of all."""
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
