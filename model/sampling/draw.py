"""Draws one token per row from a filtered distribution; the result depends on that row alone.

Probabilities become integers: ``weight = floor(exp((logit - max) / temperature) * 2^40)``. Integer sums do not depend
on their order, so the same uniform number selects the same token for any batch, path (bounded top-k or full sort) and
scan algorithm. Sorted rows keep weight and token id in one int64, ``weight << 20 | (2^20 - 1 - id)``: keys are unique,
so every top-k or sort algorithm gives the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from tightwire.kernels.best_number import MAX_ID, best_keys, keys_of
from tightwire.kernels.transfer import upload
from tightwire.model.sampling.parameters import SamplingParams

_WEIGHT_BITS = 40
_ID_BITS = 20
_ID_MASK = (1 << _ID_BITS) - 1
UNSETTLED = -2  # returned instead of a token if the whole row must be sorted first
MAX_VOCAB_SIZE = 1 << _ID_BITS  # 40 + 20 bits: keys, and sums over the whole vocabulary, stay below 2^63

# Number of most likely tokens tried before the whole row is sorted. A few dozen tokens usually have 95 % of the
# probability.
_WIDTH = 1024
# Rows processed at once on a CPU: temporaries of 8 rows of 49152 tokens fit in the CPU cache (32 rows: 3 times slower).
_CPU_ROWS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Filters:
    """Filters of R rows; all tensors are (R, 1) on the device of the logits.

    Each filter applies to the result of the previous one, in the order temperature, min_p, top_k, top_p. ``top_k_R1``
    and ``top_p_R1`` are both None if no row needs them; then rows are drawn without sorting.
    """

    temperature_R1: Tensor  # float32, above 0
    min_p_R1: Tensor | None  # float32
    top_k_R1: Tensor | None  # int64, 1 to V
    top_p_R1: Tensor | None  # float64

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> Self:
        """The filters of rows of which all or none need sorting."""

        def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
            return upload(values, dtype, device)[:, None]

        ranked = needs_sort(params[0], vocab_size)
        top_k = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]
        return cls(
            temperature_R1=column([p.temperature for p in params], torch.float32),
            min_p_R1=column([p.min_p for p in params], torch.float32) if any(p.min_p > 0 for p in params) else None,
            top_k_R1=column(top_k, torch.int64) if ranked else None,
            top_p_R1=column([p.top_p for p in params], torch.float64) if ranked else None,
        )

    def rows(self, index: Tensor) -> "Filters":
        columns: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        picked: dict[str, Any] = {name: None if column is None else column[index] for name, column in columns.items()}
        return Filters(**picked)


def needs_sort(params: SamplingParams, vocab_size: int) -> bool:
    """True if a filter depends on the order of the tokens."""
    return params.top_p < 1.0 or 0 < params.top_k < vocab_size


def mix_seed(seed: int) -> int:
    """Hash an integer seed to 64 bits, so that consecutive seeds start unrelated streams."""
    return int(_splitmix64(np.array([seed & 0xFFFF_FFFF_FFFF_FFFF], np.uint64))[0])


def uniforms(mixed_seeds_R: np.ndarray, positions_R: np.ndarray) -> np.ndarray:
    """Return one float64 in [0, 1) with 53 random bits for each (seed, position).

    The generator is counter-based (output ``position`` of the splitmix64 stream), so a preempted sequence continues with
    the same numbers. It runs on the host, because on a device it would take more launches than the draw itself.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    counter = positions_R.astype(np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)  # wraps around by design
    return (_splitmix64(mixed_seeds_R + counter) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(logits_RV: Tensor, best_R: Tensor, filters: Filters, uniform_R: Tensor, *, waits: bool = True) -> Tensor:
    """Draw one token id per row by inverse CDF; returns (R,) int64.

    ``logits_RV``: float32, -inf allowed; each row's maximum, ``best_R``, must be finite (else the id is arbitrary).
    ``uniform_R``: float64 in [0, 1). ``waits``: the host waits for the device, which alone knows the rows that need a
    full sort. If False, such rows get ``UNSETTLED`` and must be drawn again.
    """
    if logits_RV.is_cpu and len(logits_RV) > _CPU_ROWS:
        parts = torch.arange(len(logits_RV)).split(_CPU_ROWS)
        return torch.cat(
            [draw(logits_RV[p[0] : p[-1] + 1], best_R[p], filters.rows(p), uniform_R[p], waits=waits) for p in parts]
        )
    weights_RV = _weights(logits_RV, best_R[:, None], filters)
    uniform_R1 = uniform_R[:, None]
    if filters.top_k_R1 is None:
        up_to_RV = weights_RV.cumsum(-1)
        ids_R1 = _pick(up_to_RV, up_to_RV[:, -1:], uniform_R1)
    else:
        vocab_size = logits_RV.shape[1]
        descending_V = torch.arange(_ID_MASK, _ID_MASK - vocab_size, -1, device=logits_RV.device)
        total_R1 = weights_RV.sum(-1, keepdim=True)
        keys_RV = weights_RV.bitwise_left_shift_(_ID_BITS).add_(descending_V)
        ids_R1 = _draw_sorted(keys_RV, total_R1, filters, uniform_R1, min(_WIDTH, vocab_size), waits=waits)
    # The id must be in the vocabulary even for a row of NaN.
    return ids_R1[:, 0].clamp_(UNSETTLED if filters.top_k_R1 is not None else 0, logits_RV.shape[1] - 1)


def _weights(logits_RV: Tensor, best_R1: Tensor, filters: Filters) -> Tensor:
    """Return (R, V) int64 weights: 2^40 for the most likely token, 0 below min_p."""
    # Relative to the most likely token. Below exp(-40) a weight is 0; exp of minus infinity takes four times as long on a CPU.
    share_RV = (logits_RV - best_R1).div_(filters.temperature_R1).clamp_(min=-40.0).exp_()
    if filters.min_p_R1 is not None:
        share_RV.masked_fill_(share_RV < filters.min_p_R1, 0.0)
    return share_RV.mul_(2.0**_WEIGHT_BITS).long()


def _draw_sorted(
    keys_RV: Tensor, total_R1: Tensor, filters: Filters, uniform_R1: Tensor, width: int, *, waits: bool
) -> Tensor:
    """Draw among the ``width`` most likely tokens; rows that need more are sorted as a whole."""
    assert filters.top_k_R1 is not None and filters.top_p_R1 is not None
    vocab_size = keys_RV.shape[1]
    keys_RC = largest_keys(keys_RV, width)
    weights_RC = keys_RC >> _ID_BITS
    up_to_RC = weights_RC.cumsum(-1)

    # The mass that top_k keeps is known if the k best tokens are among these, or if no other token has weight.
    inside_R1 = filters.top_k_R1 <= width
    last_R1 = up_to_RC[:, -1:]
    limit_R1 = torch.where(inside_R1, up_to_RC.gather(1, filters.top_k_R1.clamp(max=width) - 1), total_R1)
    wanted_R1 = filters.top_p_R1 * limit_R1.double()
    reached_R1 = (filters.top_k_R1 >= vocab_size) & (last_R1.double() >= wanted_R1)
    settled_R1 = inside_R1 | reached_R1 | (last_R1 >= total_R1)

    # Keep a token if those before it have not reached the wanted mass. This gives the smallest set with mass >= top_p.
    kept_RC = (up_to_RC - weights_RC).double() < wanted_R1
    num_kept_R1 = torch.minimum(kept_RC.sum(-1, keepdim=True), filters.top_k_R1).clamp_(1, width)
    place_R1 = _pick(up_to_RC, up_to_RC.gather(1, num_kept_R1 - 1), uniform_R1).clamp_(max=width - 1)
    ids_R1 = _ID_MASK - (keys_RC.gather(1, place_R1) & _ID_MASK)
    if width < vocab_size and not waits:
        return torch.where(settled_R1, ids_R1, UNSETTLED)
    if width < vocab_size:
        open_rows = (~settled_R1[:, 0]).nonzero()[:, 0]
        if len(open_rows):
            ids_R1[open_rows] = _draw_sorted(
                keys_RV[open_rows],
                total_R1[open_rows],
                filters.rows(open_rows),
                uniform_R1[open_rows],
                vocab_size,
                waits=True,
            )
    return ids_R1


def largest_keys(keys_RV: Tensor, width: int) -> Tensor:
    """Return the ``width`` largest keys of each row, largest first. Keys are unique, so all algorithms agree."""
    vocab_size = keys_RV.shape[1]
    if keys_RV.is_cpu:
        # NumPy's vectorized partition and sort take 0.05 and 0.2 ms for 49152 keys, torch's topk and sort 0.4 and 4.
        keys = keys_RV.numpy()
        if width < vocab_size:
            keys = np.partition(keys, vocab_size - width, axis=-1)[:, vocab_size - width :]
        return torch.from_numpy(np.sort(keys, axis=-1)[:, ::-1].copy())
    if width < vocab_size:
        return keys_RV.topk(width).values
    return keys_RV.sort(-1, descending=True).values


def _pick(up_to_RC: Tensor, mass_R1: Tensor, uniform_R1: Tensor) -> Tensor:
    """Return the index of the first entry whose running sum exceeds ``uniform * mass``; its weight is never 0."""
    target_R1 = torch.minimum((uniform_R1 * mass_R1.double()).long(), mass_R1 - 1)
    return torch.searchsorted(up_to_RC, target_R1, right=True)


def _splitmix64(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E37_79B9_7F4A_7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return x ^ (x >> np.uint64(31))


# A greedy token depends only on the largest logit, a token drawn with top_k on the k largest, so ranks that share a vocabulary
# send that many keys (``kernels.best_number``) of eight bytes, and not whole rows: at a vocabulary of 128,000 a row takes 256 kB
# from each of two ranks, ten milliseconds per token at 200 Mbit/s.
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
