"""Builds one rank's runner from its weights, cache, layers and AllReduces."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tightwire.comm.codec.codec import parse_codec
from tightwire.comm.group.group import Group
from tightwire.comm.group.nodes import PartitionPeers
from tightwire.comm.lane import Lane
from tightwire.comm.policy.routes import Routes
from tightwire.model.adapters.product import AdapterProducts, AdapterRoom
from tightwire.model.cache.kv_cache import CacheSource, KVCache, OffloadedCache
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.reader import CheckpointReader
from tightwire.model.decode_graphs import DecodeGraphs, cuda_capture, graph_sizes
from tightwire.model.decoder import Llama
from tightwire.model.layer_groups import LayerGroups
from tightwire.model.layout import Layout, Shard, stage_model
from tightwire.model.parallel import ChoiceGather, SideWire, StageWire, TensorParallel
from tightwire.model.prompt_stages import Passage, PromptStages
from tightwire.model.runner import ModelRunner
from tightwire.model.sampling.choose import TokenChooser
from tightwire.model.stages import StagePlan
from tightwire.model.weights import EVERYTHING_RESIDENT, WeightPlan
from tightwire.model.weights.formats import WeightFormats
from tightwire.model.weights.load import CheckpointStore, Progress, load_weights
from tightwire.model.weights.packed_layer import LayerFiles
from tightwire.model.weights.prepared.folder import Prepared
from tightwire.model.weights.source import ResidentWeights, WeightSource
from tightwire.model.weights.stage import load_stage

# Share of the fetch timeout for retries of a read. It must fail before the pass that waits for it: its error names the cause.
_PATIENCE_SHARE = 0.75
Source = CheckpointReader | Prepared | LayerFiles  # of weights


@dataclass(frozen=True, slots=True)
class RankGroups:
    """The groups that one rank is in."""

    replica: Group  # the ranks that the model is split over
    routes: Routes | None = None  # their AllReduces; None for a replica of one rank
    world: Group | None = None  # the ranks of all replicas; None: there is one replica
    stage: int = 0  # in a pipeline ``replica`` is the ranks of this stage
    stages: Group | None = None  # the first ranks of all stages again, with connections of their own
    beside: Group | None = None  # and again, for chosen tokens, or all ranks for KV heads, which no stage waits for
    inside: Group | None = None  # in hybrid, the ranks of this stage; None: this one alone
    inside_routes: Routes | None = None
    peers: PartitionPeers | None = None  # share this shard's partitioned weights; closed with the runner


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerOptions:
    """Sizes and modes of one rank's runner."""

    dtype: torch.dtype  # of activations and plain weights
    kv_dtype: torch.dtype | None = None  # of keys and values in the cache; None: ``dtype``
    # Of messages of partial sums; None: float32 on a CPU, ``dtype`` on CUDA. Given on CUDA, the residual has it too; on a
    # CPU the residual is always float32.
    sum_dtype: torch.dtype | None = None
    max_model_len: int
    num_blocks: int
    block_size: int
    groups: LayerGroups | None = None  # of a cache on the device; None: one, whose windows only mask
    buffer_blocks: int | None = None  # of each of two layers on the device, with the cache on the host; None: all
    formats: WeightFormats = field(default_factory=WeightFormats)  # a prepared folder has its own
    weight_plan: WeightPlan = EVERYTHING_RESIDENT
    fetch_timeout_s: float = 60.0  # longest wait for a layer's weights or cache without receiving a byte
    overlap: bool = False  # on CPU, compute one half of a prefill step while the ranks sum the other half
    most_rows: int | None = None  # prefill steps with more rows are computed in parts
    graphs_up_to: int = 0  # on CUDA, capture decode steps of up to this many rows; the same on all ranks
    fuses: bool = True  # graphs of one row: norms in kernels of products where faster; texts may differ by start
    cuts_head: bool = False  # steps may use a part of the head's rows, so graphs leave the product with it out
    stages: StagePlan | None = None  # that prompts pass; None: all ranks compute prompts together
    parts: Layout | None = None  # in hybrid, of each rank in the layers of its stage
    stage_codec: str = "none"  # of hidden states between stages
    adapters: AdapterRoom | None = None  # room for LoRA adapters; None: there are none


def build_runner(
    config: LlamaConfig,
    source: Source,
    layout: Layout,
    groups: RankGroups,
    options: RunnerOptions,
    progress: Progress = lambda fraction: None,
) -> ModelRunner:
    """Load this rank's weights onto its device and return the runner.

    ``source``: a checkpoint, a prepared folder with the split ``layout``, or this rank's files of it. ``progress``:
    called with the share of weight bytes loaded, 0 to 1. Raises ValueError: the weight plan and the peers do not match;
    ModelError: a tensor is missing or has another shape.
    """
    replica, world = groups.replica, groups.world
    if (passed := options.stages) is not None and passed.pipeline:
        config, first = stage_model(config, passed.of(groups.stage)), groups.stage * passed.ranks_each
        layout = Layout(shards=layout.shards[first : first + passed.ranks_each])
    shard, plan = layout.shards[replica.rank], options.weight_plan
    weights = _load_weights(config, source, shard, groups, options, progress)
    cache = _make_cache(config, shard, options, replica.device)
    parallel = TensorParallel(replica, layout, groups.routes, options.sum_dtype)
    adapters = _make_adapters(config, shard, options, replica.device)
    model = Llama(config, parallel, weights, cache, options.max_model_len, adapters)
    # A graph fixes each layer's address, and makes sums of rows only.
    moving = bool(plan.streamed) or options.buffer_blocks is not None or model.sums_squares
    has_graphs = options.graphs_up_to and replica.device.type == "cuda" and not moving
    vocab_rows = [each.vocab_rows for each in layout.shards[: replica.world_size]]
    return ModelRunner(
        model,
        TokenChooser(vocab_rows, replica.rank, replica.device, parallel.gather_choices),
        graphs=_make_graphs(config, model, replica, options) if has_graphs else None,
        lane=Lane("sums", replica.device, ledger=replica.ledger) if options.overlap else None,
        most_rows=options.most_rows,
        choice_gather=None if world is None else ChoiceGather(world, len(layout.shards)),
        lockstep=plan.source == "partition",
        stages=_make_stages(config, source, layout, groups, options, model) if options.stages else None,
    )


def _make_graphs(config: LlamaConfig, model: Llama, replica: Group, options: RunnerOptions) -> DecodeGraphs:
    if config.first_layer:
        most = options.graphs_up_to, model.hidden_size
        model.before_TD = torch.zeros(most, dtype=model.residual_dtype, device=replica.device)
    have_head = options.stages is None and not options.cuts_head
    gate_up = model.weights.layer(0).gate_up
    is_plain = isinstance(gate_up, torch.Tensor) and gate_up.dtype != torch.float32
    return DecodeGraphs(
        (lambda batch: model.logits(model.forward(batch))) if have_head else model.forward,
        have_head=have_head,
        sizes=graph_sizes(options.graphs_up_to),
        num_policies=model.parallel.num_policies,
        num_groups=model.cache.groups.num,
        max_blocks=-(-options.max_model_len // options.block_size),
        device=replica.device,
        capture=cuda_capture(torch.cuda.graph_pool_handle()),
        ledger=replica.ledger,
        has_adapters=model.adapters is not None,
        fuses=options.fuses and is_plain and config.norms == "before",
    )


def _make_stages(
    config: LlamaConfig, source: Source, layout: Layout, groups: RankGroups, options: RunnerOptions, model: Llama
) -> PromptStages | Passage:
    """Return the way through the stages; of hybrid, load this rank's part of its stage's layers. ValueError: see the message."""
    plan, weights, parts, parallel = options.stages, model.weights, options.parts, model.parallel
    device, dtype = groups.replica.device, model.residual_dtype
    if isinstance(source, Prepared | LayerFiles) or not isinstance(weights, ResidentWeights) or plan is None:
        raise ValueError("stages need a checkpoint whose layers are all resident")
    if parts is not None:
        own = Layout(shards=tuple(parts.shards[rank] for rank in plan.ranks_of(groups.stage)))
        group = groups.inside or replace(groups.replica, rank=0, world_size=1)
        parallel = TensorParallel(group, own, groups.inside_routes, torch.float32)  # memory carries the sums
    wire = None if groups.stages is None else StageWire(groups.stages, device, parse_codec(options.stage_codec), dtype)
    beside = None if groups.beside is None else SideWire(groups.beside, device)
    passage = Passage(plan, groups.stage, config.hidden_size, wire, beside, parallel)
    if parts is None:
        return passage
    shard, part, layers = layout.shards[groups.replica.rank], parallel.shard, plan.of(groups.stage)
    given = source, config, shard, part, layers, options.formats, options.dtype
    loaded, other_rows = load_stage(*given, weights.layers, weights.outer)
    own = stage_model(config, layers)
    cache = _make_cache(own, part, replace(options, num_blocks=options.num_blocks + 1), device)
    adapters = _make_adapters(own, part, options, device)
    if model.adapters is not None:
        model.adapters.beside = adapters
    staged = Llama(own, parallel, loaded, cache, options.max_model_len, adapters, has_program=False)
    return PromptStages(passage, layout, parts, staged, other_rows, model.cache)


def _make_adapters(
    config: LlamaConfig, shard: Shard, options: RunnerOptions, device: torch.device
) -> AdapterProducts | None:
    if options.adapters is None:
        return None
    return AdapterProducts(config, shard, options.adapters, dtype=options.dtype, device=device)


def _make_cache(config: LlamaConfig, shard: Shard, options: RunnerOptions, device: torch.device) -> CacheSource:
    given: dict[str, Any] = {name: getattr(options, name) for name in ("num_blocks", "block_size", "dtype", "kv_dtype")}
    if options.buffer_blocks is None:
        return KVCache(config, shard, **given, device=device, groups=options.groups)
    moving = {"buffer_blocks": options.buffer_blocks, "timeout_s": options.fetch_timeout_s}
    return OffloadedCache(config, shard, **given, **moving, device=device)


def _load_weights(
    config: LlamaConfig, source: Source, shard: Shard, groups: RankGroups, options: RunnerOptions, progress: Progress
) -> WeightSource:
    plan, timeout_s = options.weight_plan, options.fetch_timeout_s
    files = source
    if isinstance(files, Prepared):
        files = files.store(shard.rank, plan.io, patience_s=_PATIENCE_SHARE * timeout_s)
    elif not isinstance(files, LayerFiles):
        files = CheckpointStore.for_plan(files, config, shard, plan, options.dtype, options.formats)
    peers = groups.peers if plan.source == "partition" else None
    joined = 0 if peers is None else peers.at.per_node
    if plan.source == "partition" and plan.ranks_per_node != joined:
        raise ValueError(f"the plan shares weights among {plan.ranks_per_node} ranks of a node, but {joined} joined")
    return load_weights(files, plan, device=groups.replica.device, timeout_s=timeout_s, peers=peers, progress=progress)
