"""Puts one rank's model together: weights, cache, layers, and the AllReduces it was given."""

from collections.abc import Callable

import torch

from tightwire.comm.group import Group
from tightwire.comm.lane import CommLane
from tightwire.comm.policy.routes import Routes
from tightwire.model.config import LlamaConfig
from tightwire.model.decode_graphs import DecodeGraphs, cuda_capture, graph_sizes
from tightwire.model.kv_cache import make_kv_cache
from tightwire.model.layout import Layout
from tightwire.model.llama import Llama
from tightwire.model.parallel import TensorParallel
from tightwire.model.runner import ModelRunner
from tightwire.model.weights.formats import WeightFormats
from tightwire.model.weights.load_streamed import load_prepared, load_streamed
from tightwire.model.weights.prepared import Prepared
from tightwire.model.weights.residency import EVERYTHING_RESIDENT, WeightPlan
from tightwire.model.weights.resident import load_resident
from tightwire.model.weights.source import CheckpointReader


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
    formats: WeightFormats | None = None,
    weight_plan: WeightPlan = EVERYTHING_RESIDENT,
    fetch_timeout_s: float = 60.0,
    progress: Callable[[float], None] = lambda fraction: None,
    overlap: bool = False,
    most_rows: int | None = None,
    graphs_up_to: int = 0,
) -> ModelRunner:
    """Load this rank's weights onto ``group.device`` and return what executes step plans.

    Args:
        source: of the weights: a checkpoint, or a prepared folder, which was cut as ``layout`` and is kept in its own ways.
        routes: what sums each of the model's messages; None for a group of one.
        dtype: of activations, cache, and weights that are not packed.
        formats: how weight matrices are kept; default: all as plain numbers.
        weight_plan: which layers are streamed, and from where.
        fetch_timeout_s: longest that not one byte of a streamed layer may come.
        progress: called with the share of weight bytes loaded, 0 to 1.
        overlap: on CPU, compute one half of a step with a prompt while the other half is summed.
        most_rows: steps with a prompt that have more go through each layer in several parts; default: in one.
        graphs_up_to: on CUDA, steps of up to so many generated rows are captured as graphs; all ranks do it together.
    Raises:
        ModelError: the checkpoint lacks a tensor or holds it in another shape.
    """
    shard = layout.shards[group.rank]
    device = group.device
    fetching = {"timeout_s": fetch_timeout_s, "progress": progress}
    reading = {"dtype": dtype, "device": device, "formats": formats or WeightFormats()}
    if isinstance(source, Prepared):
        weights = load_prepared(source, group.rank, weight_plan, device=device, **fetching)
    elif weight_plan.streamed:
        weights = load_streamed(source, config, shard, weight_plan, **reading, **fetching)
    else:
        weights = load_resident(source, config, shard, progress=progress, **reading)
    cache = make_kv_cache(config, shard, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=device)
    parallel = TensorParallel(group, layout, routes)
    model = Llama(config, parallel, weights, cache, max_model_len)
    graphs = None
    if graphs_up_to and device.type == "cuda" and not weight_plan.streamed:  # a graph knows one address of a layer
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
        model, cache, group.ledger, weights, graphs, CommLane(group.ledger) if overlap else None, most_rows
    )
