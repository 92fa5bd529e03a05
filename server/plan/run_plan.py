"""Decides before loading which device, dtype, split and cache to use, and refuses what cannot work."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch

from tightwire.comm.all_reduce.entry import Setting
from tightwire.comm.link.link import parse_link
from tightwire.comm.link.wire import NAMESPACES, LinkFacts, plan_link
from tightwire.comm.policy.rules import Policy
from tightwire.comm.sizes import format_bytes
from tightwire.comm.transport.segment import why_unusable
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.layout import Layout, make_layout
from tightwire.model.open import Checkpoint, formats_of, open_checkpoint
from tightwire.model.weights.formats import WeightFormats, check_split
from tightwire.model.weights.residency import WeightPlan, WeightSizes
from tightwire.server.config.parallel import ParallelOptions
from tightwire.server.config.serve import EngineOptions, ModelOptions, ServeConfig
from tightwire.server.plan.comm_decision import CommDecision, decide_comm
from tightwire.server.plan.comm_request import check_all_reduce_names, describe_request, own_arm, policy_requests
from tightwire.server.plan.devices import CudaDevice, available_host_bytes, cuda_devices
from tightwire.server.plan.kv_offload import describe_offload, make_offloaded_budget
from tightwire.server.plan.memory_budget import MemoryBudget, Pool, make_budget
from tightwire.server.plan.progress import Progress
from tightwire.server.plan.rank_setup import Arm, RunPlan
from tightwire.server.plan.weight_decision import IN_FILES, Files, as_prepared, decide_weights

FETCH_STOPS_S = 2.0  # a fetch reports, and so checks ``stopped``, several times a second


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The plan for the ranks, and its inputs."""

    plan: RunPlan
    layout: Layout
    budget: MemoryBudget
    formats: WeightFormats
    comm: CommDecision | None  # None: a single rank
    weight_notes: tuple[str, ...] = ()  # which layers stream, if any
    cache_notes: tuple[str, ...] = ()  # the layout and cost of an offloaded KV cache, if requested

    def summary(self) -> str:
        """The memory table and the AllReduce choices, one per line."""
        reason = self.plan.transport_reason
        wire = [f"ranks meet over {self.plan.transport}: {reason}"] if reason else []
        if self.plan.link is not None:
            num_nodes = self.plan.num_nodes if self.plan.num_nodes > 1 else len(self.layout.shards)
            wire.append(self.plan.link.describe(num_nodes))
        if self.plan.overlap:
            wire.append("overlap: one half of a prompt's step is computed while the other half's sums are on the wire")
        if self.plan.num_replicas > 1:
            num_ranks = len(self.budget.ranks)
            wire.append(f"{self.plan.num_replicas} replicas of the model on {num_ranks} ranks, for different sequences")
        if self.plan.plan_ahead:
            wire.append("plan-ahead: each step is planned and launched while the one before it runs")
        alone = [] if self.plan.allreduce == "auto" else [f"one rank sums nothing: no use for {self.plan.allreduce}"]
        formats = self.formats.describe(self.plan.dtype)
        return "\n".join(
            [
                self.budget.table(),
                formats,
                *self.weight_notes,
                *self.cache_notes,
                *wire,
                *(alone if self.comm is None else self.comm.notes()),
            ]
        )


def prepare(
    config: ServeConfig,
    progress: Progress,
    *,
    stopped: Callable[[], bool] = lambda: False,
    link: LinkFacts | None = None,
) -> tuple[Checkpoint, Decision]:
    """Find the model, fetch it if necessary, and decide how to run it. May be called off the main thread.

    Args:
        link: the wire created for ``--link``.
        stopped: called several times a second during a fetch; once it returns True, the fetch stops within
            FETCH_STOPS_S.
    Raises:
        ValueError: the model or an option is refused.
    """
    name = config.model.model
    check_all_reduce_names(config.parallel)

    def fetching(fraction: float) -> None:
        if stopped():
            raise ModelError(f"stopped while fetching {name}")
        progress.fetching(name, fraction)

    checkpoint = open_checkpoint(name, config.model.seed, progress=fetching)
    if checkpoint.prepared is not None:
        config = as_prepared(config, checkpoint.prepared)
    formats = formats_of(checkpoint, config.model.quantization)
    files = Files(exist=checkpoint.path is not None, prepared=checkpoint.prepared)
    return checkpoint, decide(config, checkpoint.config, formats, link, files=files)


def decide(
    config: ServeConfig,
    model: LlamaConfig,
    formats: WeightFormats,
    link: LinkFacts | None = None,
    *,
    files: Files = IN_FILES,
) -> Decision:
    """Resolve every ``auto`` except that of ``--quantization``, which ``formats`` already resolves.

    Args:
        files: the files that layers could be streamed from.
    Raises:
        ValueError: an impossible split, device, dtype or size; says what is possible.
    """
    tp = config.parallel.tp
    layout = make_layout(model, tp, config.parallel.tp_split)
    check_split(layout, model, formats)
    setting, gpus = decide_setting(config, model, link)
    device, dtype = setting.device, setting.dtype
    pools = _pools(device, config.parallel.num_ranks, gpus, config.weights.device_memory)
    host_bytes, num_replicas = available_host_bytes(), config.parallel.dp

    def budget_under(plan: WeightPlan, cache_share: float | None) -> MemoryBudget:
        given = {"dtype": dtype, "formats": formats, "device": device, "pools": pools}
        given |= {"plan": plan, "cache_share": cache_share, "num_replicas": num_replicas}
        if not config.engine.kv_offload:
            return make_budget(model, layout, config.engine, **given)
        sizes = [WeightSizes(model, shard, formats, getattr(torch, dtype), plan.codec) for shard in layout.shards]
        beside_weights = max(0, host_bytes - num_replicas * sum(size.on_host(plan) for size in sizes))
        return make_offloaded_budget(model, layout, config.engine, host_bytes=beside_weights, **given)

    weights = decide_weights(
        config.weights,
        model,
        layout,
        formats,
        dtype=dtype,
        device=device,
        num_replicas=num_replicas,
        num_nodes=config.parallel.nodes,
        host_bytes=host_bytes,
        files=files,
        make_budget=budget_under,
    )
    budget = weights.budget
    comm = None
    library = None  # fallback if the GPUs cannot reach each other's memory, which only the ranks can test
    if tp > 1:
        requests, devices = policy_requests(config, model), [gpu.name for gpu in gpus]
        comm = decide_comm(requests, setting, devices, link)
        if setting.transport == "peer-memory" and config.parallel.transport == "auto":
            library = decide_comm(requests, msgspec.structs.replace(setting, transport="process-group"), devices)
    plan = RunPlan(
        device=device,
        dtype=dtype,
        allreduce=describe_request(config.parallel),
        transport=setting.transport,
        transport_reason=choose_transport(config.parallel, device, link)[1],
        max_model_len=budget.max_model_len,
        num_blocks=budget.num_blocks,
        slot_blocks=budget.slot_blocks,
        weights=weights.plan,
        num_nodes=config.parallel.nodes,
        num_replicas=config.parallel.dp,
        overlap=choose_overlap(config.parallel, device),
        plan_ahead=choose_plan_ahead(config.engine, device, config.parallel.dp),
        link=link,
        policy=Policy(()) if comm is None else comm.chooser.policy(),
        library_policy=None if library is None else library.chooser.policy(),
        own_arm=own_arm(config.parallel),
        extra=_extra_arms(comm, library),
    )
    return Decision(
        plan=plan,
        layout=layout,
        budget=budget,
        formats=formats,
        comm=comm,
        weight_notes=weights.notes,
        cache_notes=describe_offload(budget, model, config.engine, device),
    )


def _extra_arms(comm: CommDecision | None, library: CommDecision | None) -> tuple[Arm, ...]:
    """The policies that requests may ask for; empty for a single rank, which has nothing to sum."""
    if comm is None:
        return ()
    return tuple(
        Arm(name, chooser.policy(), None if library is None else library.extra[name].policy())
        for name, chooser in comm.extra.items()
    )


def decide_setting(
    config: ServeConfig, model: LlamaConfig, link: LinkFacts | None = None
) -> tuple[Setting, list[CudaDevice]]:
    """The device, dtype and transport of the ranks, and the CUDA devices if they use any.

    Raises:
        ValueError: an impossible split, device, dtype or transport; says what is possible.
    """
    tp = config.parallel.tp
    make_layout(model, tp, config.parallel.tp_split)
    gpus = cuda_devices(os.environ.get("CUDA_VISIBLE_DEVICES")) if config.model.device != "cpu" else []
    device = _choose_device(config.model.device, config.parallel, gpus)
    if link is not None and device != "cpu":
        raise ValueError("--link is between ranks on the CPU, and --device auto took CUDA; give --device cpu")
    setting = Setting(
        transport=choose_transport(config.parallel, device, link)[0],
        device=device,
        world_size=tp,
        num_nodes=config.parallel.sum_nodes,
        dtype=choose_dtype(config.model, model, device),
        link="" if link is None else f"{link.name} ({link.emulation})",
    )
    return setting, gpus if device == "cuda" else []


def asked_link(options: ParallelOptions) -> LinkFacts | None:
    """The link that ``--link`` asks for, before it is created and measured.

    Raises:
        ValueError: this kind of link is not possible here.
    """
    return None if options.link is None else plan_link(parse_link(options.link), options.link_emulation)


def choose_transport(options: ParallelOptions, device: str, link: LinkFacts | None = None) -> tuple[str, str]:
    """The transport between ranks, and why ``auto`` chose a slower one (empty: it did not).

    Args:
        link: the wire between the nodes.
    Raises:
        ValueError: the requested transport is not possible.
    """
    asked = options.transport
    if asked == "peer-memory" and device == "cpu":
        raise ValueError(
            "--transport peer-memory is between GPUs, and ranks run on the CPU; leave it out, or use --device cuda"
        )
    if options.num_ranks == 1:
        return "none", ""
    if link is not None and link.emulation == NAMESPACES:
        return "process-group", ""  # the other transports would bypass the wire, and are refused above
    reason = "it carries CPU tensors, and ranks run on CUDA" if device == "cuda" else why_unusable()
    if asked == "shared-memory" and reason:
        raise ValueError(f"--transport shared-memory cannot be had: {reason}; use --transport process-group")
    if asked != "auto":
        return asked, ""
    if device == "cuda":
        return ("peer-memory" if options.tp > 1 else "process-group"), ""  # replicas do not sum
    return ("process-group", f"no shared memory: {reason}") if reason else ("shared-memory", "")


def choose_overlap(options: ParallelOptions, device: str) -> bool:
    """Whether to overlap sums with computing. ``auto``: only over a link; memory transfers use the cores that compute.

    Raises:
        ValueError: overlap is not possible here.
    """
    if options.overlap == "on" and (device != "cpu" or options.tp == 1):
        why = "one rank sums nothing" if options.tp == 1 else "it is between CPU ranks, and these run on CUDA"
        raise ValueError(f"--overlap on cannot be had: {why}; use --overlap auto or off")
    if options.overlap == "auto":
        return options.link is not None  # always between CPU ranks
    return options.overlap == "on"


def choose_plan_ahead(options: EngineOptions, device: str, num_replicas: int = 1) -> bool:
    """Whether to launch a step before the previous one has finished.

    ``auto``: on CUDA, with one replica. On a CPU the cores that plan are the cores that compute.
    """
    return device == "cuda" and num_replicas == 1 if options.plan_ahead == "auto" else options.plan_ahead == "on"


def _choose_device(asked: str, options: ParallelOptions, gpus: Sequence[CudaDevice]) -> str:
    num_ranks = options.num_ranks
    device = ("cuda" if gpus else "cpu") if asked == "auto" else asked
    if device == "cuda" and not gpus:
        raise ValueError(
            "--device cuda: no CUDA device is visible (or this torch has no CUDA); --device cpu runs without one"
        )
    if device == "cuda" and num_ranks > len(gpus):
        replicas = f" --dp {options.dp}" if options.dp > 1 else ""
        fewer = "fewer of both, or --device cpu" if replicas else f"--tp {len(gpus)} or less, or --device cpu"
        raise ValueError(
            f"--tp {options.tp}{replicas} needs {num_ranks} CUDA devices, one per rank, and {len(gpus)} are visible; "
            f"use {fewer}"
        )
    return device


def choose_dtype(options: ModelOptions, model: LlamaConfig, device: str) -> str:
    if options.dtype == "float16" and model.dtype == "bfloat16":
        raise ValueError(
            "--dtype float16: the checkpoint is in bfloat16, whose range float16 does not have; "
            "use --dtype bfloat16 or float32"
        )
    if options.dtype != "auto":
        return options.dtype
    if device == "cpu":
        return "bfloat16"
    return "float32" if model.dtype == "float64" else model.dtype  # no kernel supports float64


def _pools(device: str, num_ranks: int, gpus: Sequence[CudaDevice], most_bytes: int | None) -> list[Pool]:
    """The memory pools of the ranks. ``most_bytes``: the ``--device-memory`` limit of each rank."""
    of_all = "" if most_bytes is None else f", --device-memory {format_bytes(most_bytes)} a rank"
    if device == "cpu":
        free = available_host_bytes()
        free = free if most_bytes is None else min(free, num_ranks * most_bytes)
        return [Pool(name=f"host memory{of_all}", available_bytes=free, ranks=range(num_ranks))]
    return [
        Pool(
            name=f"cuda:{rank} ({gpus[rank].name}{of_all})",
            available_bytes=min(gpus[rank].free_bytes, most_bytes or gpus[rank].free_bytes),
            ranks=range(rank, rank + 1),
        )
        for rank in range(num_ranks)
    ]
