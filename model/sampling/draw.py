"""Draws tokens by the Gumbel-max rule from logits of which each rank holds some columns. No collectives here.

The token drawn is the one with the largest score, ``logit / temperature + noise``, among those that the filters keep;
that is exactly a draw from the softmax. The noise is a hash of (seed, position, token id), so a rank makes that of its
own columns, and a token does not depend on the batch, the number of ranks, or the columns that each of them has.

Ranks exchange keys: a logit and its token id as one integer (``kernels.best_number``). A token that others beat both in
logit and in score is never drawn, whatever top_p and min_p keep, because they keep the largest logits. The rest, a rank's
*front*, has ``1 - log(p)`` tokens on average, where p is the most likely one's probability: at most 12 of 49152.

Masses are sums of integers, ``floor(exp((logit - max) / temperature) * 2^40)``, so they do not depend on an order.

Source: Gumbel-max: Maddison, Tarlow, Minka, "A* sampling", NeurIPS 2014. Hash: Steele, Lea, Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tightwire.kernels.best_number import MAX_ID, keys_of

MAX_VOCAB_SIZE = 1 << 20  # sums of weights of 40 bits stay below 2^63
# Keys of a front that are sent: the best scores, and the best logit. So a token could only be wrong if top_p or min_p dropped
# 31 of a front; they drop -log(their mass) of it on average, 0.1 for 0.9: 31 less than once in 10^12 tokens even for 0.01.
FRONT = 32

WEIGHT = 2.0**40  # of the best token
NOT_FINITE, ALL_BANNED = -1, -2  # in place of a token
NO_TOKEN = int(keys_of(torch.tensor(-torch.inf), torch.tensor(MAX_ID)))
GOLDEN, FIRST, SECOND = (
    (factor ^ 1 << 63) - (1 << 63) for factor in (0x9E37_79B9_7F4A_7C15, 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB)
)


def hashed(x: Any) -> Any:
    """Return splitmix64's output for states ``x``, an int64 array or tensor. Shifts are masked, so they are logical."""
    x = x + GOLDEN
    for shift, factor in ((30, FIRST), (27, SECOND), (31, 1)):
        x ^= x >> shift & (1 << 64 - shift) - 1
        x *= factor
    return x


def mix_seed(seed: int) -> int:
    """Hash any integer seed to 64 bits, so that consecutive seeds start unrelated streams."""
    return int(hashed(np.array([seed & 0xFFFF_FFFF_FFFF_FFFF], np.uint64).view(np.int64))[0])


def steps_of(ids: Any) -> Any:
    """Return what counters, positions or token ids, add to the state of a stream."""
    return ids * GOLDEN


def scores_of(logits: Tensor, steps: Any, temperature: Tensor, noise: Any) -> Tensor:
    """Return the float64 scores of logits. ``steps``: ``steps_of`` their ids; ``noise``: a hash for each row; both may be arrays."""
    bits = torch.as_tensor(hashed(noise + steps)).bitwise_and_((1 << 63) - 1)
    uniform = bits.float().add_(0.5).mul_(2.0**-63).clamp_(max=1 - 2.0**-24)
    return logits.double().div_(temperature).sub_(uniform.neg_().log1p_().neg_().log_())


def logits_and_ids(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the float32 logits and the ids of which ``keys`` were made."""
    if keys.is_cpu:  # NumPy's operations on a few numbers take a quarter of the time
        numbers = keys.numpy()
        bits = (numbers >> 32).astype(np.int32)
        logits = (bits ^ (bits >> 31 & 0x7FFF_FFFF)).view(np.float32)
        return torch.from_numpy(logits), torch.from_numpy(MAX_ID - (numbers & MAX_ID))
    bits = (keys >> 32).int()
    return (bits ^ (bits >> 31 & 0x7FFF_FFFF)).view(torch.float32), MAX_ID - (keys & MAX_ID)


def chosen(best_R: Tensor, id_R: Tensor, banned: bytes) -> Tensor:
    """Return the ids of rows with a finite best logit; of the others ``NOT_FINITE``, or ``ALL_BANNED`` if tokens are banned."""
    none = torch.where(best_R == -torch.inf, ALL_BANNED, NOT_FINITE) if banned else NOT_FINITE
    return torch.where(best_R.abs() < torch.inf, id_R, none)  # False for NaN


def padded(keys_RC: Tensor, width: int) -> Tensor:
    """Return (R, width) keys; what is missing are keys of no token, with a logit of minus infinity."""
    return torch.nn.functional.pad(keys_RC, (0, width - keys_RC.shape[1]), value=NO_TOKEN)


def largest_keys(keys_RV: Tensor, width: int) -> Tensor:
    """Return the ``width`` largest keys of each row, largest first. Keys are unique, so all algorithms agree."""
    return keys_RV.topk(min(width, keys_RV.shape[1])).values


def top_keys(logits_RV: Tensor, width: int, first_id: int) -> Tensor:
    """Return (R, width) keys of each row's largest logits, largest first, padded. ``first_id``: the id of column 0."""
    if not logits_RV.is_cpu:
        ids_V = torch.arange(first_id, first_id + logits_RV.shape[1], device=logits_RV.device)
        return padded(largest_keys(keys_of(logits_RV, ids_V), width), width)
    keys = []
    for logits_V in logits_RV:
        numbers_V = logits_V.numpy()
        least = np.partition(numbers_V, -width)[-width] if width < len(numbers_V) else -np.inf
        own = torch.from_numpy(np.flatnonzero(~(numbers_V < least)))  # a NaN is larger than all
        keys.append(padded(largest_keys(keys_of(logits_V[own], own + first_id)[None], width), width))
    return torch.cat(keys)


def front_of_sorted(keys_RC: Tensor, scores_RC: Tensor) -> Tensor:
    """Return (R, FRONT) keys of the front of rows with descending keys, padded. The host waits for nothing."""
    in_front_RC = scores_RC > scores_RC.cummax(-1).values.roll(1, -1)
    in_front_RC[:, 0] = True
    places_RC = torch.where(in_front_RC, scores_RC, -torch.inf).topk(min(FRONT, scores_RC.shape[1])).indices
    places_RC[:, -1].masked_fill_(in_front_RC.sum(-1) > FRONT, 0)
    return padded(torch.where(in_front_RC, keys_RC, NO_TOKEN).gather(1, places_RC), FRONT)
