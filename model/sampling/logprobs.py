"""Computes log-probabilities of given tokens and of the most likely tokens, before sampling filters."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tightwire.kernels.best_number import MAX_ID, keys_of
from tightwire.kernels.transfer import Download
from tightwire.model.sampling.parameters import TokenScore

_CPU_ROWS = 8  # temporaries fit in the CPU cache
_DEVICE_ROWS = 64  # about 60 MB of temporaries for 49152 tokens


class Scoring:
    """Scores ``target_R[r]`` under row r, with the ``top_n[r]`` most likely tokens, on the device; ``wait`` for it.

    A row's result does not depend on the other rows. Temporaries of a few rows at a time take about 20 V bytes per row.
    """

    def __init__(self, logits_RV: Tensor, target_R: Tensor, top_n: list[int]) -> None:
        num_rows = _CPU_ROWS if logits_RV.is_cpu else _DEVICE_ROWS
        self._parts: list[tuple[list[int], Download]] = []
        for first in range(0, len(target_R), num_rows):
            part = slice(first, first + num_rows)
            found = _score(logits_RV[part].float(), target_R[part], max(top_n[part]))
            self._parts.append((top_n[part], Download(found)))

    def wait(self) -> list[TokenScore]:
        return [score for top_n, found in self._parts for score in _to_scores(found.wait(), top_n)]


def _score(logits_RV: Tensor, target_R: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (R,) targets, their logprobs and ranks, and (R, C) most likely tokens and their logprobs."""
    logprob_RV = logits_RV.log_softmax(-1)
    # Unique keys order equal logits the same way everywhere: the lower id first.
    keys_RV = keys_of(logits_RV, torch.arange(logits_RV.shape[1], device=logits_RV.device))
    target_R1 = target_R[:, None]
    rank_R = (keys_RV > keys_RV.gather(1, target_R1)).sum(-1) + 1
    top_RC = MAX_ID - (keys_RV.topk(min(top_n, logits_RV.shape[1])).values & MAX_ID)
    return target_R, logprob_RV.gather(1, target_R1)[:, 0], rank_R, top_RC, logprob_RV.gather(1, top_RC)


def _to_scores(found: Sequence[Tensor], top_n: list[int]) -> list[TokenScore]:
    columns = zip(*(column.tolist() for column in found), top_n, strict=True)
    return [
        TokenScore(token_id, logprob, rank, list(zip(best_ids[:num], best[:num], strict=True)))
        for token_id, logprob, rank, best_ids, best, num in columns
    ]
