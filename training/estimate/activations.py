"""Measures activation memory by running forward and backward on the meta device.

The model runs with the engine's own hooks, so recomputation and frozen parameters count as in a run.
"""

import weakref
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface

from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.training.config.tree import TrainConfig
from tightwire.training.data.sequences import Batch
from tightwire.training.engine.flat_parameters import Bucket, ParamSpan
from tightwire.training.engine.gradients import alternates
from tightwire.training.engine.hooks import Hooks, MicroBatch
from tightwire.training.engine.options import EngineOptions
from tightwire.training.start.grpo import Answers
from tightwire.training.start.loss import next_token_loss
from tightwire.training.start.model import plan_model
from tightwire.training.start.objective import make_objective

_META = torch.device("meta")
_ATTENTION = "tightwire-meta"  # the name that transformers knows our attention by


class LiveBytes(TorchDispatchMode):
    """Counts tensors made inside ``with``, in this thread and in backward of CPU and meta tensors.

    It does not count the kernels' own working memory: a dispatch mode sees only results.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0  # bytes
        self._known: dict[int, weakref.ref[Any]] = {}

    def start_anew(self) -> None:
        """Restart ``most`` from the bytes that are live now."""
        self.most = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in given:
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        known = self._known.get(key)
        if known is not None and known() is storage:
            return

        def forget(reference: weakref.ref[Any]) -> None:
            self.now -= num_bytes
            if self._known.get(key) is reference:
                del self._known[key]

        self._known[key] = weakref.ref(storage, forget)
        self.now += num_bytes
        self.most = max(self.most, self.now)


class Activations(NamedTuple):
    """Peak bytes of one micro-batch on one rank, with gradients of activations.

    ``most``: over the whole micro-batch. ``reducing``: from the first block's gradients on, when ranks begin to sum them.
    """

    most: int
    reducing: int


def activation_bytes(
    llama: LlamaConfig, options: EngineOptions, config: TrainConfig, *, accumulates: bool
) -> Activations:
    """Measure one micro-batch, without the kernels' own working memory. Cost: a few milliseconds per block.

    ``accumulates``: a step has several micro-batches.
    """
    # On the meta device torch uses plain attention, which keeps all scores; real devices use fused kernels.
    AttentionInterface.register(_ATTENTION, _attention)
    model: Any
    model, plan = plan_model(config, llama, _META, 1)
    model.loss_function = next_token_loss
    model.config._attn_implementation = _ATTENTION
    params = [param for flat_param in plan.flat_params for param in flat_param.params]
    views = {param: torch.empty(param.shape, dtype=options.compute_dtype, device=_META) for param in params}
    most_before = 0  # peak until the first block's gradients were complete

    def end(bucket: Bucket, last: bool) -> None:
        nonlocal most_before
        if bucket.block is not None and not most_before:
            most_before = live.most
            live.start_anew()

    def nothing(*_: Any, **__: Any) -> None: ...

    def view(bucket: Bucket, param: ParamSpan, dtype: torch.dtype) -> Tensor | None:
        has_earlier = accumulates and not alternates(options, bucket)
        return None if has_earlier or dtype != options.reduce_dtype else views[param]

    # Instead of the engine's: every weight is always present, and gradients are not stored.
    weights: Any = SimpleNamespace(request=nothing, use=nothing, done=nothing, view=lambda _, __, param: views[param])
    gradients: Any = SimpleNamespace(begin=nothing, view=view, add=nothing, end=end)
    with LiveBytes() as live:
        hooks = Hooks(model, plan)
        anchor = torch.zeros((), device=_META, requires_grad=True)
        batch = _batch(config)
        hooks.micro_batch = MicroBatch(plan, options, weights, gradients, anchor, last=True)
        make_objective(config).loss(model, batch)[0].backward()
        return Activations(max(most_before, live.most), live.most if most_before else 0)


def _batch(config: TrainConfig) -> Batch | Answers:
    """A micro-batch of the largest size, on the meta device."""
    tokens = config.step_tokens // config.batch.sequences
    if config.data.kind != "prompts":
        ids_BS = torch.zeros(config.batch.micro_sequences, tokens, dtype=torch.int64, device=_META)
        return Batch(ids_BS, ids_BS)
    size = config.batch.micro_sequences * config.answers.samples, config.data.sequence_tokens
    ids_BS, numbers_BS = torch.zeros(size, dtype=torch.int64, device=_META), torch.zeros(size, device=_META)
    return Answers(ids_BS, ids_BS, numbers_BS, numbers_BS[:, 0], *[numbers_BS] * 4)


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
