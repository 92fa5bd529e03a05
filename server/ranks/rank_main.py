"""Runs one rank: joins the group, loads its part of the model, then enters ``rank_loop``.

Imports torch and other heavy modules; ``worker`` is the light process around it.
"""

import resource
import socket
from collections.abc import Callable
from datetime import timedelta

import msgspec
import torch
from torch.distributed import HashStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.buffers import BufferPool
from tightwire.comm.group.group import Group, open_process_group
from tightwire.comm.group.nodes import held_rate, join_nodes, throttle_group
from tightwire.comm.group.partition_groups import PartitionPeers, PartitionPlace, join_partition
from tightwire.comm.group.topology import Topology
from tightwire.comm.link.wire import LinkFacts, refuse_too_fast
from tightwire.comm.policy.routes import Routes
from tightwire.kernels.cpu.allocator import keep_freed_memory
from tightwire.model.build import RankGroups, RunnerOptions, build_runner
from tightwire.model.cache.offloaded_cache import OffloadedCache
from tightwire.model.layout import Layout, Shard, make_layout
from tightwire.model.open import Checkpoint, formats_of, open_checkpoint
from tightwire.model.runner import ModelRunner
from tightwire.model.weights.formats import WeightFormats
from tightwire.model.weights.residency import WeightSizes
from tightwire.model.weights.streamed import StreamedWeights
from tightwire.server.ipc.messages import CommSetup, Ready, StreamForecast
from tightwire.server.plan.devices import bind_to_cores
from tightwire.server.plan.rank_setup import RankIdentity, RankWork
from tightwire.server.ranks.rank_comm import check_comm
from tightwire.server.ranks.rank_loop import Follower, Leader
from tightwire.server.ranks.reporter import Reporter

# Loading has no deadline, because a large model on a slow disk takes long; the parent ends it on failure.
_LOAD_DEADLINE = timedelta(hours=24)
# Nor has a step that makes progress: the parent ends one that does not, and notices a lost rank at once.
_STEP_DEADLINE_S = 24 * 3600.0


def run(identity: RankIdentity, work: RankWork, reporter: Reporter) -> None:
    """Run this rank until told to stop."""
    with reporter.stage("open"):
        checkpoint = open_checkpoint(work.location, work.config.model.seed)
        layout = make_layout(checkpoint.config, work.config.parallel.tp, work.config.parallel.tp_split)
        formats = formats_of(checkpoint, work.config.model.quantization)
    with reporter.stage("join"):
        store = _open_store(identity, work.config.timeouts.comm_timeout_s)
        world = _join_world(identity, work, store)
        group = _join(identity, work, store, world)
        reporter.ledger = group.ledger
        link = _tried_link(group, identity, work)
    runner: ModelRunner | None = None
    try:
        binds = work.plan.device == "cpu"
        cores = bind_to_cores(identity.rank, identity.world_size, torch.get_num_threads()) if binds else ()
        with reporter.stage("self-test"):
            comm = check_comm(
                group,
                work.plan,
                row_elems=checkpoint.config.hidden_size,
                max_rows=work.config.engine.max_num_batched_tokens,
                await_others=lambda: _await_others(store, identity, reporter, "compile"),
                world=world,
            )
        with reporter.stage("weights") as progress:
            peers = _join_peers(identity, work, store)
            runner = _load(checkpoint, layout, formats, group, comm.routes, work, progress, world, peers)
        pools = _pools(runner)
        reporter.num_fetched = lambda: sum(pool.num_moves for pool in pools)
        if (logits_gather := runner.logits_gather) is not None:
            reporter.num_logits_gathers = lambda: logits_gather.num_begun
        _await_others(store, identity, reporter, "load")
        keep_freed_memory()  # avoids thousands of page faults per prompt for a step's activations
        with _take_place(identity, work, checkpoint, group, runner, reporter, peers) as place:
            with reporter.stage("warm-up"):
                place.warm_up()
            num_bytes = _weight_bytes(checkpoint, layout.shards[group.rank], formats, work)
            setup = msgspec.structs.replace(comm.setup, link=link)
            reporter.send(_ready(identity, num_bytes, setup, cores, place.stream_forecast()))
            place.serve()
    finally:
        if runner is not None:
            runner.close()
        group.close()
        if world is not None:
            world.close()


def _open_store(identity: RankIdentity, timeout_s: float) -> Store:
    """The rendezvous store: in rank 0, on the socket its parent opened."""
    if identity.world_size == 1:
        if identity.store_fd is not None:
            socket.socket(fileno=identity.store_fd).close()  # unused with one rank
        return HashStore()
    timeout = timedelta(seconds=timeout_s)
    if identity.store_fd is None:
        return TCPStore(identity.store_host, identity.store_port, is_master=False, timeout=timeout)
    return TCPStore(
        identity.store_host,
        identity.store_port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=identity.store_fd,
    )


def _device(identity: RankIdentity, work: RankWork) -> torch.device:
    """This rank's device; a CUDA device becomes the current one."""
    if work.plan.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", identity.rank)
    torch.cuda.set_device(device)
    return device


def _join_world(identity: RankIdentity, work: RankWork, store: Store) -> Group | None:
    """The ranks of all replicas, if there are several. Ranks in it wait for whole steps of other replicas."""
    if work.plan.num_replicas == 1:
        return None
    return open_process_group(
        Topology(identity.rank, identity.world_size, num_nodes=work.plan.num_nodes),
        store=store,
        device=_device(identity, work),
        timeout_s=_STEP_DEADLINE_S,
        join_timeout_s=work.config.timeouts.comm_timeout_s,
        name="replicas",
        segment_fd=identity.segment_fd if work.plan.transport == "shared-memory" else None,
    )


def _join(identity: RankIdentity, work: RankWork, store: Store, world: Group | None) -> Group:
    """The ranks of this rank's replica, which sum together."""
    device, parallel = _device(identity, work), work.config.parallel
    replica, place = divmod(identity.rank, parallel.tp)
    topology = Topology(place, parallel.tp, num_nodes=parallel.sum_nodes)
    shared = work.plan.transport == "shared-memory"
    segment_fd = identity.segment_fd if world is None else identity.replica_segment_fd
    # Ranks of one node share its memory even when a link connects the nodes.
    inside = identity.node_segment_fd if shared or work.plan.link else None
    group = open_process_group(
        topology,
        store=store,
        device=device,
        timeout_s=work.config.timeouts.comm_timeout_s,
        name="ranks" if world is None else f"replica-{replica}",
        interface=identity.interface,
        segment_fd=segment_fd if shared and parallel.tp > 1 else None,
        peer_memory=work.plan.transport == "peer-memory" and parallel.tp > 1,
        ledger=None if world is None else world.ledger,
    )
    if world is not None:
        _refuse_unlike_reach(group, world)
    group = join_nodes(group, topology, store=store, interface=identity.interface, segment_fd=inside)
    return group if identity.throttle is None else throttle_group(group, identity.throttle)


def _join_peers(identity: RankIdentity, work: RankWork, store: Store) -> PartitionPeers | None:
    """The ranks that share this one's weights. Gathers wait for whole steps of the others, as in ``_join_world``."""
    if work.plan.weights.source != "partition":
        return None
    topology = Topology(identity.rank, identity.world_size, num_nodes=work.plan.num_nodes)
    return join_partition(
        PartitionPlace(work.config.parallel.tp, topology),
        store=store,
        device=_device(identity, work),
        timeout_s=_STEP_DEADLINE_S,
        join_timeout_s=work.config.timeouts.comm_timeout_s,
        interface=identity.interface,
        segment_fd=identity.peer_segment_fd if work.plan.transport == "shared-memory" else None,
    )


def _refuse_unlike_reach(group: Group, world: Group) -> None:
    """Check that all replicas can sum alike.

    Raises:
        ValueError: the GPUs of some replicas reach each other's memory, and those of others do not.
    """
    own = torch.tensor([bool(group.no_peer_memory)], dtype=torch.uint8, device=world.device)
    without = [rank for rank, lacks in enumerate(world.transport.gather(own)) if lacks]
    if 0 < len(without) < world.world_size:
        raise ValueError(
            f"the GPUs of ranks {', '.join(map(str, without))} do not reach each other's memory, but those of other replicas "
            "do; use --transport process-group"
        )


def _tried_link(group: Group, identity: RankIdentity, work: RankWork) -> LinkFacts | None:
    """The facts about the link, with the measured rate of a throttled transport.

    Raises:
        ValueError: the link cannot be emulated at the requested rate.
    """
    link = work.plan.link
    if link is None or identity.throttle is None or link.measured_bytes_per_s is not None:
        return link
    per_node = identity.world_size / work.config.parallel.wire_nodes  # ranks of a node share its wire
    held = msgspec.structs.replace(link, measured_bytes_per_s=held_rate(group, identity.throttle) * per_node)
    refuse_too_fast(held)
    return held


def _load(
    checkpoint: Checkpoint,
    layout: Layout,
    formats: WeightFormats,
    group: Group,
    routes: Routes | None,
    work: RankWork,
    progress: Callable[[float], None],
    world: Group | None,
    peers: PartitionPeers | None,
) -> ModelRunner:
    return build_runner(
        checkpoint.config,
        checkpoint.prepared or checkpoint.reader(),
        layout,
        RankGroups(group, routes=routes, world=world, peers=peers),
        RunnerOptions(
            dtype=getattr(torch, work.plan.dtype),
            max_model_len=work.plan.max_model_len,
            num_blocks=work.plan.num_blocks,
            buffer_blocks=work.plan.buffer_blocks,
            block_size=work.config.engine.block_size,
            formats=formats,
            weight_plan=work.plan.weights,
            fetch_timeout_s=work.config.timeouts.comm_timeout_s,
            most_rows=work.config.engine.max_num_batched_tokens if work.plan.weights.max_parts > 1 else None,
            overlap=work.plan.overlap,
            graphs_up_to=work.config.engine.max_num_seqs if work.config.engine.cuda_graphs else 0,
        ),
        progress,
    )


def _pools(runner: ModelRunner) -> list[BufferPool]:
    """The buffers of streamed weights and of an offloaded cache; empty if everything is on the device."""
    sources = (runner.weights, runner.cache)
    return [source.pool for source in sources if isinstance(source, StreamedWeights | OffloadedCache)]


def _await_others(store: Store, identity: RankIdentity, reporter: Reporter, what: str) -> None:
    """Wait without a deadline until all ranks have done ``what``; a collective would time out on a slow disk."""
    reporter.begin(f"waiting for the other ranks to {what}")
    store.set(f"{what}/{identity.rank}", "")
    store.wait([f"{what}/{rank}" for rank in range(identity.world_size)], _LOAD_DEADLINE)


def _take_place(
    identity: RankIdentity,
    work: RankWork,
    checkpoint: Checkpoint,
    group: Group,
    runner: ModelRunner,
    reporter: Reporter,
    peers: PartitionPeers | None,
) -> Leader | Follower:
    if identity.rank:
        return Follower(runner, identity.inboxes[identity.rank], reporter)
    return Leader(
        runner=runner,
        model=checkpoint.config,
        plan=work.plan,
        options=work.config.engine,
        group=group,
        inbox=identity.inboxes[0],
        followers=identity.inboxes[1:],
        reporter=reporter,
        peers=peers,
    )


def _weight_bytes(checkpoint: Checkpoint, shard: Shard, formats: WeightFormats, work: RankWork) -> int:
    """Bytes of device memory for weights, buffers of streamed layers included."""
    sizes = WeightSizes(checkpoint.config, shard, formats, getattr(torch, work.plan.dtype), work.plan.weights.codec)
    return sizes.in_pool(work.plan.weights, work.plan.device)


def _ready(
    identity: RankIdentity,
    num_weight_bytes: int,
    setup: CommSetup,
    cores: tuple[int, ...],
    stream: StreamForecast | None,
) -> Ready:
    return Ready(
        rank=identity.rank,
        weight_bytes=num_weight_bytes,
        peak_host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        comm=setup,
        cores=cores,
        stream=stream,
    )
