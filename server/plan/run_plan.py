"""Decides before loading which device, dtype, split and cache to use, and refuses what cannot work."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tightwire.comm.group.host import available_host_bytes, num_cores
from tightwire.comm.group.numa import describe_placement, read_numa_nodes
from tightwire.comm.link.wire import LinkFacts
from tightwire.comm.policy.rules import Policy
from tightwire.comm.policy.tune_file import PEER_BLOCKS
from tightwire.model.adapters.peft import adapter_digest, open_adapter
from tightwire.model.adapters.product import AdapterRoom
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.layout import Layout
from tightwire.model.open import Checkpoint, fingerprint, formats_of, open_checkpoint
from tightwire.model.stages import StagePlan
from tightwire.model.weights import EVERYTHING_RESIDENT
from tightwire.model.weights.formats import WeightFormats, describe_cuts
from tightwire.progress import Progress
from tightwire.server.config.lora import AdapterOptions
from tightwire.server.config.parallel import ParallelOptions
from tightwire.server.config.serve import ServeConfig
from tightwire.server.plan.comm_decision import CommDecision, decide_sums, describe_request
from tightwire.server.plan.layout_decision import choose_auto, decide_stages, describe_layout
from tightwire.server.plan.layout_table import memory_inputs
from tightwire.server.plan.memory_budget import MemoryBudget, NotEnoughMemoryError, describe_offload
from tightwire.server.plan.rank_bytes import SHARED_RUNTIME_BYTES, MemoryInputs, Pool, rank_bytes, split_ranks
from tightwire.server.plan.rank_setup import AdapterPlan, LayoutChoice, NamedPolicy, RunPlan, ServedAdapter
from tightwire.server.plan.setting import (
    LIBRARY_BYTES,
    DecidedSetting,
    address_bytes_left,
    check_all_reduce_names,
    choose_activations,
    choose_overlap,
    choose_plan_ahead,
    decide_setting,
)
from tightwire.server.plan.weight_decision import IN_FILES, Files, as_prepared, decide_weights
from tightwire.sizes import format_bytes

FETCH_STOPS_S = 2.0  # a fetch reports, and so checks ``stopped``, several times a second
_TIMING = "planning; GPUs that may share layers time their copies"
_SLOWER_PACKED = 'packed weights save memory on a GPU and may cost time: docs/serving.md, "A layer on a GPU"'


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    plan: RunPlan
    layout: Layout
    budget: MemoryBudget
    formats: WeightFormats
    comm: CommDecision | None  # None: a single rank
    notes: tuple[str, ...] = ()  # layers that stream, an offloaded KV cache, NUMA nodes

    def report(self, display: Progress) -> None:
        """Write the warnings, and every decision as a detail."""
        for line in self.summary().splitlines():
            (display.say if line.startswith("warning: ") else display.detail)(line)

    def summary(self) -> str:
        """The memory table, then every decision with its reason, one per line."""
        plan, lines = self.plan, [self.budget.table(), self.formats.describe(self.plan.dtype), *self.notes]
        if plan.num_replicas > 1:
            num_ranks = len(self.budget.ranks)
            lines.append(f"{plan.num_replicas} replicas of the model on {num_ranks} ranks, for different sequences")
        if plan.transport_reason:
            lines.append(f"ranks communicate over {plan.transport}: {plan.transport_reason}")
        if plan.link is not None:
            lines.append(plan.link.describe(plan.num_nodes if plan.num_nodes > 1 else len(self.layout.shards)))
        if plan.overlap:
            lines.append("overlap: one half of a prompt's step is computed while the other half's sums are on the wire")
        if plan.plan_ahead:
            lines.append("plan-ahead: each step that may not have drafts is launched while the one before it runs")
        if plan.adapters is not None:
            lines.append(describe_adapters(plan.adapters, [rank.adapters for rank in self.budget.ranks]))
        if self.comm is not None:
            lines += self.comm.notes()
        elif plan.allreduce != "auto" and not plan.is_pipeline:
            lines.append(f"warning: a single rank sums nothing: --allreduce {plan.allreduce} has no effect")
        return "\n".join(lines)


def prepare(
    config: ServeConfig,
    display: Progress,
    *,
    stopped: Callable[[], bool] = lambda: False,
    link: LinkFacts | None = None,
    settle: Callable[[Callable[[Sequence[int]], LayoutChoice]], LayoutChoice] = lambda choose: choose(()),
) -> tuple[Checkpoint, Decision]:
    """Find the model, fetch it if necessary, and decide how to run it. ValueError: the model or an option is refused.

    ``stopped`` is called several times a second during a fetch, which stops within FETCH_STOPS_S once it returns True.
    ``settle``: see ``Hosts``; it is called if ``--layout auto`` has a choice, which needs a wire between ranks.
    """

    def fetching(name: str | None, fraction: float) -> None:
        if stopped():
            raise ModelError(f"stopped while fetching {name}")
        display.stage(f"downloading {name}", fraction)

    config, checkpoint = open_model(config, partial(fetching, config.model.model))
    formats = formats_of(checkpoint, config.model.quantization)
    files = Files(exist=checkpoint.path is not None, prepared=checkpoint.prepared)
    name, choice = config.engine.draft_model, None  # rank 0, which drafts, is on node 0
    draft = None if config.hosts.node_rank else open_draft(config, checkpoint, partial(fetching, name))
    if config.parallel.layout == "auto" and config.parallel.tp > 1 and link is not None:
        choice = settle(lambda room: choose_auto(config, checkpoint, formats, link, room, draft))
    may_time = config.parallel.dp > 1 and config.model.device != "cpu"
    if may_time:
        display.stage(_TIMING, 0.0)
    given = config, checkpoint.config, formats, link
    decision = decide(*given, files=files, model_id=fingerprint(checkpoint), choice=choice, draft=draft)
    if may_time:
        display.stage(_TIMING, 1.0)
    note = (f"the checkpoint is {checkpoint.note}",) if checkpoint.note else ()
    return checkpoint, replace(decision, notes=(*note, *decision.notes))


def open_model(
    config: ServeConfig, progress: Callable[[float], None] = lambda fraction: None
) -> tuple[ServeConfig, Checkpoint]:
    """The options with what a prepared folder fixes, and the model, fetched if necessary. ValueError: one is refused."""
    check_all_reduce_names(config.parallel)
    checkpoint = open_checkpoint(config.model.model, config.model.seed, progress=progress)
    return config if checkpoint.prepared is None else as_prepared(config, checkpoint.prepared), checkpoint


def open_draft(
    config: ServeConfig, checkpoint: Checkpoint, progress: Callable[[float], None] = lambda fraction: None
) -> Checkpoint | None:
    """The model that drafts, fetched if necessary; None: there is none. ValueError: it does not go with the model."""
    if (name := config.engine.draft_model) is None:
        return None
    draft = open_checkpoint(name, config.model.seed, progress=progress)
    tokens, others = (each.tokenizer().backend.get_vocab().items() for each in (draft, checkpoint))
    if unlike := min(((token_id, token) for token, token_id in tokens ^ others), default=None):
        which = f"is not that of {checkpoint.name}, from token {unlike[0]} on ({unlike[1]!r} in one of them)"
        advice = "give a model of the same vocabulary, such as a smaller one of the family"
        raise ValueError(f"--draft-model {name}: its vocabulary {which}; {advice}")
    if (made := draft.prepared) is not None:
        dtype = decide_setting(config, checkpoint.config).dtype
        if (made.tp, made.manifest.dtype) != (1, dtype):
            needed = f"rank 0 drafts with a whole model in {dtype}"
            advice = f"make it with `tightwire prepare MODEL FOLDER --tp 1 --dtype {dtype}`"
            made_for = f"it was prepared for --tp {made.tp} in {made.manifest.dtype}"
            raise ValueError(f"--draft-model {name}: {made_for}, and {needed}; {advice}")
    return draft


def decide(
    config: ServeConfig,
    model: LlamaConfig,
    formats: WeightFormats,
    link: LinkFacts | None = None,
    *,
    files: Files = IN_FILES,
    model_id: str = "",
    choice: LayoutChoice | None = None,
    draft: Checkpoint | None = None,
) -> Decision:
    """Resolve every ``auto``. ValueError: an impossible split, device, dtype or size; says what is possible.

    ``model_id``: the model's fingerprint, to find what quantized sums cost it. ``choice``: of ``--layout auto``.
    """
    if choice is not None:
        config = replace(config, parallel=replace(config.parallel, layout=choice.layout))
    parallel = config.parallel
    layout = split_ranks(model, formats, parallel, by_stage=parallel.layout == "pipeline")
    cuts, num = "", parallel.num_summing
    if num > 1:
        cuts = describe_cuts(Layout(shards=layout.shards[:num]), model, parallel.tp_split and parallel.tp_split[:num])
    sums = decide_sums(config, model, link, model_id)
    decided, comm = sums.decided, sums.comm
    setting, dtype = decided.setting, decided.dtype
    adapters = plan_adapters(config.adapters, model)
    stages = decide_stages(config, model, formats, decided, files.prepared is not None, choice.layers if choice else ())
    inputs = replace(
        memory_inputs(config, model, formats, decided, draft),
        pools=_pools(config, decided),
        num_replicas=parallel.dp,
        adapters=None if adapters is None else AdapterRoom(adapters.num_slots, adapters.max_rank),
        host_bytes=available_host_bytes(),
        stages=stages,
        feedback_elem_bytes=0 if comm is None else comm.feedback_elem_bytes,
    )
    asked = config.weights if stages is None else replace(config.weights, weights="resident")
    try:
        weights = decide_weights(asked, inputs, num_nodes=parallel.nodes, files=files)
    except NotEnoughMemoryError as error:
        if stages is None:
            raise
        if choice is None:
            raise type(error)(f"--layout {parallel.layout} streams no layers, --layout tensor may; {error}") from None
        other = LayoutChoice("tensor", f"{choice.layout} streams no layers, and does not fit into memory without")
        return decide(config, model, formats, link, files=files, model_id=model_id, choice=other, draft=draft)
    budget, layout_note, measured = weights.budget, describe_layout(stages, choice), comm and comm.measured
    peer_blocks = measured.peer_blocks if measured else PEER_BLOCKS
    plan = RunPlan(
        device=setting.device,
        dtype=dtype,
        kv_dtype=config.engine.kv_dtype(dtype),
        sum_dtype=setting.dtype,
        activations=choose_activations(config.model.activations, setting.device, formats.packed),
        allreduce=describe_request(parallel),
        transport=setting.transport,
        peer_blocks=peer_blocks if setting.transport == "peer-memory" else 0,
        transport_reason=decided.transport_reason,
        max_model_len=budget.max_model_len,
        num_blocks=budget.num_blocks,
        buffer_blocks=budget.buffer_blocks,
        weights=weights.plan,
        num_nodes=parallel.nodes,
        num_replicas=parallel.dp,
        stages=stages,
        layout_note=layout_note if stages or choice else "",
        inside=_inside(config, model, stages),
        stage_codec=parallel.stage_codec,
        overlap=choose_overlap(parallel, setting.device, config.hosts.several),
        plan_ahead=stages is None and choose_plan_ahead(config.engine, setting.device, parallel.dp),
        link=link,
        policies=_policies(parallel.allreduce, comm, sums.library),
        adapters=adapters,
        draft="" if draft is None else draft.location,
    )
    return Decision(
        plan=plan,
        layout=layout,
        budget=budget,
        formats=inputs.formats,
        comm=comm,
        notes=(
            *([cuts] if cuts else []),
            *([f"layout: {layout_note}"] if parallel.tp > 1 else []),
            *([describe_draft(draft.name, inputs.draft)] if draft and inputs.draft else []),
            *([_SLOWER_PACKED] if formats.packed and setting.device == "cuda" else []),
            *weights.notes,
            *describe_offload(budget, inputs),
            *describe_nodes(config, setting.device, [rank.fixed + budget.cache_bytes(rank) for rank in budget.ranks]),
        ),
    )


def _inside(config: ServeConfig, model: LlamaConfig, stages: StagePlan | None) -> tuple[NamedPolicy, ...]:
    """How the ranks of a stage of hybrid sum prompts: as those of a pipeline do by default."""
    if stages is None or stages.pipeline or stages.ranks_each == 1:
        return ()
    alike = ParallelOptions(tp=config.parallel.tp, layout="pipeline", stages=stages.num_stages)
    return _policies("auto", decide_sums(replace(config, parallel=alike), model).comm, None)


def describe_nodes(config: ServeConfig, device: str, needed: Sequence[int]) -> tuple[str, ...]:
    """Say which NUMA nodes this host's ranks run on; nothing for GPUs and hosts with one node. ``needed``: bytes of each rank."""
    nodes = read_numa_nodes()
    if device != "cpu" or config.parallel.numa == "off" or len(nodes) < 2:
        return ()
    if (num_usable := num_cores()) < (num_allowed := len(os.sched_getaffinity(0))):
        unbound = f"ranks are not bound to the {len(nodes)} NUMA nodes, and read memory of other nodes, which is slower"
        return (f"warning: a quota allows {num_usable} of {num_allowed} cores, so {unbound}",)
    num_local = config.parallel.num_ranks // (config.hosts.nnodes or 1)
    first = (config.hosts.node_rank or 0) * num_local
    return (describe_placement(num_local, nodes, needed[first : first + num_local]),)


def _policies(own: str, comm: CommDecision | None, library: CommDecision | None) -> tuple[NamedPolicy, ...]:
    """The policies that requests may name, the server's ``own`` first; a single rank has nothing to sum."""
    if comm is None:
        return (NamedPolicy(own, Policy(())),)
    return tuple(
        NamedPolicy(name, chooser.policy(), None if library is None else library.choosers[name].policy())
        for name, chooser in comm.choosers.items()
    )


def _pools(config: ServeConfig, decided: DecidedSetting) -> list[Pool]:
    """The memory pools of this host's ranks: each host decides for its own memory, and node 0 takes the smallest cache."""
    hosts, most_bytes = config.hosts, config.weights.device_memory
    per_host, node = config.parallel.num_ranks // (hosts.nnodes or 1), hosts.node_rank or 0
    own = range(node * per_host, (node + 1) * per_host)
    if decided.setting.device == "cpu":
        of_node = f" of node {node}" if hosts.several else ""
        name, free = f"host memory{of_node}", available_host_bytes()
        shared = [Pool(name=name, available_bytes=free, ranks=own, shared_bytes=SHARED_RUNTIME_BYTES)]
        beside = f"beside {format_bytes(LIBRARY_BYTES)} of libraries"
        limits = (("--device-memory", most_bytes), (f"`ulimit -v`, {beside},", address_bytes_left()))
        each = [(rank, f"{name} of rank {rank}", most) for rank in own for name, most in limits if most is not None]
    else:
        limit, shared = "" if most_bytes is None else f", --device-memory {format_bytes(most_bytes)} a rank", []
        gpus = [(rank, gpu, gpu.free_bytes) for rank, gpu in zip(own, decided.gpus, strict=False)]
        each = [(rank, f"cuda:{rank} ({gpu.name}{limit})", min(free, most_bytes or free)) for rank, gpu, free in gpus]
    return shared + [Pool(name=name, available_bytes=n, ranks=range(rank, rank + 1)) for rank, name, n in each]


def describe_draft(name: str, inputs: MemoryInputs) -> str:
    """Describe the model that drafts, for the log and for ``explain``."""
    own = rank_bytes(inputs, EVERYTHING_RESIDENT)[0]
    products = choose_activations("fastest", inputs.device, inputs.formats.packed)
    model = f"{name} (made for {inputs.model.max_positions} tokens, activations in {products})"
    memory = f"{format_bytes(own.weights)} of weights and {format_bytes(own.activations)} of working space there"
    takes = f"takes {memory}, and a KV cache of as many tokens; no rank sums or receives more for it"
    return f"speculation: rank 0 drafts with {model}, which {takes}"


def plan_adapters(options: AdapterOptions, model: LlamaConfig) -> AdapterPlan | None:
    """Return the slots and what they hold at start; None: adapters are off. ModelError: an adapter is refused."""
    if not options.num_slots:
        return None
    opened = [(name, open_adapter(Path(os.path.expanduser(folder)).resolve(), model)) for name, folder in options.named]
    max_rank = options.slot_rank(max((adapter.rank for _, adapter in opened), default=0))
    for name, adapter in opened:
        if adapter.rank > max_rank:
            raise ValueError(f"--max-lora-rank {max_rank}: adapter {name!r} has rank {adapter.rank}; give that or more")
    loaded = tuple(
        ServedAdapter(id=number, name=name, folder=str(adapter.folder), digest=adapter_digest(adapter.folder))
        for number, (name, adapter) in enumerate(opened, start=1)
    )
    return AdapterPlan(num_slots=options.num_slots, max_rank=max_rank, loaded=loaded)


def describe_adapters(plan: AdapterPlan, bytes_per_rank: Sequence[int]) -> str:
    """Describe the slots for the log and for ``explain``. ``bytes_per_rank``: what the slots take."""
    names = ", ".join(adapter.name for adapter in plan.loaded) or "none"
    sizes = " and ".join(dict.fromkeys(map(format_bytes, bytes_per_rank)))
    slots = f"{plan.num_slots} slots for rank {plan.max_rank}, {sizes} a rank, loaded: {names}"
    return f"adapters: {slots}; the ranks' sums carry no byte more"
