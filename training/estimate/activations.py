"""Measures activation memory by running forward and backward on the meta device.

The model runs with the engine's own hooks, so recomputation and frozen parameters count as in a run. Weights and gradient
buffers are not counted; ``training.engine.memory`` computes them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface

from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.training.engine.hooks import Hooks
from tightwire.training.engine.micro_batch import MicroBatch
from tightwire.training.engine.options import EngineOptions
from tightwire.training.engine.units import Flat, Part, Unit, UnitPlan, plan_units
from tightwire.training.estimate.live_bytes import LiveBytes
from tightwire.training.start.loss import next_token_loss
from tightwire.training.start.model import build_model

_META = torch.device("meta")
_ATTENTION = "tightwire-meta"  # the name that transformers knows our attention by


class Activations(NamedTuple):
    """Peak bytes of one micro-batch on one rank, with gradients of activations.

    ``most``: over the whole micro-batch. ``reducing``: after backward has produced the first block's gradients, when ranks
    begin to sum them.
    """

    most: int
    reducing: int


def activation_bytes(
    config: LlamaConfig,
    options: EngineOptions,
    *,
    sequences: int,
    sequence_tokens: int,
    frozen: tuple[str, ...] = (),
) -> Activations:
    """Measure one micro-batch, without the kernels' own working memory. Cost: a few milliseconds per block."""
    # On the meta device torch uses plain attention, which keeps all scores; real devices use fused kernels.
    AttentionInterface.register(_ATTENTION, _attention)
    model: Any = build_model(config, device=_META, frozen=frozen)
    model.loss_function = next_token_loss
    model.config._attn_implementation = _ATTENTION
    plan = plan_units(model, 1)
    weights: Any = _Weights(plan, options.compute_dtype)
    with LiveBytes() as live:
        gradients: Any = _Gradients(live)
        hooks = Hooks(model, plan)
        anchor = torch.zeros((), device=_META, requires_grad=True)
        ids_BS = torch.zeros(sequences, sequence_tokens, dtype=torch.int64, device=_META)
        hooks.micro_batch = MicroBatch(plan, options, weights, gradients, anchor, last=True)
        model(input_ids=ids_BS, labels=ids_BS, shift_labels=ids_BS, use_cache=False).loss.backward()
        most = max(gradients.most_before, live.most)
        return Activations(most, live.most if gradients.most_before else 0)


class _Weights:
    """Replaces ``engine.weights.Weights``: every weight is always present."""

    def __init__(self, plan: UnitPlan, dtype: torch.dtype) -> None:
        self._views = {
            part: torch.empty(part.shape, dtype=dtype, device=_META) for flat in plan.flats for part in flat.parts
        }

    def request(self, unit: Unit) -> None:
        pass

    def use(self, unit: Unit) -> None:
        pass

    def done(self, unit: Unit, keep: bool) -> None:
        pass

    def view(self, unit: Unit, flat: Flat, part: Part) -> Tensor:
        return self._views[part]


class _Gradients:
    """Replaces ``engine.gradients.Gradients``: gradients are not stored, so their buffers are not counted."""

    def __init__(self, live: LiveBytes) -> None:
        self.most_before = 0  # peak until the first block's gradients were complete
        self._live = live

    def begin(self, unit: Unit, last: bool) -> None:
        pass

    def add(self, unit: Unit, part: Part, grad: Tensor) -> None:
        pass

    def end(self, unit: Unit, last: bool) -> None:
        if unit.block is not None and not self.most_before:
            self.most_before = self._live.most
            self._live.start_anew()


class _FusedAttention(torch.autograd.Function):
    """Saves what fused kernels save for backward: queries, keys, values, the result, one number per query and head."""

    @staticmethod
    def forward(ctx: Any, q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor) -> Tensor:
        sequences, heads, tokens, width = q_BHSE.shape
        out_BHSE = q_BHSE.new_empty(sequences, tokens, heads, width).transpose(1, 2)
        ctx.save_for_backward(q_BHSE, k_BKSE, v_BKSE, out_BHSE, q_BHSE.new_empty(q_BHSE.shape[:3], dtype=torch.float32))
        return out_BHSE

    @staticmethod
    def backward(ctx: Any, grad_BHSE: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(torch.empty_like(saved) for saved in ctx.saved_tensors[:3])


def _attention(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
    return _FusedAttention.apply(query, key, value).transpose(1, 2).contiguous(), None
