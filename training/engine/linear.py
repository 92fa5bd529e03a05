"""A linear layer whose backward writes its weight's gradient into the engine's gradient buffer, without a tensor of its own.

Source: YaFSDP, whose layers get a view of the buffer and return None as the weight's gradient.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tightwire.training.engine.gates import gradient_view, has_gradient_view


def write_gradients(layer: nn.Linear) -> None:
    """Replace ``layer.forward``. Bits are those of ``nn.Linear``; ``del layer.forward`` restores it."""

    def forward(input: Tensor) -> Tensor:
        if torch.is_grad_enabled() and has_gradient_view(layer.weight):
            return _Linear.apply(input, layer.weight, layer.bias)  # pyright: ignore[reportReturnType]
        return linear(input, layer.weight, layer.bias)

    layer.forward = forward


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.weight = weight  # a saved tensor comes back as another object, without its view
        return linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        input, weight = ctx.saved_tensors
        grad_TO, input_TI = grad.flatten(0, -2), input.flatten(0, -2)
        needs_input, _, needs_bias = ctx.needs_input_grad
        view_OI = gradient_view(ctx.weight, grad.dtype)
        product_OI = torch.mm(grad_TO.t(), input_TI, out=view_OI)
        return (
            grad @ weight if needs_input else None,
            product_OI if view_OI is None else None,
            grad_TO.sum(0) if needs_bias else None,
        )
