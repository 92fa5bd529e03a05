"""Autograd functions that mark where backward enters and leaves a decoder block.

Module hooks do not tell when all gradients of a block are ready. So the inputs, weights and outputs of a block pass through
identity functions, called gates:

    outputs   the gate's backward runs before the backward of anything in the block
    weights   are created for each forward, as children of the inputs' gate; their backward receives the gradients
    inputs    the gate's backward runs after that of all weights, and before that of the operations that made the inputs

Tensors inside keyword arguments, lists and dictionaries are gated too. An anchor that requires a gradient keeps the
inputs' gate in the graph if no input requires one. Source: YaFSDP's GateGradFlow and Narrow.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

TakeGrad = Callable[[Tensor | None], None]
GiveView = Callable[[torch.dtype], Tensor | None]
Event = Callable[[], None]


def gate_inputs(backward_ends: Event, anchor: Tensor, args: Any) -> tuple[Tensor, Any]:
    """Gate the tensors in ``args``. Returns the gated anchor, for the block's weights, and the gated ``args``."""
    leaves, spec = tree_flatten(args)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    gated = _Gate.apply(backward_ends, anchor, *(leaves[i] for i in places))
    for i, leaf in zip(places, gated[1:], strict=True):
        leaves[i] = leaf
    return gated[0], tree_unflatten(leaves, spec)


def gate_outputs(backward_begins: Event, outputs: Any) -> Any:
    leaves, spec = tree_flatten(outputs)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    gated = _Gate.apply(backward_begins, *(leaves[i] for i in places))
    for i, leaf in zip(places, gated, strict=True):
        leaves[i] = leaf
    return tree_unflatten(leaves, spec)


def needs_gradient(args: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_flatten(args)[0])


def weight(anchor: Tensor, values: Tensor, take: TakeGrad, give_view: GiveView) -> Tensor:
    """``values`` as a parameter of this forward; backward passes its gradient to ``take``.

    A layer whose backward asks ``give_view`` through ``gradient_view`` writes the gradient itself and returns None.
    """
    gated: Any = _Weight.apply(anchor, values, take)
    gated.give_view = give_view
    return gated


def has_gradient_view(weight: Tensor) -> bool:
    """Whether ``weight`` comes from ``weight()``."""
    return hasattr(weight, "give_view")


def gradient_view(weight: Any, dtype: torch.dtype) -> Tensor | None:
    """Where a layer's backward writes the gradient of ``weight`` before it returns None for it; called once a backward.

    None: the gradient is returned as usual, because it is added to another one or converted from ``dtype``.
    """
    return weight.give_view(dtype)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, event: Event, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.event = event
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.event()
        return None, *grads


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, values: Tensor, take: TakeGrad) -> Tensor:
        ctx.take = take
        ctx.set_materialize_grads(False)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.take(grad)
        return None, None, None
