"""Layers that keep less for backward: the bits of the modules that they replace, and the bytes that they hold."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, LlamaConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP, Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from tightwire.training.engine.autograd import is_gated, keep_gate_and_up, keep_norms_input, write_gradients
from tightwire.training.estimate.memory import LiveBytes

_TOKENS, _HIDDEN, _WIDTH = 5, 64, 160
_SIZES: Any = {"hidden_size": _HIDDEN, "intermediate_size": _WIDTH}


def _read(norm: nn.Module) -> nn.Module:
    """A norm with a layer that reads its result."""
    return nn.Sequential(norm, nn.Linear(_HIDDEN, 24, bias=False))


_KINDS: dict[str, Callable[[], nn.Module]] = {
    "llama-norm": lambda: _read(LlamaRMSNorm(_HIDDEN)),
    "gemma-norm": lambda: _read(Gemma2RMSNorm(_HIDDEN)),
    "llama-mlp": lambda: LlamaMLP(LlamaConfig(**_SIZES)),
    "gemma-mlp": lambda: Gemma2MLP(Gemma2Config(**_SIZES)),
}


def _replace(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.give_view = lambda dtype: None  # pyright: ignore[reportAttributeAccessIssue]
            write_gradients(layer)
        elif is_gated(layer):
            keep_gate_and_up(layer)
        elif "weight" in layer._parameters:
            keep_norms_input(layer)


def _step(module: nn.Module, x: Tensor) -> tuple[list[Tensor], int, int]:
    """Gradients, the bytes held between forward and backward without the result, and those held after, without gradients."""
    x = x.detach().requires_grad_()
    with LiveBytes() as live:
        out = module(x)
        held = live.now - out.nbytes
        out.backward(out.detach().sin())
        grads = [x.grad, *(parameter.grad for parameter in module.parameters())]
        found = [grad for grad in grads if grad is not None]
        return found, held, live.now - out.nbytes - sum(grad.nbytes for grad in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", _KINDS)
def test_layers_that_keep_less_have_the_modules_gradients(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain, x = _KINDS[kind]().to(dtype), torch.randn(1, _TOKENS, _HIDDEN, dtype=dtype)
    own = copy.deepcopy(plain)
    _replace(own)

    grads, held, after = _step(own, x)

    want, plain_held, _ = _step(plain, x)
    assert all(torch.equal(grad, other) for grad, other in zip(grads, want, strict=True))
    assert held == (2 * _TOKENS * _WIDTH * dtype.itemsize if kind.endswith("mlp") else 0)  # gate and up; the input
    assert held < plain_held
    assert after == 0, "what was computed again is not freed"


def test_products_of_another_form_are_kept() -> None:
    assert not any(map(is_gated, (nn.Linear(2, 2), Phi3MLP.__new__(Phi3MLP))))
