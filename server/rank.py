"""What one rank does with its work: join the others, load its part, then take its turn in ``rank_loop``.

Imports torch and everything else that is heavy; ``worker`` is the light shell around it.
"""

import resource
import socket
from collections.abc import Callable
from datetime import timedelta

import msgspec
import torch
from torch.distributed import HashStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.group import Group, open_process_group
from tightwire.comm.link.wire import LinkFacts, refuse_too_fast
from tightwire.comm.nodes import join_nodes
from tightwire.comm.policy.routes import Routes
from tightwire.comm.topology import Topology
from tightwire.comm.transport.throttled import held_rate, throttle_group
from tightwire.model.build import build_runner
from tightwire.model.checkpoint import Checkpoint, formats_of, open_checkpoint
from tightwire.model.layout import Layout, Shard, make_layout
from tightwire.model.runner import ModelRunner
from tightwire.model.weights.formats import WeightFormats
from tightwire.model.weights.residency import WeightSizes
from tightwire.model.weights.streamed import StreamedWeights
from tightwire.server.cores import bind_to_cores
from tightwire.server.messages import CommSetup, Ready, StreamForecast
from tightwire.server.rank_comm import check_comm
from tightwire.server.rank_loop import Follower, Leader
from tightwire.server.rank_setup import RankIdentity, RankWork
from tightwire.server.reporter import Reporter

# Loading has no deadline of its own (a large model on a slow disk takes what it takes): the parent ends it on failure.
_LOAD_DEADLINE = timedelta(hours=24)


def run(identity: RankIdentity, work: RankWork, reporter: Reporter) -> None:
    """Live as one rank until told to stop."""
    with reporter.stage("open"):
        checkpoint = open_checkpoint(work.location, work.config.model.seed)
        layout = make_layout(checkpoint.config, identity.world_size, work.config.parallel.tp_split)
        formats = formats_of(checkpoint, work.config.model.quantization)
    with reporter.stage("join"):
        store = _open_store(identity, work.config.parallel.comm_timeout_s)
        group = _join(identity, work, store)
        reporter.ledger = group.ledger
        link = _tried_link(group, identity, work)
    runner: ModelRunner | None = None
    try:
        binds = work.plan.device == "cpu" and work.config.parallel.bind_cores
        cores = bind_to_cores(identity.rank, identity.world_size, torch.get_num_threads()) if binds else ()
        with reporter.stage("self-test"):
            comm = check_comm(
                group,
                work.plan,
                row_elems=checkpoint.config.hidden_size,
                max_rows=work.config.engine.max_num_batched_tokens,
                await_others=lambda: _await_others(store, identity, reporter, "compile"),
            )
        with reporter.stage("weights") as progress:
            runner = _load(checkpoint, layout, formats, group, comm.routes, work, progress)
        if isinstance(runner.weights, StreamedWeights):
            pool = runner.weights.pool
            reporter.num_fetched = lambda: pool.num_moves
        _await_others(store, identity, reporter, "load")
        with _take_place(identity, work, checkpoint, group, runner, reporter) as place:
            with reporter.stage("warm-up"):
                place.warm_up()
            num_bytes = _weight_bytes(checkpoint, layout.shards[identity.rank], formats, work)
            setup = msgspec.structs.replace(comm.setup, link=link)
            reporter.send(_ready(identity, num_bytes, setup, cores, place.stream_forecast()))
            place.serve()
    finally:
        if runner is not None:
            runner.close()
        group.close()


def _open_store(identity: RankIdentity, timeout_s: float) -> Store:
    """The rendezvous store: in rank 0, on the socket its parent opened."""
    if identity.world_size == 1:
        if identity.store_fd is not None:
            socket.socket(fileno=identity.store_fd).close()  # nobody will ask for it
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


def _join(identity: RankIdentity, work: RankWork, store: Store) -> Group:
    device = torch.device("cpu")
    if work.plan.device == "cuda":
        device = torch.device("cuda", identity.rank)
        torch.cuda.set_device(device)
    topology = Topology(identity.rank, identity.world_size, num_nodes=work.plan.num_nodes)
    shared = work.plan.transport == "shared-memory"
    # Behind a link, ranks of one node still share its memory, whatever the nodes have between them.
    inside = identity.node_segment_fd if shared or work.plan.link else None
    group = open_process_group(
        topology,
        store=store,
        device=device,
        timeout_s=work.config.parallel.comm_timeout_s,
        interface=identity.interface,
        segment_fd=identity.segment_fd if shared else None,
        peer_memory=work.plan.transport == "peer-memory",
    )
    group = join_nodes(group, topology, store=store, interface=identity.interface, segment_fd=inside)
    return group if identity.throttle is None else throttle_group(group, identity.throttle)


def _tried_link(group: Group, identity: RankIdentity, work: RankWork) -> LinkFacts | None:
    """The facts about the wire, with the rate that a transport really holds which was to be slowed down to it.

    Raises:
        ValueError: that is not the rate that was asked for.
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
) -> ModelRunner:
    return build_runner(
        checkpoint.config,
        checkpoint.prepared or checkpoint.reader(),
        group,
        layout,
        routes=routes,
        dtype=getattr(torch, work.plan.dtype),
        max_model_len=work.plan.max_model_len,
        num_blocks=work.plan.num_blocks,
        block_size=work.config.engine.block_size,
        formats=formats,
        weight_plan=work.plan.weights,
        fetch_timeout_s=work.config.weights.fetch_timeout_s,
        progress=progress,
        most_rows=work.config.engine.max_num_batched_tokens if work.plan.weights.max_parts > 1 else None,
        overlap=work.plan.overlap,
        graphs_up_to=work.config.engine.max_num_seqs if work.config.engine.cuda_graphs else 0,
    )


def _await_others(store: Store, identity: RankIdentity, reporter: Reporter, what: str) -> None:
    """Wait here, where there is no deadline, until all have done ``what``; a collective would give up on a slow disk."""
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
    )


def _weight_bytes(checkpoint: Checkpoint, shard: Shard, formats: WeightFormats, work: RankWork) -> int:
    """On the device, buffers for streamed layers included."""
    sizes = WeightSizes(checkpoint.config, shard, formats, getattr(torch, work.plan.dtype), work.plan.weights.codec)
    return sizes.on_device(work.plan.weights)


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
