"""Prints a run's memory, traffic and step time without starting ranks or loading weights.

Times are lower bounds, computing at the device's peak rate and sending over each link, and ``estimate.step_time``'s prediction.
"""

import math
import os
from collections.abc import Iterator, Mapping

import torch

from tightwire.comm.group.topology import Topology
from tightwire.comm.link.link import Link, parse_link
from tightwire.sizes import format_bytes, format_millions, format_seconds, parse_bytes
from tightwire.training.config.optimizer import CompressorOptions, SparseOptions
from tightwire.training.config.tree import TrainConfig
from tightwire.training.data.documents import DataError, RunData
from tightwire.training.engine.flat_parameters import BucketPlan
from tightwire.training.engine.options import engine_options
from tightwire.training.estimate.memory import checkpoint_bytes
from tightwire.training.estimate.step import StepModel, advice, dtype_advice, model_step, peak_flops, sparse_phases
from tightwire.training.estimate.step_time import Computing, Rates, predict_step
from tightwire.training.run.early_checks import find_topology
from tightwire.training.run.rollouts import Engines
from tightwire.training.run.setup import check_sequences, find_device, usable_bytes
from tightwire.training.start.model import config_of


def dry_run(config: TrainConfig, environment: Mapping[str, str] = os.environ, engines: Engines | None = None) -> str:
    """The report as text; ``engines``: those of the run. Raises ValueError: a run with this configuration would fail its checks."""
    given = config.dry_run
    if given.ranks is None:
        topology = find_topology(environment, config.parallel.nodes)
    else:
        topology = Topology(0, given.ranks, num_nodes=config.parallel.nodes or 1)
    config.check_ranks(topology)
    links = {key: parse_link(text) for key in ("inside", "between") if (text := getattr(given, key))}
    options, llama = engine_options(config), config_of(config.model)
    check_sequences(config, llama)
    model = model_step(config, options, llama, topology, step=config.schedule.steps - 1)
    if config.parallel.checkpoint_blocks == "auto":
        device = find_device(config.device, Topology(0, 1))
        ranks_of_host = find_topology(environment, None).ranks_per_node
        model = model.fitting(parse_bytes(given.memory) if given.memory else usable_bytes(device, ranks_of_host))
    engine = engines.bytes(config, topology) if engines and config.data.kind == "prompts" else {}
    lines = [*_about_run(model), *_about_memory(model, engine), *_about_traffic(model), *_about_time(model, links)]
    return "".join(f"{line}\n" for line in lines)


def _about_run(model: StepModel) -> Iterator[str]:
    config, plan, topology = model.config, model.plan, model.topology
    frozen = plan.num_parameters - plan.num_trainable
    block = max(bucket.num_parameters for bucket in plan.blocks) // plan.per_bucket
    yield f"parameters        {format_millions(plan.num_parameters)}{f', of which {format_millions(frozen)} frozen' if frozen else ''}"
    yield f"                  {len(plan.block_modules)} blocks of {format_millions(block)}, vocabulary {model.llama.vocab_size}"
    yield (
        f"ranks             {topology.world_size} on {topology.num_nodes} node{'s' if topology.num_nodes > 1 else ''}, "
        f"sharding {config.parallel.sharding}, {plan.shard_ranks} shard{'s' if plan.shard_ranks > 1 else ''}"
    )
    tokens = config.step_tokens
    yield (
        f"a step            {config.batch.sequences // config.answers.minibatches} sequences of {config.data.sequence_tokens} tokens = {tokens} tokens; "
        f"{config.micro_batches(topology.world_size)} micro-batches of {config.batch.micro_sequences} on each rank"
    )
    yield f"the run           {config.schedule.steps} steps, {tokens * config.schedule.steps:,} tokens"
    try:
        files = RunData.find(config).documents.files
        size = format_bytes(sum(path.stat().st_size for path in files))
        yield f"data              {len(files)} file{'s' if len(files) > 1 else ''}, {size}"
    except DataError as error:
        yield f"data              NOT FOUND: {error}"


def _about_memory(model: StepModel, engine: Mapping[str, int]) -> Iterator[str]:
    config, plan, memory = model.config, model.plan, model.memory()
    yield "\nmemory per rank: held for the whole run"
    yield from _sizes({**memory.stays, **engine})
    yield "  plus the largest of these peaks"
    yield from _sizes(memory.peaks)
    yield f"    {'together':<18}{format_bytes(memory.most + sum(engine.values())):>10}, without the program itself"
    if count := min(model.options.checkpoint_blocks, len(plan.block_modules)):
        yield f"    {'recomputed':<18}{count} of {len(plan.block_modules)} blocks"
    replicas = model.topology.world_size // plan.shard_ranks
    one = checkpoint_bytes(config.optimizer, plan, config.parallel.between, replicas)
    yield (
        f"disk              {format_bytes((config.checkpoint.keep + 1) * one)}: {format_bytes(one)} per checkpoint, "
        f"{config.checkpoint.keep} kept and one being written"
    )
    has_lora = config.model.lora is not None
    exported = (plan.num_trainable if has_lora else plan.num_parameters) * getattr(torch, config.export.dtype).itemsize
    yield f"                  {format_bytes(exported)} the exported {'adapter' if has_lora else 'model'}"


def _sizes(sizes: Mapping[str, int]) -> Iterator[str]:
    return (f"    {name.replace('_', ' '):<18}{format_bytes(size):>10}" for name, size in sizes.items() if size)


def _about_traffic(model: StepModel) -> Iterator[str]:
    sent: dict[str, int] = {}
    for flow in model.flows:
        sent[flow.op] = sent.get(flow.op, 0) + flow.calls * flow.bytes_sent
    if model.compressors:
        total = sum(each.inside + each.between_nodes for each in model.compressors.values())
        sent[f"{model.config.parallel.between.kind} compressor"] = total
    if any(sent.values()):
        yield "\nsent by a rank in a step"
        yield from _sizes({**sent, "inside nodes": model.inside_nodes, "between nodes": model.between_nodes})
    yield from _about_phases(model.config.parallel.between, model.plan, model.topology.world_size)


def _about_phases(compressor: CompressorOptions, plan: BucketPlan, num_ranks: int) -> Iterator[str]:
    replicas = num_ranks // plan.shard_ranks
    if replicas == 1 or not isinstance(compressor, SparseOptions):
        return
    phases, dense_bytes = sparse_phases(compressor, plan, replicas)
    yield f"\nsent by the {compressor.kind} compressor of replica 0; dense sums would send {format_bytes(dense_bytes)}"
    for first, phase in phases.items():
        share = "every element" if phase.sparsity is None else f"sparsity {phase.sparsity:g}"
        times = f"{phase.sent_bytes / dense_bytes:.2g} times dense"
        yield f"    {f'from step {first}':<18}{format_bytes(phase.sent_bytes):>10}  {share}, {times}"
    yield from (f"    ADVICE: {text}" for text in advice(compressor, plan, replicas))


def _about_time(model: StepModel, links: Mapping[str, Link]) -> Iterator[str]:
    """``links``: the configured links, by their key in ``dry_run``."""
    yield "\ntime of a step: at least the longest of these"
    config, topology, tflop = model.config, model.topology, model.flops / 1e12
    given, dtype = config.log.peak_tflops, getattr(torch, config.model.compute_dtype)
    device = find_device(config.device, Topology(0, 1))
    rate = given * 1e12 if given else peak_flops(device, dtype)
    at_rate = f" at {rate / 1e12:.3g} TFLOP/s, {'as given' if given else 'of this machine'}"
    inside, between = model.inside_nodes, model.between_nodes * topology.ranks_per_node
    times = {
        "computing": (model.flops / rate, f"{tflop:.3g} TFLOP a rank{at_rate}", "log.peak_tflops"),
        "inside nodes": (_sending_s(links.get("inside"), inside), format_bytes(inside), "dry_run.inside=200gbit"),
        "between nodes": (_sending_s(links.get("between"), between), format_bytes(between), "dry_run.between=1gbit"),
    }
    for name, (seconds, what, key) in times.items():
        if seconds is None:
            yield f"    {name:<18}not known for {what}: give {key}"
        elif seconds:
            yield f"    {name:<18}{format_seconds(seconds):>10}  {what}"
    if not given:
        yield from (f"    ADVICE: {text}" for text in dtype_advice(device, dtype, rate))
    known = [seconds for seconds, *_ in times.values() if seconds is not None]
    steps = config.schedule.steps
    yield f"    {'a step':<18}{format_seconds(max(known)):>10}; all {steps} steps {format_seconds(max(known) * steps)}"
    one_forward = config.micro_batches(topology.world_size) == 1 and not config.has_reference
    if len(known) == len(times) and topology.world_size > 1 and one_forward:
        # Backward has twice the operations of forward.
        computing = Computing(forward_s=known[0] / 3, backward_s=2 * known[0] / 3, rest_s=0.0)
        predicted_s = predict_step(model, computing, _rates(links, topology))
        yield f"    {'predicted':<18}{format_seconds(predicted_s):>10}  with communication and computing overlapped as in a run"


def _sending_s(link: Link | None, num_bytes: int) -> float | None:
    return 0.0 if not num_bytes else None if link is None else link.seconds(num_bytes)


def _rates(links: Mapping[str, Link], topology: Topology) -> Rates:
    across, inside = (links.get(key, Link("", None)) for key in ("between", "inside"))
    return Rates(
        across_bytes_per_s=(across.bytes_per_s or math.inf) / topology.ranks_per_node,
        across_round_s=across.latency_s,
        inside_bytes_per_s=inside.bytes_per_s or math.inf,
        inside_round_s=inside.latency_s,
    )
