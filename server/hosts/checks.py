"""Compares the hosts of a server before anything heavy: options, versions, plans, and the ports between them."""

import asyncio
import os
from collections.abc import Mapping

import msgspec

from tightwire.comm.link.probe import PairFacts, measure_pair
from tightwire.model.open import Checkpoint, fingerprint
from tightwire.native_build import LEVELS
from tightwire.server.hosts.channel import LONG_LOST, open_channel
from tightwire.server.hosts.messages import Hello
from tightwire.server.plan.rank_setup import RunPlan

CONNECT_S = 3.0
# Fields of the nodes' plans.
_EQUAL = ("device", "dtype", "kv_dtype", "sum_dtype", "activations", "weights", "stages", "overlap", "plan_ahead")


def name_node(hello: Hello) -> str:
    return f"node {hello.node} ({hello.address})"


def objection_to(hello: Hello, own: Hello, num_nodes: int) -> str | None:
    """Why node 0 refuses a node, by node and key; None: it does not."""
    if not 0 < hello.node < num_nodes:
        return f"a host at {hello.address} says that it is node {hello.node}; nodes are 1 to {num_nodes - 1} there"
    for key in sorted(own.facts.keys() | hello.facts.keys(), key=lambda key: (key != "version", key)):
        theirs, ours = hello.facts.get(key, "nothing"), own.facts.get(key, "nothing")
        if theirs != ours:
            advice = "install the same version" if key == "version" else "start the same command"
            if key == "kernels":
                order = next((list(levels) for levels in LEVELS.values() if {theirs, ours} <= levels.keys()), [])
                least = min(theirs, ours, key=order.index) if order else "spec"
                advice = f"set TIGHTWIRE_KERNELS to a level that every CPU has, such as {least},"
            return f"{name_node(hello)} has {key} {theirs}, {name_node(own)} has {key} {ours}; {advice} on every host"
    return None


def facts_of(checkpoint: Checkpoint, plan: RunPlan) -> dict[str, str]:
    """What is equal on all nodes that have opened the same files."""
    loaded = () if plan.adapters is None else plan.adapters.loaded
    return {"the model": fingerprint(checkpoint), **{f"the adapter {each.name}": each.digest for each in loaded}}


def merge_plans(plans: Mapping[int, RunPlan]) -> RunPlan:
    """Node 0's plan with the smallest cache of all nodes. ValueError: the nodes cannot run the same plan."""
    own = plans[0]
    for node, plan in plans.items():
        for key in _EQUAL:
            theirs, ours = getattr(plan, key), getattr(own, key)
            if theirs != ours:
                unlike = f"node {node} would run with {key} {theirs}, node 0 with {ours}"
                advice = "give the option by hand, the same on every host"
                raise ValueError(f"{unlike}; the memory or the devices of the hosts differ: {advice}")
    buffers = [plan.buffer_blocks for plan in plans.values() if plan.buffer_blocks is not None]
    return msgspec.structs.replace(
        own,
        num_blocks=min(plan.num_blocks for plan in plans.values()),
        max_model_len=min(plan.max_model_len for plan in plans.values()),
        buffer_blocks=min(buffers, default=None),
    )


async def probe(node: int, targets: Mapping[int, tuple[str, list[int]]]) -> list[str]:
    """Connect to every port of the other nodes; the failures, in words. Takes at most ``CONNECT_S``."""

    async def reach(other: int, address: str, port: int) -> str | None:
        try:
            (await open_channel(address, port, CONNECT_S)).abandon()
        except OSError as error:  # TimeoutError is one
            why = why_unreachable(error)
            return f"port {port} on node {other} ({address}) cannot be reached from node {node}: {why}"
        return None

    tries = [reach(other, at, port) for other, (at, ports) in targets.items() if other != node for port in ports]
    return [failure for failure in await asyncio.gather(*tries) if failure]


async def measure(node: int, targets: Mapping[int, tuple[str, int]]) -> tuple[list[PairFacts], list[str]]:
    """Measure the network to all nodes with higher numbers, one after the other; and the failures, in words."""
    pairs, failures = list[PairFacts](), list[str]()
    for other, (address, port) in sorted(targets.items()):
        if other <= node:
            continue
        try:
            pairs.append(await asyncio.to_thread(measure_pair, (node, other), address, port))
        except OSError as error:
            why = error.strerror or f"{error}{LONG_LOST}"
            failures.append(f"the probe from node {node} to node {other} ({address}) failed: {why}")
    return pairs, failures


def why_unreachable(error: OSError) -> str:
    """The cause without the address, which the message has already."""
    return os.strerror(error.errno) if error.errno else f"no answer in {CONNECT_S:g} s"
