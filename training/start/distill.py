"""Distillation: a small model, a draft, learns what a target finds likely at each place of the target's answers.

A place's loss is the KL from the target's probabilities to the model's: sum of p (log p - log q), where p are those of the target's
``top`` tokens divided by their sum. With all tokens it is the forward KL. Source: Hinton et al., arXiv 1503.02531.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tightwire.recorded_answers import read_recorded
from tightwire.training.data.chats import IGNORED
from tightwire.training.data.sequences import Batch
from tightwire.training.start.loss import PIECES, MeanOfTargets, to_logprobs


@dataclass(frozen=True)
class Distill(MeanOfTargets):
    """The mean KL over all places of the answers in ``folder``; a batch's targets are their numbers.

    ``greedy``: share of places where the model's most likely token is the target's, which a greedy target accepts as a draft.
    ``sampled``: the probability that the target gives that token, the share accepted at temperature 1.
    """

    top: int
    folder: Path
    figures: tuple[str, ...] = ("greedy", "sampled")

    @cached_property
    def _table(self) -> tuple[Tensor, Tensor]:
        ids_PK, logs_PK = map(torch.from_numpy, read_recorded(self.folder))
        return ids_PK.long(), logs_PK

    def loss(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        logits_BSV = model(input_ids=batch.inputs_BS, position_ids=batch.positions_BS, use_cache=False).logits
        logits_NV, places_N = logits_BSV.float().flatten(0, 1), batch.targets_BS.flatten()
        learned_N = places_N != IGNORED
        if places_N.is_meta:  # the memory of a step is measured
            logs_NK = logits_NV.new_zeros(len(places_N), self.top)
            ids_NK = logs_NK.long()
        else:
            own_N = places_N.clamp(min=0).to("cpu")
            ids_NK, logs_NK = (each[own_N].to(places_N.device) for each in self._table)
        probs_NK = logs_NK.softmax(1) * learned_N[:, None]
        loss, best_N = forward_kl(logits_NV, ids_NK, probs_NK)
        is_best_NK = (ids_NK == best_N[:, None]) & learned_N[:, None]
        return loss, torch.stack([is_best_NK[:, 0].sum(), (logs_NK.exp() * is_best_NK).sum()]).float()


def forward_kl(logits_NV: Tensor, ids_NK: Tensor, probs_NK: Tensor) -> tuple[Tensor, Tensor]:
    """The mean KL over the rows whose probabilities have the sum 1 (of the others it is 0), and (N,) each row's most likely token.

    ``logits_NV``: float32, overwritten as by ``training.start.loss``, so backward can run only once; with the same memory.
    """
    return _ForwardKl.apply(logits_NV, ids_NK, probs_NK)  # pyright: ignore[reportReturnType]


class _ForwardKl(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, ids_NK: Tensor, probs_NK: Tensor) -> tuple[Tensor, Tensor]:
        to_logprobs(logits_NV)
        num_rows = (probs_NK.sum(1) > 0).sum().clamp(min=1)
        losses_NK = torch.special.xlogy(probs_NK, probs_NK) - probs_NK * logits_NV.gather(1, ids_NK)
        best_N = logits_NV.argmax(1)
        ctx.save_for_backward(logits_NV, ids_NK, probs_NK, num_rows)
        ctx.mark_non_differentiable(best_N)
        return losses_NK.sum() / num_rows, best_N

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        log_NV, ids_NK, probs_NK, num_rows = ctx.saved_tensors
        grad_NV = log_NV.detach()
        rows = (each.chunk(PIECES) for each in (grad_NV, ids_NK, probs_NK))
        for rows_CV, ids_CK, probs_CK in zip(*rows, strict=True):
            rows_CV.exp_().mul_(probs_CK.sum(1, keepdim=True)).scatter_add_(1, ids_CK, -probs_CK).mul_(grad / num_rows)
        return grad_NV, None, None
