"""Puts one rank's model together: weights, cache, layers, and the AllReduces it was given."""

from collections.abc import Callable
from typing import Any

import torch

from tightwire.comm.group.group import Group
from tightwire.comm.group.partition_groups import PartitionPeers
from tightwire.comm.lane import CommLane
from tightwire.comm.policy.routes import Routes
from tightwire.model.cache.kv_cache import CacheSource, make_kv_cache
from tightwire.model.cache.offloaded_cache import OffloadedCache
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.reader import CheckpointReader
from tightwire.model.decode_graphs import DecodeGraphs, cuda_capture, graph_sizes
from tightwire.model.layout import Layout, Shard
from tightwire.model.llama import Llama
from tightwire.model.logits_gather import LogitsMeeting
from tightwire.model.parallel import TensorParallel
from tightwire.model.runner import ModelRunner
from tightwire.model.weights.formats import WeightFormats
from tightwire.model.weights.layer_reader import CheckpointLayers, LayerReader, PreparedLayers
from tightwire.model.weights.load import load_partitioned, load_streamed
from tightwire.model.weights.prepared.folder import Prepared
from tightwire.model.weights.residency import EVERYTHING_RESIDENT, WeightPlan
from tightwire.model.weights.resident import load_resident
from tightwire.model.weights.source import WeightSource

_PATIENCE_SHARE = 0.75  # of the fetch timeout


def build_runner(
    config: LlamaConfig,
    source: CheckpointReader | Prepared,
    group: Group,
    layout: Layout,
    *,
    routes: Routes | None,
    dtype: torch.dtype,
    max_model_len: int,
    num_blocks: int,
    block_size: int,
    slot_blocks: int | None = None,
    formats: WeightFormats | None = None,
    weight_plan: WeightPlan = EVERYTHING_RESIDENT,
    peers: PartitionPeers | None = None,
    fetch_timeout_s: float = 60.0,
    progress: Callable[[float], None] = lambda fraction: None,
    overlap: bool = False,
    most_rows: int | None = None,
    graphs_up_to: int = 0,
    world: Group | None = None,
) -> ModelRunner:
    """Load this rank's weights onto ``group.device`` and return what executes step plans.

    Args:
        source: of the weights: a checkpoint, or a prepared folder, which was cut as ``layout`` and is kept in its own ways.
        routes: what sums each of the model's messages; None for a group of one.
        dtype: of activations, cache, and weights that are not packed.
        slot_blocks: the cache lies on the host, and the device has room for so many blocks of two layers, which is the most
            that a step may need; None: it lies on the device.
        formats: how weight matrices are kept; default: all as plain numbers.
        weight_plan: which layers are streamed, and from where.
        peers: the ranks that hold the same weights, for a plan of partitioned ones; closed with the runner.
        fetch_timeout_s: longest that not one byte of a layer may come, be it weights or its part of the cache.
        progress: called with the share of weight bytes loaded, 0 to 1.
        overlap: on CPU, compute one half of a step with a prompt while the other half is summed.
        most_rows: steps with a prompt that have more go through each layer in several parts; default: in one.
        world: the ranks of all replicas, of which ``group`` is one; None: it is the only one.
        graphs_up_to: on CUDA, steps of up to so many generated rows are captured as graphs; all ranks do it together.
    Raises:
        ValueError: the plan and ``peers`` do not go together.
        ModelError: the checkpoint lacks a tensor or holds it in another shape.
    """
    shard = layout.shards[group.rank]
    device = group.device
    formats = formats or WeightFormats()
    weights = _load_weights(
        source,
        config,
        shard,
        weight_plan,
        peers,
        dtype=dtype,
        formats=formats,
        fetching={"device": device, "timeout_s": fetch_timeout_s, "progress": progress},
    )
    sizes = {"num_blocks": num_blocks, "block_size": block_size, "dtype": dtype, "device": device}
    cache: CacheSource
    if slot_blocks is None:
        cache = make_kv_cache(config, shard, **sizes)
    else:
        cache = OffloadedCache(config, shard, slot_blocks=slot_blocks, timeout_s=fetch_timeout_s, **sizes)
    parallel = TensorParallel(group, layout, routes)
    model = Llama(config, parallel, weights, cache, max_model_len)
    graphs = None
    moving = bool(weight_plan.streamed) or slot_blocks is not None
    if graphs_up_to and device.type == "cuda" and not moving:  # a graph knows one address of a layer
        graphs = DecodeGraphs(
            model.forward,
            sizes=graph_sizes(graphs_up_to),
            num_arms=parallel.num_arms,
            max_blocks=-(-max_model_len // block_size),
            device=device,
            capture=cuda_capture(torch.cuda.graph_pool_handle()),
            ledger=group.ledger,
        )
    return ModelRunner(
        model,
        cache,
        group.ledger,
        weights,
        graphs,
        lane=CommLane(group.ledger) if overlap else None,
        most_rows=most_rows,
        meeting=None if world is None else LogitsMeeting(world, layout),
        lockstep=weight_plan.source == "partition",
    )


def _load_weights(
    source: CheckpointReader | Prepared,
    config: LlamaConfig,
    shard: Shard,
    plan: WeightPlan,
    peers: PartitionPeers | None,
    *,
    dtype: torch.dtype,
    formats: WeightFormats,
    fetching: dict[str, Any],
) -> WeightSource:
    """``fetching``: device, timeout and progress."""
    if not isinstance(source, Prepared) and plan.source == "resident":
        device, progress = fetching["device"], fetching["progress"]
        return load_resident(source, config, shard, dtype=dtype, formats=formats, device=device, progress=progress)
    reader: LayerReader
    if isinstance(source, Prepared):
        # The store's own error must be raised before that of the pass that waits for the layer.
        reader = PreparedLayers(source, shard.rank, plan, _PATIENCE_SHARE * fetching["timeout_s"])
    else:
        reader = CheckpointLayers(source, config, shard, plan, dtype, formats)
    if plan.source == "partition":
        return load_partitioned(reader, plan, _checked(peers, plan), **fetching)
    return load_streamed(reader, plan, **fetching)


def _checked(peers: PartitionPeers | None, plan: WeightPlan) -> PartitionPeers:
    if peers is None:
        raise ValueError("partitioned weights need the ranks that share them; join them first")
    if plan.ranks_per_node != peers.at.per_node:
        raise ValueError(
            f"the plan shares weights among {plan.ranks_per_node} ranks of a node, and {peers.at.per_node} have joined"
        )
    return peers
