"""Runs one rank: joins the group, loads its part of the model, then enters ``rank_loop``. ``worker`` calls it."""

import contextlib
import os
import resource
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed import DistStoreError, HashStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tightwire.allocator import keep_freed_memory
from tightwire.comm.errors import name_ranks, renumbered
from tightwire.comm.group import nodes
from tightwire.comm.group.group import Group, open_process_group
from tightwire.comm.group.numa import RankPlace, bind_rank
from tightwire.comm.group.topology import Topology
from tightwire.comm.link.link import Link
from tightwire.comm.link.wire import LinkFacts, refuse_too_fast
from tightwire.comm.transport.deadline import within
from tightwire.comm.transport.socket_join import SocketOptions, read_secret
from tightwire.model.adapters.peft import open_adapter
from tightwire.model.adapters.product import AdapterRoom
from tightwire.model.build import RankGroups, RunnerOptions, build_runner
from tightwire.model.cache.kv_cache import OffloadedCache
from tightwire.model.layer_groups import LayerGroups
from tightwire.model.layout import Layout
from tightwire.model.open import Checkpoint, formats_of, open_checkpoint
from tightwire.model.runner import ModelRunner
from tightwire.model.sampling.grammar import GrammarMasks
from tightwire.model.weights import EVERYTHING_RESIDENT
from tightwire.model.weights.formats import WeightFormats, split_model
from tightwire.model.weights.streamed import StreamedWeights
from tightwire.server.config.limits import BLOCK_SIZE
from tightwire.server.config.parallel import CODED_DTYPE
from tightwire.server.engine.draft_runner import DraftRunner
from tightwire.server.ipc.channels import Inboxes
from tightwire.server.ipc.messages import Ready
from tightwire.server.plan.rank_bytes import split_ranks
from tightwire.server.plan.rank_setup import RankIdentity, RankWork
from tightwire.server.plan.setting import choose_activations
from tightwire.server.ranks.rank_comm import check_comm
from tightwire.server.ranks.rank_loop import Follower, Leader
from tightwire.server.ranks.reporter import Reporter

# From one look at the ranks that have not loaded to the next. Loading has no deadline, because a large model on a slow disk
# takes long; the parent ends it on failure.
_SAY_AGAIN = timedelta(seconds=5)
# Nor has a step that makes progress: the parent ends one that does not, and notices a lost rank at once.
_STEP_DEADLINE_S = 24 * 3600.0


def run(identity: RankIdentity, work: RankWork, reporter: Reporter) -> None:
    """Run this rank until told to stop."""
    plan, engine = work.plan, work.config.engine
    with reporter.stage("open"):
        checkpoint = open_checkpoint(work.location, work.config.model.seed)
        formats = formats_of(checkpoint, work.config.model.quantization)
        given = checkpoint.config, formats, work.config.parallel
        layout = split_ranks(*given, by_stage=plan.is_pipeline)
        parts = None if plan.stages is None or plan.is_pipeline else split_ranks(*given, by_stage=True)
    with reporter.stage("join"):
        joining = _Joining(identity, work, _open_store(identity, work.config.hosts.join_timeout_s))
        world = joining.world()
        group = joining.replica(world)
        inside = joining.of_stage(group) if plan.inside else None
        stages = joining.stages(group)
        beside = joining.stages(stages or group, "beside")
        reporter.other_ledgers = [each.ledger for each in (group, stages, beside) if each is not None]
        reporter.ledger = reporter.other_ledgers.pop(group.world_size == 1 and stages is not None)
        link = joining.measured_link(stages if plan.is_pipeline else group)
    runner: ModelRunner | None = None
    try:
        place, allowed = RankPlace(), os.sched_getaffinity(0)
        if plan.device == "cpu":
            threads, numa = torch.get_num_threads(), work.config.parallel.numa == "auto"
            place = bind_rank(identity.local_rank, identity.num_local, threads, numa=numa)
        with reporter.stage("self-test"):
            check = partial(check_comm, row_elems=checkpoint.config.hidden_size, max_rows=engine.max_num_batched_tokens)
            compiled = partial(joining.await_others, reporter, "compile")
            routes, comm = check(group, plan, await_others=compiled, world=world)
            alike = msgspec.structs.replace(plan, policies=plan.inside, sum_dtype="float32")
            inside_routes = None if inside is None else check(inside, alike)[0]
        with reporter.stage("weights") as progress:
            others = stages, beside, inside, inside_routes, joining.peers()
            groups = RankGroups(group, routes, world, joining.stage, *others)
            runner = _load(checkpoint, layout, formats, groups, work, progress, parts=parts)
            alone = joining.alone() if plan.draft and not identity.rank else None
            drafting = None if alone is None else _load_draft(work, alone, allowed if place.cores else set())
        sources = (runner.weights, runner.cache)
        pools = [source.pool for source in sources if isinstance(source, StreamedWeights | OffloadedCache)]
        reporter.num_fetched = lambda: sum(pool.num_moves for pool in pools)
        if (choice_gather := runner.choice_gather) is not None:
            reporter.num_choice_gathers = lambda: choice_gather.num_begun
        joining.await_others(reporter, "load")
        keep_freed_memory()  # avoids thousands of page faults per prompt for a step's activations
        model, secret = checkpoint.config, read_secret(work.config.parallel.comm_secret_file)
        inboxes = Inboxes(work.inboxes or identity.inboxes, secret)
        grammars = GrammarMasks(model.vocab_size, model.eos_token_ids, lambda: checkpoint.tokenizer().backend.to_str())
        loop = (
            Follower(runner, model, inboxes, reporter)
            if identity.rank
            else Leader(runner, model, plan, engine, groups, inboxes, reporter, grammars, drafting)
        )
        with contextlib.closing(loop):
            with reporter.stage("warm-up"):
                loop.warm_up()
            reporter.send(
                Ready(
                    rank=identity.rank,
                    peak_host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                    comm=msgspec.structs.replace(comm, link=link),
                    cores=place.cores,
                    numa_nodes=place.nodes,
                    note=runner.note,
                )
            )
            loop.serve()
    finally:
        for each in filter(None, (runner, group, world, inside, stages, beside)):
            each.close()


def _open_store(identity: RankIdentity, timeout_s: float) -> Store:
    """The rendezvous store: in rank 0, on the socket its parent opened. CommError: rank 0 does not answer there."""
    if identity.world_size == 1:
        if identity.store_fd is not None:
            socket.socket(fileno=identity.store_fd).close()  # unused with one rank
        return HashStore()
    listening: dict[str, Any] = {} if identity.store_fd is None else {"master_listen_fd": identity.store_fd}
    host, port = identity.store_host, identity.store_port
    given: dict[str, Any] = {"is_master": bool(listening), "timeout": timedelta(seconds=timeout_s), **listening}
    connect = partial(TCPStore, host, port, wait_for_workers=False, **given)
    # The socket listens before rank 0 answers on it, and torch waits for the first answer without a deadline.
    late = f"rank 0 did not answer rank {identity.rank} at {host}:{port} for {timeout_s:g} s"
    return within(timeout_s, connect, lambda: late)


@dataclass(frozen=True, slots=True)
class _Joining:
    """Joins this rank's groups. Ranks that wait for whole steps of others do so without a deadline."""

    identity: RankIdentity
    work: RankWork
    store: Store

    @property
    def device(self) -> torch.device:
        """This rank's device; a CUDA device becomes the current one."""
        if self.work.plan.device == "cpu":
            return torch.device("cpu")
        device = torch.device("cuda", self.identity.local_rank)
        torch.cuda.set_device(device)
        return device

    @property
    def _topology(self) -> Topology:
        """This rank's place among the ranks of all replicas."""
        return Topology(self.identity.rank, self.identity.world_size, num_nodes=self.work.plan.num_nodes)

    def _memory(self, segment_fd: int | None) -> int | None:
        """``segment_fd`` if shared memory is the transport, else None."""
        return segment_fd if self.work.plan.transport == "shared-memory" else None

    @property
    def _sockets(self) -> SocketOptions | None:
        """The options of sockets, which join all CPU ranks that share no memory, and stages, unless gloo was requested."""
        plan = self.work.plan
        if not plan.is_pipeline if plan.device == "cuda" else plan.transport == "process-group":
            return None
        parallel, dead_s = self.work.config.parallel, max(3.0, self.work.config.timeouts.rank_timeout_s)
        secret, codes = read_secret(parallel.comm_secret_file), parallel.sum_dtype == CODED_DTYPE
        return SocketOptions(secret, self.identity.socket_port, codes=codes, dead_s=dead_s)

    def _open(self, topology: Topology, name: str, timeout_s: float, ranks: range | None = None, **more: Any) -> Group:
        """``ranks``: those of the group, by whose numbers errors name them; None: all. Messages of stages pass the host's memory."""
        device = torch.device("cpu") if name in ("stages", "beside") else self.device
        own, sockets, link = self.identity, self._sockets if device.type == "cpu" else None, self.work.plan.link
        numbered = partial(renumbered, ranks=ranks or (), where=f"in {name}", rank=own.rank, world_size=own.world_size)
        # Hidden states queue behind what the kernel holds of keys and values: a round trip and a millisecond of the wire.
        if name == "beside" and sockets and link and (rate := link.link.bytes_per_s):
            sockets = sockets._replace(most_unsent=max(16 << 10, int(rate * (1e-3 + 2 * link.latency_s))))
        return open_process_group(
            topology,
            store=self.store,
            device=device,
            timeout_s=timeout_s,
            join_timeout_s=self.work.config.timeouts.comm_timeout_s,
            name=name,
            interface=self.identity.interface,
            sockets=sockets,
            numbered=numbered if ranks and len(ranks) < own.world_size else None,
            **more,
        )

    def world(self) -> Group | None:
        """The ranks of all replicas, if there are several."""
        if self.work.plan.num_replicas == 1:
            return None
        segment_fd = self._memory(self.identity.segment_fd)
        return self._open(self._topology, "replicas", _STEP_DEADLINE_S, segment_fd=segment_fd)

    def alone(self) -> Group:
        return self._open(Topology(0, 1), "rank", self.work.config.timeouts.comm_timeout_s)

    @property
    def stage(self) -> int:
        """This rank's stage; 0 if there are none."""
        stages = self.work.plan.stages
        return 0 if stages is None else stages.stage_of(self.identity.rank)

    def replica(self, world: Group | None) -> Group:
        """The ranks of this rank's replica, which sum together; in a pipeline those of its stage."""
        identity, plan, parallel = self.identity, self.work.plan, self.work.config.parallel
        if plan.is_pipeline:
            return self.of_stage()
        replica, place = divmod(identity.rank, parallel.tp)
        topology = Topology(place, parallel.tp, num_nodes=parallel.sum_nodes)
        group = self._open(
            topology,
            "ranks" if world is None else f"replica-{replica}",
            self.work.config.timeouts.comm_timeout_s,
            range(identity.rank - place, identity.rank - place + parallel.tp),
            segment_fd=self._memory(identity.segment_fd if world is None else identity.replica_segment_fd),
            peer_blocks=plan.peer_blocks if parallel.tp > 1 else 0,
            ledger=None if world is None else world.ledger,
        )
        if world is not None:
            _refuse_unlike_transports(group, world)
        # CPU ranks of one node share its memory even when a link connects the nodes.
        by_memory = plan.device == "cpu" and (plan.link is not None or self.work.config.hosts.several)
        inside = identity.node_segment_fd if by_memory else self._memory(identity.node_segment_fd)
        group = nodes.join_nodes(
            group, topology, store=self.store, interface=identity.interface, segment_fd=inside, sockets=self._sockets
        )
        return group if self.throttle is None else nodes.throttle_group(group, self.throttle)

    def of_stage(self, replica: Group | None = None) -> Group:
        """The ranks of this rank's stage. ``replica``: in hybrid, whose ledger counts their sums too, which memory carries in any case."""
        stages, fd, ledger = self.work.plan.stages, self.identity.replica_segment_fd, replica and replica.ledger
        assert stages is not None, "asked only for a stage's ranks"
        topology = Topology(self.identity.rank % stages.ranks_each, stages.ranks_each)
        fd = fd if replica else self._memory(fd)
        # The first rank waits for whole steps of the stage before.
        given = topology, f"stage {self.stage}", _STEP_DEADLINE_S, stages.ranks_of(self.stage)
        return self._open(*given, segment_fd=fd, ledger=ledger)

    def stages(self, beside: Group | None, name: str = "stages") -> Group | None:
        """The first ranks of all stages, in hybrid's group "beside" all ranks, on connections of their own; None: this is another.

        ``beside``: a group of this rank whose messages take the same wire.
        """
        if (stages := self.work.plan.stages) is None:
            return None
        each = stages.ranks_each if stages.pipeline or name == "stages" else 1
        place, is_further = divmod(self.identity.rank, each)
        if is_further:
            return None
        ranks = range(0, self.identity.world_size, each)
        group = self._open(Topology(place, len(ranks)), name, _STEP_DEADLINE_S, ranks)
        return group if self.throttle is None else nodes.throttle_group(group, self.throttle, beside)

    def peers(self) -> nodes.PartitionPeers | None:
        """The ranks that share this one's partitioned weights."""
        if self.work.plan.weights.source != "partition":
            return None
        return nodes.join_partition(
            nodes.PartitionPlace(self.work.config.parallel.tp, self._topology),
            store=self.store,
            device=self.device,
            timeout_s=_STEP_DEADLINE_S,
            join_timeout_s=self.work.config.timeouts.comm_timeout_s,
            interface=self.identity.interface,
            segment_fd=self._memory(self.identity.peer_segment_fd),
        )

    @property
    def throttle(self) -> Link | None:
        """What slows down this rank's messages between nodes; the first rank of a pipeline's stage sends for the others."""
        own, stages = self.identity.throttle, self.work.plan.stages
        if own is None or own.bytes_per_s is None or stages is None or not stages.pipeline:
            return own
        return Link(own.name, own.bytes_per_s * stages.ranks_each, own.latency_s)

    def measured_link(self, group: Group | None) -> LinkFacts | None:
        """The link with its measured rate, if it is throttled here. ValueError: it cannot be emulated at the requested rate.

        ``group``: None on a rank that sends nothing over it.
        """
        link, throttle = self.work.plan.link, self.throttle
        if group is None or link is None or throttle is None or link.measured_bytes_per_s is not None:
            return link
        per_node = group.world_size / self.work.config.parallel.wire_nodes  # ranks of a node share its wire
        measured = msgspec.structs.replace(link, measured_bytes_per_s=nodes.held_rate(group, throttle) * per_node)
        refuse_too_fast(measured)
        return measured

    def await_others(self, reporter: Reporter, what: str) -> None:
        """Wait until all ranks have done ``what``; a collective would time out on a slow disk."""
        self.store.set(f"{what}/{self.identity.rank}", "")
        keys = {rank: f"{what}/{rank}" for rank in range(self.identity.world_size)}
        while missing := [rank for rank, key in keys.items() if not self.store.check([key])]:
            reporter.begin(f"waiting for {name_ranks(missing)} to {what}")
            with contextlib.suppress(DistStoreError):  # not all of them within this time
                self.store.wait([keys[rank] for rank in missing], _SAY_AGAIN)


def _refuse_unlike_transports(group: Group, world: Group) -> None:
    """Raise ValueError if the GPUs of only some replicas reach each other's memory: all replicas sum alike."""
    own = torch.tensor([bool(group.no_peer_memory)], dtype=torch.uint8, device=world.device)
    without = [rank for rank, lacks in enumerate(world.transport.gather(own)) if lacks]
    if 0 < len(without) < world.world_size:
        raise ValueError(
            f"the GPUs of ranks {', '.join(map(str, without))} do not reach each other's memory, but those of other replicas "
            "do; use --transport process-group"
        )


def _load(
    checkpoint: Checkpoint,
    layout: Layout,
    formats: WeightFormats,
    groups: RankGroups,
    work: RankWork,
    progress: Callable[[float], None] = lambda fraction: None,
    *,
    drafts: bool = False,
    parts: Layout | None = None,
) -> ModelRunner:
    plan, engine, prepared = work.plan, work.config.engine, checkpoint.prepared
    if plan.activations == "int8":
        formats = formats.with_int8_activations()
    runner = build_runner(
        checkpoint.config,
        replace(prepared, int8_activations=plan.activations == "int8") if prepared else checkpoint.reader(),
        layout,
        groups,
        RunnerOptions(
            dtype=getattr(torch, plan.dtype),
            kv_dtype=getattr(torch, plan.kv_dtype),
            sum_dtype=getattr(torch, plan.sum_dtype),
            max_model_len=plan.max_model_len,
            num_blocks=plan.num_blocks,
            groups=LayerGroups.of(checkpoint.config) if plan.stages is None and not drafts else None,
            buffer_blocks=plan.buffer_blocks,
            block_size=BLOCK_SIZE,
            formats=formats,
            weight_plan=plan.weights,
            fetch_timeout_s=work.config.timeouts.comm_timeout_s,
            most_rows=engine.max_num_batched_tokens if plan.weights.max_parts > 1 else None,
            overlap=plan.overlap,
            stages=plan.stages,
            parts=parts,
            stage_codec=plan.stage_codec,
            graphs_up_to=engine.max_num_seqs if engine.cuda_graphs else 0,
            cuts_head=drafts,
            adapters=AdapterRoom(plan.adapters.num_slots, plan.adapters.max_rank) if plan.adapters else None,
        ),
        progress,
    )
    if plan.adapters is not None and runner.adapters is not None:
        for each in plan.adapters.loaded:
            runner.adapters.load(each.slot, open_adapter(Path(each.folder), checkpoint.config, plan.adapters.max_rank))
    return runner


def _load_draft(work: RankWork, alone: Group, cores: set[int]) -> DraftRunner:
    """The whole model that drafts, with as many cache blocks as all replicas have. ``cores``: those of all ranks here."""
    plan, options = work.plan, work.config.model
    checkpoint = open_checkpoint(plan.draft, options.seed)
    formats = formats_of(checkpoint, options.quantization)
    whole: dict[str, Any] = {"weights": EVERYTHING_RESIDENT, "stages": None, "overlap": False, "adapters": None}
    whole["activations"] = choose_activations("fastest", plan.device, formats.packed)
    own = msgspec.structs.replace(plan, num_blocks=plan.num_blocks * plan.num_replicas, **whole)
    given = checkpoint, split_model(checkpoint.config, formats, 1), formats, RankGroups(alone)
    runner = _load(*given, msgspec.structs.replace(work, plan=own), drafts=True)
    # Stages compute while rank 0 drafts, and with an emulated link the other ranks stand for other hosts.
    return DraftRunner(runner, set() if plan.is_pipeline or work.config.parallel.link else cores)
