"""The loss of a next token, whose memory is that of the logits: what it keeps and what it gives back lie in their place.

torch's cross-entropy takes four tensors as large as float32 logits, three of them at once where backward begins: there a step
needs most memory, and the vocabulary is what it is made of. Here rows are taken some at a time through torch's own
operators, so losses and gradients have the same bits.
"""

from typing import Any

import torch
from torch import Tensor

_IGNORED = -100  # a target that does not count
_MEAN = 1  # torch's number of the reduction
_PIECES = 16  # that rows are taken in

_aten = torch.ops.aten


def next_token_loss(logits: Tensor, labels: Tensor, vocab_size: int, shift_labels: Tensor, **_: Any) -> Tensor:
    """The mean over all targets that are not -100; what a transformers model takes for its ``loss_function``.

    Args:
        logits: (B, S, V), of no use any more: float32 ones are overwritten. One backward can go through it.
        labels: not looked at.
        shift_labels: (B, S) int64, the token after each.
    Cost: logits as float32, of which two sixteenths more for moments.
    """
    return _NextTokenLoss.apply(logits.float().view(-1, vocab_size), shift_labels.flatten())  # pyright: ignore[reportReturnType]


class _NextTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        for rows_CV in logits_NV.detach().chunk(_PIECES):
            rows_CV.copy_(torch.log_softmax(rows_CV, dim=1))
        loss, num_targets = _aten.nll_loss_forward(logits_NV, targets_N, None, _MEAN, _IGNORED)
        ctx.save_for_backward(logits_NV, targets_N, num_targets)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        log_NV, targets_N, num_targets = ctx.saved_tensors
        grad_NV = log_NV.detach()
        for rows_CV, targets_C in zip(grad_NV.chunk(_PIECES), targets_N.chunk(_PIECES), strict=True):
            of_rows = _aten.nll_loss_backward(grad, rows_CV, targets_C, None, _MEAN, _IGNORED, num_targets)
            rows_CV.copy_(_aten._log_softmax_backward_data(of_rows, rows_CV, 1, torch.float32))
        return grad_NV, None
