"""Computes the peak memory of one rank and the bytes of optimizer state and checkpoints.

A rank's peak is what it holds for the whole run, plus the largest of four peaks in a step:

    backward         activations and their gradients, usually largest where backward begins
    reducing         the same from the first sum over ranks on, plus that sum's buffers
    last_sums        buffers of the largest bucket's sum after backward
    optimizer_step   temporaries of the optimizer's step

Activations are measured by a forward and backward on the meta device, with the engine's own hooks, so recomputation and frozen parameters
count as in a run. Not included: the program, the kernels' own working memory, and freed memory that an allocator keeps.
"""

import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface

from tightwire.comm.group.topology import Topology
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.training.compression.compressors import kept_bytes
from tightwire.training.config.optimizer import CompressorOptions, OptimizerConfig
from tightwire.training.config.tree import TrainConfig
from tightwire.training.data.sequences import Batch
from tightwire.training.engine.costs import engine_memory, transfer_bytes
from tightwire.training.engine.flat_parameters import FLOAT32_BYTES, Bucket, BucketPlan, ParamSpan, cut_shard
from tightwire.training.engine.gradients import shares_gradient_buffer
from tightwire.training.engine.hooks import Hooks, MicroBatch
from tightwire.training.engine.options import EngineOptions
from tightwire.training.optimizer import make_optimizer
from tightwire.training.start.answers import Answers
from tightwire.training.start.loss import next_token_loss
from tightwire.training.start.model import plan_model
from tightwire.training.start.objective import make_objective

_META = torch.device("meta")
_ATTENTION = "tightwire-meta"  # the name that transformers knows our attention by
_TRIED = 256  # elements of a trial tensor


class LiveBytes(TorchDispatchMode):
    """Counts tensors made inside ``with``, in this thread and in backward of CPU and meta tensors.

    It does not count the kernels' own working memory: a dispatch mode sees only results.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0  # bytes; ``most`` since the start, or since it was set
        self._known: dict[int, weakref.ref[Any]] = {}

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
    """Measure one micro-batch, without the kernels' own working memory. Cost: tens of milliseconds per block.

    ``accumulates``: a step has several micro-batches.
    """
    # On the meta device torch uses plain attention, which keeps all scores; real devices use fused kernels.
    has_mask = config.data.kind not in ("text", "prompts")  # rows of several samples
    AttentionInterface.register(_ATTENTION, partial(_attention, has_mask))
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
            live.most = live.now

    def nothing(*_: Any, **__: Any) -> None: ...

    def view(bucket: Bucket, param: ParamSpan, dtype: torch.dtype) -> Tensor | None:
        has_earlier = accumulates and not shares_gradient_buffer(options, bucket)
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


def _attention(has_mask: bool, _: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> Any:
    """Saves what fused kernels save for backward: queries, keys, values, the result, one number per query and head, the mask."""
    mask = query.new_empty(query.shape[0], 1, query.shape[2], query.shape[2]) if has_mask else None
    if has_mask:  # then transformers copies keys and values for each head that shares them
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    result = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=mask)[0]
    return result.transpose(1, 2).contiguous(), None


class OptimizerBytes(NamedTuple):
    """Bytes per element: of optimizer state, and of the temporary tensors of a step that updates one tensor at a time."""

    kept: int
    temporary: int


def measure_optimizer(config: OptimizerConfig) -> OptimizerBytes:
    """The optimizer's bytes, found by steps on small tensors."""
    # Two tensors: an optimizer may still hold the first one's temporaries while it updates the second.
    tried = [torch.nn.Parameter(torch.zeros(_TRIED)) for _ in range(2)]
    for parameter in tried:
        parameter.grad = torch.ones(_TRIED)
    optimizer = make_optimizer(config, [{"params": tried, "name": "matrices"}])
    optimizer.step()
    with LiveBytes() as live:
        optimizer.step()
    state = optimizer.state.get(tried[0], {}).values()
    flat_param = [value for value in state if isinstance(value, torch.Tensor) and value.numel() == _TRIED]
    # Scalar state rounds to 0.
    return OptimizerBytes(sum(value.element_size() for value in flat_param), live.most // _TRIED)


def checkpoint_bytes(config: OptimizerConfig, plan: BucketPlan, between: CompressorOptions, num_replicas: int) -> int:
    """Bytes of one checkpoint in all ranks' files, without frozen weights; each of several replicas stores its residuals."""
    element_bytes = FLOAT32_BYTES + measure_optimizer(config).kept
    shared = element_bytes * plan.num_trainable
    if num_replicas == 1:
        return shared
    ranks = range(plan.shard_ranks)
    shards = [cut_shard(flat_param, rank, plan.shard_ranks) for flat_param in plan.trainable for rank in ranks]
    return shared + num_replicas * sum(kept_bytes(between, shard) for shard in shards)


class RankMemory(NamedTuple):
    """A rank's bytes by purpose. ``stays``: held for the whole run. ``peaks``: besides; they do not coincide."""

    stays: dict[str, int]
    peaks: dict[str, int]

    @property
    def most(self) -> int:
        return sum(self.stays.values()) + max(self.peaks.values())


def rank_memory(
    config: TrainConfig, options: EngineOptions, llama: LlamaConfig, plan: BucketPlan, topology: Topology
) -> RankMemory:
    """The memory of a rank of ``topology``. ``plan``: the buckets of ``llama``, sharded for these ranks."""
    nodes = {"num_nodes": topology.num_nodes, "ranks_per_node": topology.ranks_per_node}
    shards = [flat_param.num_elems // plan.shard_ranks for flat_param in plan.trainable]
    replicated = plan.trainable if topology.world_size > plan.shard_ranks else []
    between, optimizer = config.parallel.between, measure_optimizer(config.optimizer)
    accumulates = config.batch.accumulation(topology.world_size) > 1
    activations = activation_bytes(llama, options, config, accumulates=accumulates)
    transfers = transfer_bytes(plan, options, **nodes)
    return RankMemory(
        stays={
            **engine_memory(plan, options, **nodes),
            "between": sum(kept_bytes(between, cut_shard(each, 0, plan.shard_ranks)) for each in replicated),
            "optimizer": optimizer.kept * sum(shards),
        },
        peaks={
            "backward": activations.most,
            "reducing": activations.reducing + transfers.beside_backward if transfers.beside_backward else 0,
            "last_sums": transfers.at_the_end,
            "optimizer_step": optimizer.temporary * max(shards),
        },
    )
