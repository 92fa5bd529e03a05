"""Next-token loss that works in place: its saved tensor and its gradient overwrite the float32 logits.

torch's cross-entropy makes four tensors as large as float32 logits. Three of them are live where backward begins, which is
the step's memory peak. Here torch's own operators process a few rows at a time, so losses and gradients have the same bits.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from tightwire.training.data.chats import IGNORED

_MEAN = 1  # torch's code for reduction="mean"
PIECES = 16  # the rows are processed in this many chunks

_aten = torch.ops.aten


def next_token_loss(logits: Tensor, labels: Tensor, vocab_size: int, shift_labels: Tensor, **_: Any) -> Tensor:
    """The mean loss over all targets that are not -100, as the ``loss_function`` of a transformers model.

    ``logits``: (B, S, V); float32 ones are overwritten, so backward can run only once. ``shift_labels``: (B, S) int64,
    the token after each position. Cost: memory of the float32 logits, plus two sixteenths of that for temporaries.
    """
    return _NextTokenLoss.apply(logits.float().view(-1, vocab_size), shift_labels.flatten())  # pyright: ignore[reportReturnType]


def to_logprobs(logits_NV: Tensor) -> None:
    """Replace float32 logits by their log-probabilities, a few rows at a time, unseen by autograd."""
    for rows_CV in logits_NV.detach().chunk(PIECES):
        rows_CV.copy_(torch.log_softmax(rows_CV, dim=1))


class MeanOfTargets(ABC):
    """An objective whose loss is the mean over the targets of a batch."""

    def weight(self, batch: Any) -> int:
        return int((batch.targets_BS != IGNORED).sum())

    def total(self, model: Any, batch: Any) -> list[float]:
        loss, sums = self.loss(model, batch)
        return [self.weight(batch), float(loss) * self.weight(batch), *sums.tolist()]

    @abstractmethod
    def loss(self, model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        """As ``Objective.loss``."""


class _NextTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        to_logprobs(logits_NV)
        loss, num_targets = _aten.nll_loss_forward(logits_NV, targets_N, None, _MEAN, IGNORED)
        ctx.save_for_backward(logits_NV, targets_N, num_targets)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        log_NV, targets_N, num_targets = ctx.saved_tensors
        grad_NV = log_NV.detach()
        for rows_CV, targets_C in zip(grad_NV.chunk(PIECES), targets_N.chunk(PIECES), strict=True):
            of_rows = _aten.nll_loss_backward(grad, rows_CV, targets_C, None, _MEAN, IGNORED, num_targets)
            rows_CV.copy_(_aten._log_softmax_backward_data(of_rows, rows_CV, 1, torch.float32))
        return grad_NV, None
