"""Computes the bytes of a rank's memory outside its KV cache, and the bytes of a cache block."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tightwire.model.cache.offloaded_cache import NUM_BUFFERS
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.layout import Layout, Shard
from tightwire.model.weights.formats import WeightFormats, weight_bytes
from tightwire.model.weights.residency import WeightPlan, WeightSizes
from tightwire.server.config.limits import MAX_SCORED_ROWS
from tightwire.server.config.serve import EngineOptions

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# A process before its first tensor: interpreter, torch, numba; with CUDA also the context and cuBLAS.
_RUNTIME_BYTES = {"cpu": 300 << 20, "cuda": 1 << 30}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBytes:
    """Memory one rank needs; ``block`` and ``slot`` are bytes per cache block."""

    weights: int
    activations: int
    runtime: int
    block: int  # in all layers
    slot: int = 0  # for a cache on the host: bytes per block in the slots

    @property
    def fixed(self) -> int:
        return self.weights + self.activations + self.runtime


RanksWith = Callable[[EngineOptions], tuple[RankBytes, ...]]


def ranks_maker(
    config: LlamaConfig,
    layout: Layout,
    formats: WeightFormats,
    dtype: str,
    device: str,
    plan: WeightPlan,
    num_replicas: int,
) -> RanksWith:
    """A function that gives the memory of every rank for changed options, replica after replica."""
    weights = [_weight_bytes(config, shard, formats, dtype, device, plan) for shard in layout.shards]

    def ranks_with(options: EngineOptions) -> tuple[RankBytes, ...]:
        return tuple(
            _rank_bytes(config, shard, options, num_bytes, dtype, device, plan.max_parts, num_gathered)
            for replica in range(num_replicas)
            for shard, num_bytes in zip(layout.shards, weights, strict=True)
            for num_gathered in [num_replicas if replica == shard.rank == 0 else 0]
        )

    return ranks_with


def _weight_bytes(
    config: LlamaConfig, shard: Shard, formats: WeightFormats, dtype: str, device: str, plan: WeightPlan
) -> int:
    """Bytes of a rank's weights in its pool."""
    if not plan.streamed:
        return weight_bytes(config, shard, formats, _DTYPE_BYTES[dtype])
    sizes = WeightSizes(config, shard, formats, getattr(torch, dtype), plan.codec)
    return sizes.in_pool(plan, device)


def _rank_bytes(
    config: LlamaConfig,
    shard: Shard,
    options: EngineOptions,
    num_weight_bytes: int,
    dtype: str,
    device: str,
    max_parts: int,
    num_gathered: int,
) -> RankBytes:
    """The memory of the rank with ``shard``. ``num_gathered``: replicas whose logits this rank gathers."""
    elem = _DTYPE_BYTES[dtype]
    layer_block = 2 * shard.local_kv_heads * options.block_size * config.head_dim * elem
    return RankBytes(
        weights=num_weight_bytes,
        activations=_activation_bytes(config, shard, options, elem, device, max_parts, num_gathered),
        runtime=_RUNTIME_BYTES[device],
        block=config.num_layers * layer_block,
        slot=NUM_BUFFERS * layer_block if options.kv_offload else 0,
    )


def _activation_bytes(
    config: LlamaConfig,
    shard: Shard,
    options: EngineOptions,
    elem_bytes: int,
    device: str,
    max_parts: int,
    num_gathered: int,
) -> int:
    """The peak of a step: the MLP's two halves beside the residual, or the logits.

    Rank 0 gathers the logits of all sequences and of a few hundred scored prompt tokens from each replica, and samples
    from a copy. CUDA graphs keep the activations of the largest decode step as well. Each further part of a step that
    shares a layer holds the residual, its increment, and the sum in flight.
    """
    num_tokens, num_rows = options.max_num_batched_tokens, options.max_num_seqs + MAX_SCORED_ROWS
    if device == "cuda" and options.cuda_graphs and not options.kv_offload:
        num_tokens += options.max_num_seqs
    layer = elem_bytes * num_tokens * (4 * config.hidden_size + 3 * len(shard.mlp_columns))
    layer += elem_bytes * (max_parts - 1) * options.max_num_batched_tokens * 3 * config.hidden_size
    return layer + 4 * num_rows * (3 * num_gathered * config.vocab_size or 2 * len(shard.vocab_rows))
