"""Prints a run's memory, traffic and step time without starting ranks or loading weights.

Memory, traffic and the predicted time come from ``training.estimate``. The other times are lower bounds: computing at the
device's peak rate, and sending over each link.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import torch

from tightwire.comm.group.topology import Topology
from tightwire.comm.link.link import Link, parse_link
from tightwire.comm.sizes import format_bytes
from tightwire.training.config.tree import TrainConfig
from tightwire.training.data.documents import DataError, RunData
from tightwire.training.engine.flat_parameters import BucketPlan
from tightwire.training.engine.options import engine_options
from tightwire.training.engine.traffic import Flow
from tightwire.training.estimate.arithmetic import peak_flops
from tightwire.training.estimate.memory import checkpoint_bytes
from tightwire.training.estimate.step import StepModel, model_step
from tightwire.training.estimate.step_time import Computing, Rates, predict_step
from tightwire.training.run.early_checks import find_topology
from tightwire.training.run.setup import check_sequences, find_device
from tightwire.training.start.model import config_of


def dry_run(config: TrainConfig, environment: Mapping[str, str] = os.environ) -> str:
    """The report as text. Raises ValueError: a run with this configuration would fail its checks."""
    topology = _topology(config, environment)
    config.check_ranks(topology)
    options = engine_options(config)
    llama = config_of(config.model)
    check_sequences(config, llama)
    links = {key: _link(key, text) for key in ("inside", "between") if (text := getattr(config.dry_run, key))}
    model = model_step(config, options, llama, topology, step=config.schedule.steps - 1)
    lines = [*_about_run(model), *_about_memory(model), *_about_traffic(model), *_about_time(model, links)]
    return "".join(f"{line}\n" for line in lines)


def _topology(config: TrainConfig, environment: Mapping[str, str]) -> Topology:
    if config.dry_run.ranks is None:
        return find_topology(environment, config.parallel.nodes)
    return Topology(0, config.dry_run.ranks, num_nodes=config.parallel.nodes or 1)


def _about_run(model: StepModel) -> Iterator[str]:
    config, plan, topology = model.config, model.plan, model.topology
    trainable = sum(flat_param.num_parameters for flat_param in plan.flat_params if flat_param.trainable)
    frozen = plan.num_parameters - trainable
    yield f"parameters        {_millions(plan.num_parameters)}{f', of which {_millions(frozen)} frozen' if frozen else ''}"
    yield f"                  {len(plan.blocks)} blocks of {_millions(_block_elems(plan))}, vocabulary {model.llama.vocab_size}"
    yield (
        f"ranks             {topology.world_size} on {topology.num_nodes} node{'s' if topology.num_nodes > 1 else ''}, "
        f"sharding {config.parallel.sharding}, {plan.shard_ranks} shards"
    )
    tokens = config.batch.sequences * config.data.sequence_tokens
    yield (
        f"a step            {config.batch.sequences} sequences of {config.data.sequence_tokens} tokens = {tokens} tokens; "
        f"{config.batch.accumulation(topology.world_size)} micro-batches of {config.batch.micro_sequences} on each rank"
    )
    yield f"the run           {config.schedule.steps} steps, {tokens * config.schedule.steps:,} tokens"
    try:
        files = RunData.find(config).documents.files
        size = format_bytes(sum(path.stat().st_size for path in files))
        yield f"data              {len(files)} file{'s' if len(files) > 1 else ''}, {size}"
    except DataError as error:
        yield f"data              NOT FOUND: {error}"


def _about_memory(model: StepModel) -> Iterator[str]:
    config, plan, memory = model.config, model.plan, model.memory()
    yield ""
    yield "memory per rank: held for the whole run"
    yield from _sizes(memory.stays)
    yield "  plus the largest of these peaks"
    yield from _sizes(memory.moments)
    yield f"    {'together':<18}{format_bytes(memory.most):>10}, without the program itself"
    replicas = model.topology.world_size // plan.shard_ranks
    one = checkpoint_bytes(config.optimizer, plan, config.parallel.between, replicas)
    yield (
        f"disk              {format_bytes((config.checkpoint.keep + 1) * one)}: {format_bytes(one)} per checkpoint, "
        f"{config.checkpoint.keep} kept and one being written"
    )
    exported = plan.num_parameters * getattr(torch, config.export.dtype).itemsize
    yield f"                  {format_bytes(exported)} the exported model"


def _sizes(sizes: Mapping[str, int]) -> Iterator[str]:
    return (f"    {name.replace('_', ' '):<18}{format_bytes(size):>10}" for name, size in sizes.items() if size)


def _about_traffic(model: StepModel) -> Iterator[str]:
    if not model.inside_nodes + model.between_nodes:
        return
    yield ""
    yield "sent by a rank in a step"
    kinds: dict[tuple[str, str], list[Flow]] = {}
    for flow in model.flows:
        kinds.setdefault((flow.lane, flow.op), []).append(flow)
    for (_, op), members in kinds.items():
        total = sum(flow.calls * flow.bytes_sent for flow in members)
        payloads = [(flow.flat_param, flow.payload_bytes) for flow in members for _ in range(flow.calls)]
        if payloads:
            yield f"    {op:<18}{format_bytes(total):>10} in {len(payloads)} calls"
            yield from _by_kind(payloads, "a payload of")
    if model.compressors:
        sums = {name: each.inside + each.between_nodes for name, each in model.compressors.items()}
        kind = model.config.parallel.between.kind
        yield f"    {'compressor':<18}{format_bytes(sum(sums.values())):>10} in {len(sums)} sums, {kind}"
        yield from _by_kind(sums.items(), "sending")
    yield f"    {'inside nodes':<18}{format_bytes(model.inside_nodes):>10}"
    if model.topology.num_nodes > 1:
        of_node = format_bytes(model.between_nodes * model.topology.ranks_per_node)
        yield f"    {'between nodes':<18}{format_bytes(model.between_nodes):>10}, {of_node} for all ranks of a node"


def _by_kind(sizes: Iterable[tuple[str, int]], what: str) -> Iterator[str]:
    """One line for each kind of bucket and size. Buckets of a kind differ in size only if their parameters differ."""
    for (kind, size), calls in Counter((re.sub(r"\.\d+", "", flat_param), size) for flat_param, size in sizes).items():
        yield f"        {kind:<14}{calls:>10} x {what} {format_bytes(size)}"


def _about_time(model: StepModel, links: Mapping[str, Link]) -> Iterator[str]:
    """``links``: the configured links, by their key in ``dry_run``."""
    yield ""
    yield "time of a step: at least the longest of these"
    config = model.config
    given = config.log.peak_tflops
    rate = given * 1e12 if given else peak_flops(find_device(config.device, Topology(0, 1)), _dtype(config))
    seconds, is_complete = [], rate is not None
    if rate is None:
        yield f"    {'computing':<18}not known: give log.peak_tflops ({model.flops / 1e12:.3g} TFLOP a rank)"
    else:
        seconds.append(model.flops / rate)
        source = "as given" if given else "of this machine"
        yield (
            f"    {'computing':<18}{_seconds(seconds[0]):>10}  {model.flops / 1e12:.3g} TFLOP a rank at "
            f"{rate / 1e12:.3g} TFLOP/s, {source}"
        )
    for name, key, num_bytes in (
        ("inside nodes", "inside", model.inside_nodes),
        ("between nodes", "between", model.between_nodes * model.topology.ranks_per_node),
    ):
        if not num_bytes:
            continue
        if key not in links:
            is_complete = False
            yield f"    {name:<18}not known: give dry_run.{key}, such as dry_run.{key}=1gbit"
            continue
        seconds.append(links[key].seconds(num_bytes))
        yield f"    {name:<18}{_seconds(seconds[-1]):>10}  {format_bytes(num_bytes)} at {getattr(config.dry_run, key)}"
    if seconds:
        steps = config.schedule.steps
        yield f"    {'a step':<18}{_seconds(max(seconds)):>10}; all {steps} steps {_seconds(max(seconds) * steps)}"
    if is_complete and model.topology.world_size > 1 and config.batch.accumulation(model.topology.world_size) == 1:
        predicted_s = predict_step(model, _split(seconds[0]), _rates(links, model.topology))
        yield f"    {'predicted':<18}{_seconds(predicted_s):>10}  with communication and computing overlapped as in a run"


def _split(computing_s: float) -> Computing:
    """Backward has twice the operations of forward."""
    return Computing(forward_s=computing_s / 3, backward_s=2 * computing_s / 3, rest_s=0.0)


def _rates(links: Mapping[str, Link], topology: Topology) -> Rates:
    across, inside = (links.get(key, Link("", None)) for key in ("between", "inside"))
    return Rates(
        across_bytes_per_s=(across.bytes_per_s or math.inf) / topology.ranks_per_node,
        across_round_s=across.latency_s,
        inside_bytes_per_s=inside.bytes_per_s or math.inf,
        inside_round_s=inside.latency_s,
    )


def _block_elems(plan: BucketPlan) -> int:
    return max(sum(flat_param.num_parameters for flat_param in bucket.flat_params) for bucket in plan.blocks)


def _dtype(config: TrainConfig) -> torch.dtype:
    return getattr(torch, config.model.compute_dtype)


def _link(key: str, text: str) -> Link:
    try:
        return parse_link(text)
    except ValueError as error:
        raise ValueError(f"dry_run.{key}: {error}") from None


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count < 1e9 else f"{count / 1e9:.2f} B"


def _seconds(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{1e3 * seconds:.0f} ms"
