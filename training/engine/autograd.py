"""Autograd functions of the engine: gates around decoder blocks, and layers that keep less for backward.

**Gates.** Module hooks do not tell when all gradients of a block are ready. So the inputs, weights and outputs of a block pass through
identity functions, called gates:

    outputs   the gate's backward runs before the backward of anything in the block
    weights   are created for each forward, as children of the inputs' gate; their backward receives the gradients
    inputs    the gate's backward runs after that of all weights, and before that of the operations that made the inputs

Tensors inside keyword arguments, lists and dictionaries are gated too. An anchor that requires a gradient keeps the
inputs' gate in the graph if no input requires one. Source: YaFSDP's GateGradFlow and Narrow.

**Layers.** A linear layer's backward writes its weight's gradient into the engine's gradient buffer and returns None for it (YaFSDP).
A norm keeps its input, which the residual stream keeps too, and a gated product keeps gate and up; linear layers that read their results
keep neither. Backward computes a result again when it is first needed, and frees it after the backward of what made it. The graph is that of the
modules, so gradients have the same bits. Source: Korthikanti et al., arXiv 2205.05198, which recomputes the cheap part of a block.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import linear
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers.models.llama.modeling_llama import LlamaMLP


class Again:
    """Computes ``compute(*inputs)`` again, once for all that need it: the tensors that its graph saved, and the result."""

    def __init__(self, compute: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
        self._compute, self._made = compute, ([], None)
        self._inputs: Any = _Kept.apply(torch.empty(0, requires_grad=True), *inputs)
        self._count = 0  # of saved tensors that backward has not asked for

    def keep(self, _: Tensor) -> int:
        self._count += 1
        return self._count - 1

    def saved(self, number: int) -> Tensor:
        saved, self._count = self._run()[0], self._count - 1
        if not self._count:  # all that read the result had their backward before
            self._made, self._inputs = ([], None), None
        return saved[number]

    def result(self) -> Tensor:
        result = self._run()[1]
        assert result is not None
        return result

    def _run(self) -> tuple[list[Tensor], Tensor | None]:
        if self._made[1] is None:
            saved: list[Tensor] = []
            inputs = [each.detach().requires_grad_(each.requires_grad) for each in self._inputs.grad_fn.saved_tensors]
            with torch.enable_grad(), saved_tensors_hooks(lambda each: saved.append(each.detach()), lambda each: each):
                self._made = saved, self._compute(*inputs).detach()
        return self._made


class _Kept(torch.autograd.Function):
    """Keeps tensors as any other layer does, so that recomputing a whole block covers them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)


def computed_again(compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """``compute(*inputs)``. Layers that need it in backward keep its attribute ``again`` instead."""
    if not torch.is_grad_enabled() or not any(each.requires_grad for each in inputs):
        return compute(*inputs)
    again = Again(compute, inputs)
    with saved_tensors_hooks(again.keep, again.saved):
        result: Any = compute(*inputs)
    result.again = again
    return result


def keep_norms_input(norm: nn.Module) -> None:
    """Replace the forward of a module with one parameter, ``weight``; ``del norm.forward`` restores it."""
    forward = norm.forward

    def compute(input: Tensor, weight: Tensor) -> Tensor:
        norm.__dict__["weight"] = weight  # in backward the module has none
        return forward(input)

    norm.forward = lambda input: computed_again(compute, input, norm.weight)  # pyright: ignore[reportArgumentType]


def keep_gate_and_up(mlp: Any) -> None:
    """Replace the forward of a module for which ``is_gated`` is true; ``del mlp.forward`` restores it."""

    def product(gate: Tensor, up: Tensor) -> Tensor:
        return mlp.act_fn(gate) * up

    mlp.forward = lambda x: mlp.down_proj(computed_again(product, mlp.gate_proj(x), mlp.up_proj(x)))


def is_gated(module: nn.Module) -> bool:
    """True if ``module`` computes what Llama's MLP does, whatever its family's class is called."""
    own, llama = (getattr(cls.forward, "__code__", None) for cls in (type(module), LlamaMLP))
    return own is not None and llama is not None and (own.co_code, own.co_names) == (llama.co_code, llama.co_names)


def write_gradients(layer: nn.Linear) -> None:
    """Replace ``layer.forward``. Bits are those of ``nn.Linear``; ``del layer.forward`` restores it."""

    def forward(input: Tensor) -> Tensor:
        if torch.is_grad_enabled() and hasattr(layer.weight, "give_view"):
            return _Linear.apply(input, layer.weight, layer.bias)  # pyright: ignore[reportReturnType]
        return linear(input, layer.weight, layer.bias)

    layer.forward = forward


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.again = getattr(input, "again", None)  # of a result that is not kept
        ctx.save_for_backward(weight, input if ctx.again is None else None)
        ctx.weight = weight  # a saved tensor comes back as another object, without its view
        return linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight, input = ctx.saved_tensors
        if ctx.again is not None:
            input = ctx.again.result()
        grad_TO, input_TI = grad.flatten(0, -2), input.flatten(0, -2)
        needs_input, _, needs_bias = ctx.needs_input_grad
        view_OI = gradient_view(ctx.weight, grad.dtype)
        product_OI = torch.mm(grad_TO.t(), input_TI, out=view_OI)
        return (
            grad @ weight if needs_input else None,
            product_OI if view_OI is None else None,
            grad_TO.sum(0) if needs_bias else None,
        )


TakeGrad = Callable[[Tensor | None], None]
GiveView = Callable[[torch.dtype], Tensor | None]
Event = Callable[[], None]


def gate_tensors(event: Event, values: Any) -> Any:
    """Gate the tensors in ``values``: a block's anchor and inputs, or its outputs. Backward calls ``event``."""
    leaves, spec = tree_flatten(values)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    gated = _Gate.apply(event, *(leaves[i] for i in places))
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
