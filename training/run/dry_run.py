"""Estimates a run's memory, traffic and step time without starting ranks or loading weights.

Memory and traffic come from formulas (``training.estimate.rank_memory``, ``training.engine.traffic``) that tests compare with
the engine; activations are measured on the meta device. The step time is a lower bound: the longest of computing at the
device's peak rate and of sending over each link.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from tightwire.comm.group.topology import Topology
from tightwire.comm.link.link import Link, parse_link
from tightwire.comm.sizes import format_bytes
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.training.between.make import between_bytes, inside_bytes
from tightwire.training.config.tree import TrainConfig
from tightwire.training.data.documents import DataError
from tightwire.training.data.run_data import RunData
from tightwire.training.engine.options import EngineOptions
from tightwire.training.engine.traffic import Flow, step_traffic
from tightwire.training.engine.units import UnitPlan, cut, plan_units
from tightwire.training.estimate.arithmetic import flops_per_token, peak_flops
from tightwire.training.estimate.footprint import checkpoint_bytes
from tightwire.training.estimate.rank_memory import rank_memory
from tightwire.training.ranks.launched import find_topology
from tightwire.training.run.setup import check_ranks, check_sequences, engine_options, find_device
from tightwire.training.start.model import build_model, config_of


class Sent(NamedTuple):
    """Bytes that one rank sends in a step."""

    inside: int
    between_nodes: int


def dry_run(config: TrainConfig, environment: Mapping[str, str] = os.environ) -> str:
    """The report as text.

    Raises:
        ValueError: a run with this configuration would fail its checks.
    """
    topology = _topology(config, environment)
    options = engine_options(config)
    check_ranks(config, options, topology)
    llama = config_of(config.model)
    check_sequences(config, llama)
    links = {key: _link(key, text) for key in ("inside", "between") if (text := getattr(config.dry_run, key))}
    ranks = options.sharding.shard_ranks(topology.world_size, topology.num_nodes)
    plan = plan_units(build_model(llama, device=torch.device("cpu"), frozen=config.model.frozen), ranks)
    accumulation = config.batch.accumulation(topology.world_size)
    flows = step_traffic(
        plan,
        options,
        num_nodes=topology.num_nodes,
        ranks_per_node=topology.ranks_per_node,
        accumulation=accumulation,
    )
    slot = _slot_bytes(config, plan, topology)
    sent = sent_in_a_step(config, options, plan, flows, topology)
    lines = [
        *_about_run(config, llama, plan, topology, accumulation),
        *_about_memory(config, llama, plan, options, topology),
        *_about_traffic(config, flows, slot, sent, topology),
        *_about_time(config, llama, sent, topology, links),
    ]
    return "".join(f"{line}\n" for line in lines)


def _topology(config: TrainConfig, environment: Mapping[str, str]) -> Topology:
    if config.dry_run.ranks is None:
        return find_topology(environment, config.parallel.nodes)
    return Topology(0, config.dry_run.ranks, num_nodes=config.parallel.nodes or 1)


def _about_run(
    config: TrainConfig, llama: LlamaConfig, plan: UnitPlan, topology: Topology, accumulation: int
) -> Iterator[str]:
    trainable = sum(flat.num_parameters for flat in plan.flats if flat.trainable)
    frozen = plan.num_parameters - trainable
    yield f"parameters        {_millions(plan.num_parameters)}{f', of which {_millions(frozen)} frozen' if frozen else ''}"
    yield f"                  {len(plan.blocks)} blocks of {_millions(_block_elems(plan))}, vocabulary {llama.vocab_size}"
    yield (
        f"ranks             {topology.world_size} on {topology.num_nodes} node{'s' if topology.num_nodes > 1 else ''}, "
        f"sharding {config.parallel.sharding}, {plan.shard_ranks} shards"
    )
    tokens = config.batch.sequences * config.data.sequence_tokens
    yield (
        f"a step            {config.batch.sequences} sequences of {config.data.sequence_tokens} tokens = {tokens} tokens; "
        f"{accumulation} micro-batches of {config.batch.micro_sequences} on each rank"
    )
    yield f"the run           {config.schedule.steps} steps, {tokens * config.schedule.steps:,} tokens"
    try:
        files = RunData.find(config).documents.files
        size = format_bytes(sum(path.stat().st_size for path in files))
        yield f"data              {len(files)} file{'s' if len(files) > 1 else ''}, {size}"
    except DataError as error:
        yield f"data              NOT FOUND: {error}"


def _about_memory(
    config: TrainConfig, llama: LlamaConfig, plan: UnitPlan, options: EngineOptions, topology: Topology
) -> Iterator[str]:
    memory = rank_memory(config, options, llama, plan, topology)
    yield ""
    yield "memory per rank: held for the whole run"
    yield from _sizes(memory.stays)
    yield "  plus the largest of these peaks"
    yield from _sizes(memory.moments)
    yield f"    {'together':<18}{format_bytes(memory.most):>10}, not counting the program itself"
    slot, replicas = config.parallel.between, topology.world_size // plan.shard_ranks
    one = checkpoint_bytes(config.optimizer, plan, slot, replicas)
    yield (
        f"disk              {format_bytes((config.checkpoint.keep + 1) * one)}: {format_bytes(one)} a checkpoint, "
        f"{config.checkpoint.keep} kept and one being written"
    )
    model = plan.num_parameters * getattr(torch, config.export.dtype).itemsize
    yield f"                  {format_bytes(model)} the exported model"


def _sizes(sizes: Mapping[str, int]) -> Iterator[str]:
    return (f"    {name.replace('_', ' '):<18}{format_bytes(size):>10}" for name, size in sizes.items() if size)


def _about_traffic(
    config: TrainConfig, flows: list[Flow], slot: Mapping[str, int], sent: Sent, topology: Topology
) -> Iterator[str]:
    if not sum(sent):
        return
    yield ""
    yield "sent by a rank in a step"
    kinds: dict[tuple[str, str], list[Flow]] = {}
    for flow in flows:
        kinds.setdefault((flow.lane, flow.op), []).append(flow)
    for (_, op), members in kinds.items():
        total = sum(flow.calls * flow.bytes_sent for flow in members)
        payloads = [(flow.flat, flow.payload_bytes) for flow in members for _ in range(flow.calls)]
        if payloads:
            yield f"    {op:<18}{format_bytes(total):>10} in {len(payloads)} calls"
            yield from _by_kind(payloads, "a payload of")
    if slot:
        yield f"    {'compressor':<18}{format_bytes(sum(slot.values())):>10} in {len(slot)} sums, {config.parallel.between.kind}"
        yield from _by_kind(slot.items(), "sending")
    yield f"    {'inside nodes':<18}{format_bytes(sent.inside):>10}"
    if topology.num_nodes > 1:
        of_node = format_bytes(sent.between_nodes * topology.ranks_per_node)
        yield f"    {'between nodes':<18}{format_bytes(sent.between_nodes):>10}, {of_node} for all ranks of a node"


def _by_kind(sizes: Iterable[tuple[str, int]], what: str) -> Iterator[str]:
    """One line for each kind of unit and size. Units of a kind differ in size only if their parameters differ."""
    for (kind, size), calls in Counter((re.sub(r"\.\d+", "", flat), size) for flat, size in sizes).items():
        yield f"        {kind:<14}{calls:>10} x {what} {format_bytes(size)}"


def _about_time(
    config: TrainConfig, llama: LlamaConfig, sent: Sent, topology: Topology, links: Mapping[str, Link]
) -> Iterator[str]:
    """``links``: the configured links, by their key in ``dry_run``."""
    yield ""
    yield "time of a step: at least the longest of these"
    tokens = config.batch.sequences * config.data.sequence_tokens / topology.world_size
    flops = flops_per_token(llama, config.data.sequence_tokens) * tokens
    given = config.log.peak_tflops
    local = Topology(0, 1)
    rate = given * 1e12 if given else peak_flops(find_device(config.device, local), _dtype(config))
    seconds = []
    if rate is None:
        yield f"    {'computing':<18}not known: give log.peak_tflops ({flops / 1e12:.3g} TFLOP a rank)"
    else:
        seconds.append(flops / rate)
        source = "as given" if given else "of this machine"
        yield f"    {'computing':<18}{_seconds(flops / rate):>10}  {flops / 1e12:.3g} TFLOP a rank at {rate / 1e12:.3g} TFLOP/s, {source}"
    for name, key, num_bytes in (
        ("inside nodes", "inside", sent.inside),
        ("between nodes", "between", sent.between_nodes * topology.ranks_per_node),
    ):
        if not num_bytes:
            continue
        if key not in links:
            yield f"    {name:<18}not known: give dry_run.{key}, such as dry_run.{key}=1gbit"
            continue
        seconds.append(links[key].seconds(num_bytes))
        yield f"    {name:<18}{_seconds(seconds[-1]):>10}  {format_bytes(num_bytes)} at {getattr(config.dry_run, key)}"
    if seconds:
        steps = config.schedule.steps
        yield f"    {'a step':<18}{_seconds(max(seconds)):>10}; all {steps} steps {_seconds(max(seconds) * steps)}"


def _slot_bytes(config: TrainConfig, plan: UnitPlan, topology: Topology) -> dict[str, int]:
    """Bytes that the slot between replicas sends in the last step, by unit; {} without replicas."""
    num_replicas = topology.world_size // plan.shard_ranks
    if num_replicas == 1:
        return {}
    slot, last = config.parallel.between, config.schedule.steps - 1
    return {
        flat.name: between_bytes(slot, cut(flat, 0, plan.shard_ranks), rank=0, world_size=num_replicas, step=last)
        for flat in plan.flats
        if flat.trainable
    }


def sent_in_a_step(
    config: TrainConfig, options: EngineOptions, plan: UnitPlan, flows: list[Flow], topology: Topology
) -> Sent:
    """Bytes that one rank sends in the last step: ``flows`` and the slot between replicas."""
    between = sum(flow.calls * flow.bytes_between_nodes for flow in flows)
    inside = sum(flow.calls * flow.bytes_sent for flow in flows) - between
    num_replicas = topology.world_size // plan.shard_ranks
    if num_replicas > 1:
        shards = [cut(flat, 0, plan.shard_ranks) for flat in plan.flats if flat.trainable]
        sent = sum(_slot_bytes(config, plan, topology).values())
        # Replicas share a node only with sharding none, where every rank is a replica.
        neighbours = topology.ranks_per_node // plan.shard_ranks - 1 if options.sharding.shard_over == "self" else 0
        inside += sent * neighbours // (num_replicas - 1)
        inside += sum(inside_bytes(config.parallel.between, shard, plan.shard_ranks) for shard in shards)
        between += sent - sent * neighbours // (num_replicas - 1)
    return Sent(inside, between)


def _block_elems(plan: UnitPlan) -> int:
    return max(sum(flat.num_parameters for flat in unit.flats) for unit in plan.blocks)


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
