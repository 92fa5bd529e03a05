"""Computes the bytes of a rank's memory outside its KV cache, and the bytes of a cache block."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from tightwire.model.adapters.product import AdapterRoom, adapter_bytes
from tightwire.model.cache.kv_cache import NUM_BUFFERS, layer_block_bytes
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.decoder import MAX_PROGRAM_ROWS
from tightwire.model.layer_groups import LayerGroups
from tightwire.model.layout import Layout, Shard, stage_model, whole_shard
from tightwire.model.stages import StagePlan
from tightwire.model.weights import EVERYTHING_RESIDENT, WeightPlan
from tightwire.model.weights.formats import WeightFormats, split_model, weight_bytes
from tightwire.model.weights.residency import WeightSizes
from tightwire.model.weights.stage import stage_bytes
from tightwire.server.config.limits import BLOCK_SIZE, MAX_SCORED_ROWS
from tightwire.server.config.parallel import ParallelOptions
from tightwire.server.config.serve import EngineOptions

# A process before its first tensor: interpreter and torch; with CUDA also the context and cuBLAS, on a CPU what choosing tokens
# takes beside the logits (within 3 % of the peaks in bench/RESULTS.md).
_RUNTIME_BYTES = {"cpu": 240 << 20, "cuda": 1 << 30}
# Of that the pages that ranks of a host, forked from one process, still share after requests: 138 MiB, and 43 of files (bench/RESULTS.md).
SHARED_RUNTIME_BYTES = 128 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    name: str
    available_bytes: int
    ranks: range
    shared_bytes: int = 0  # in the runtime of each rank, but only once in memory

    @property
    def room(self) -> int:
        """The bytes for ranks that are added up as if they shared nothing."""
        return self.available_bytes + self.counted_again

    @property
    def counted_again(self) -> int:
        return self.shared_bytes * (len(self.ranks) - 1)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """How many cache blocks sequences take. ``step_tokens``: the most that a step computes."""

    groups: LayerGroups
    step_tokens: int

    @classmethod
    def of(cls, model: LlamaConfig, options: EngineOptions, max_parts: int = 1, *, bounded: bool = True) -> Self:
        """The shape for steps of so many parts. A cache on the host is one group, and one that is not ``bounded``."""
        groups = LayerGroups.of(model, bounded=bounded and not options.kv_offload)
        return cls(groups, options.max_num_batched_tokens * max_parts)

    def blocks(self, num_tokens: int) -> int:
        """The most blocks of a sequence."""
        return self.groups.most_blocks(num_tokens, self.step_tokens, BLOCK_SIZE)

    def tokens(self, num_blocks: int) -> int:
        """The longest sequence in so many blocks."""
        return self.groups.most_tokens(num_blocks, self.step_tokens, BLOCK_SIZE)

    def describe(self, num_tokens: int) -> str:
        """The blocks of a sequence by kind of layer; empty for a model without windows."""
        if not self.groups.num_sliding:
            return ""
        groups, full = self.groups, self.groups.num_full * -(-num_tokens // BLOCK_SIZE)
        of_window = f"{self.blocks(num_tokens) - full} for those with a window of {groups.window}"
        block = f"a block: {BLOCK_SIZE} tokens, {groups.num_layers} layers"
        both = f"{full} for layers that attend to all tokens and at most {of_window}"
        return f"a sequence of {num_tokens} tokens takes {both} ({block})"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryInputs:
    """A model, its split, and the memory that may hold it. ``pools`` number the ranks of all replicas in order."""

    model: LlamaConfig
    layout: Layout
    options: EngineOptions
    pools: Sequence[Pool]
    dtype: str  # of activations, and of weights that are not packed
    formats: WeightFormats
    device: str
    num_replicas: int = 1
    adapters: AdapterRoom | None = None  # room for LoRA adapters
    host_bytes: int = 0  # free on the host; on a CPU, the pool's own
    stages: StagePlan | None = None  # each rank holds a part of one, in hybrid besides its shard
    parts_of_stages: Layout | None = None  # in hybrid: of each rank in the layers of its stage
    draft: "MemoryInputs | None" = None  # of the model that drafts, whole on rank 0
    feedback_elem_bytes: int = 0  # of rounding errors that sums carry, for each number of a step's messages

    @property
    def elem_bytes(self) -> int:
        return getattr(torch, self.dtype).itemsize

    @property
    def parts(self) -> list[tuple[LlamaConfig, Shard]]:
        """For each rank of a replica the layers of which it has a part, and its part of each."""
        shards, stages = self.layout.shards, self.stages
        if stages is None or not stages.pipeline:
            return [(self.model, shard) for shard in shards]
        layers = [stages.of(stages.stage_of(rank)) for rank in range(len(shards))]
        return [(stage_model(self.model, own), shard) for own, shard in zip(layers, shards, strict=True)]

    def layer_block(self, model: LlamaConfig, shard: Shard) -> int:
        """The bytes of a cache block in one layer of ``model``, with the heads of ``shard``."""
        return layer_block_bytes(model, shard, BLOCK_SIZE, getattr(torch, self.options.kv_dtype(self.dtype)))

    def weight_sizes(self, codec: str = "none") -> list[WeightSizes]:
        """One for each rank of a replica."""
        return [WeightSizes(*part, self.formats, getattr(torch, self.dtype), codec) for part in self.parts]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBytes:
    """Memory one rank needs; ``block`` and ``buffer`` are bytes per cache block."""

    weights: int
    activations: int
    runtime: int
    block: int  # in all layers of a group
    buffer: int = 0  # for a cache on the host: in the buffers on the device
    adapters: int = 0
    draft: int = 0  # weights and activations of the model that drafts, whose cache has a part of each block
    feedback: int = 0  # rounding errors that sums carry through a step

    @property
    def fixed(self) -> int:
        return self.weights + self.adapters + self.draft + self.activations + self.feedback + self.runtime


def split_ranks(model: LlamaConfig, formats: WeightFormats, parallel: ParallelOptions, *, by_stage: bool) -> Layout:
    """Return the part of each layer that every rank holds: of all, or ``by_stage`` of those of its stage. ValueError: impossible."""
    each = parallel.tp // parallel.num_stages if by_stage else parallel.tp
    shares = parallel.tp_split or (1.0,) * parallel.tp
    parts = [split_model(model, formats, each, shares[first : first + each]) for first in range(0, parallel.tp, each)]
    return Layout(shards=tuple(shard for part in parts for shard in part.shards))


def rank_bytes(inputs: MemoryInputs, plan: WeightPlan) -> tuple[RankBytes, ...]:
    """The memory of every rank, replica after replica."""
    if plan.streamed:
        weights = [sizes.in_pool(plan, inputs.device) for sizes in inputs.weight_sizes(plan.codec)]
    else:
        weights = [weight_bytes(*part, inputs.formats, inputs.elem_bytes) for part in inputs.parts]
    if (stages := inputs.stages) is not None and inputs.parts_of_stages is not None:
        both = zip(inputs.layout.shards, inputs.parts_of_stages.shards, strict=True)
        weights = [
            own + stage_bytes(inputs.model, *parts, stages.of(stages.stage_of(rank)), inputs.formats, inputs.elem_bytes)
            for rank, (own, parts) in enumerate(zip(weights, both, strict=True))
        ]
    ranks = [
        _rank_bytes(inputs, *part, num_bytes, plan.max_parts)
        for _ in range(inputs.num_replicas)
        for part, num_bytes in zip(inputs.parts, weights, strict=True)
    ]
    if inputs.draft is not None:  # with as many blocks as all replicas have
        own, model = rank_bytes(inputs.draft, EVERYTHING_RESIDENT)[0], inputs.draft.model
        block = ranks[0].block + inputs.num_replicas * model.num_layers * inputs.layer_block(model, whole_shard(model))
        ranks[0] = replace(ranks[0], draft=own.weights + own.activations, block=block)
    if inputs.device == "cpu":  # the first grammar brings llguidance, and what that keeps of each token
        ranks[0] = replace(ranks[0], runtime=ranks[0].runtime + (64 << 20) + 256 * inputs.model.vocab_size)
    return tuple(ranks)


def _rank_bytes(inputs: MemoryInputs, model: LlamaConfig, shard: Shard, weights: int, max_parts: int) -> RankBytes:
    options, layer_block = inputs.options, inputs.layer_block(model, shard)
    of_stage, part, adapted = 0, shard, [(model, shard)]
    if (stages := inputs.stages) is not None and inputs.parts_of_stages is not None:  # what it computes prompts with
        part, layers = inputs.parts_of_stages.shards[shard.rank], stages.of(stages.stage_of(shard.rank))
        of_stage = len(layers) * inputs.layer_block(model, part)
        adapted.append((stage_model(model, layers), part))
    return RankBytes(
        weights=weights,
        activations=_activation_bytes(inputs, shard, len(part.mlp_columns), max_parts, has_head=model.has_head),
        runtime=_RUNTIME_BYTES[inputs.device],
        block=CacheShape.of(model, options, bounded=inputs.stages is None).groups.num_layers * layer_block + of_stage,
        buffer=NUM_BUFFERS * layer_block if options.kv_offload else 0,
        adapters=sum(adapter_bytes(*each, inputs.adapters, inputs.elem_bytes) for each in adapted if inputs.adapters),
        feedback=inputs.feedback_elem_bytes * options.max_num_batched_tokens * model.hidden_size,
    )


def _activation_bytes(inputs: MemoryInputs, shard: Shard, num_columns: int, max_parts: int, *, has_head: bool) -> int:
    """The peak of a step: the MLP's two halves, of ``num_columns``, and the residual, and the rank's columns of the logits.

    CUDA graphs keep the activations and the logits of the largest decode step as well, and a CPU the buffers of few rows. Each further part of a step that
    shares a layer holds the residual, its increment, and the sum in flight.
    """
    model, options, elem = inputs.model, inputs.options, inputs.elem_bytes
    in_graphs = inputs.device == "cuda" and options.cuda_graphs and not options.kv_offload
    num_tokens = options.max_num_batched_tokens + in_graphs * options.max_num_seqs
    layer = elem * num_tokens * (4 * model.hidden_size + 3 * num_columns)
    layer += elem * (max_parts - 1) * options.max_num_batched_tokens * 3 * model.hidden_size
    if inputs.device == "cpu":  # the buffers of ``LayerProgram``
        heads = (3 * shard.local_heads + 2 * shard.local_kv_heads) * model.head_dim
        of_row = elem * (model.hidden_size + heads + 3 * num_columns) + 4 * 2 * model.hidden_size
        layer += max(MAX_PROGRAM_ROWS, options.max_num_seqs) * of_row
    # Rows that choose a token are copied when prompts are scored beside them, and again when they are edited or drawn from by kind.
    return layer + 4 * (MAX_SCORED_ROWS + (3 + in_graphs) * options.max_num_seqs) * len(shard.vocab_rows) * has_head
