"""Chooses the device, dtype and transport of the ranks, and how their steps overlap. Imports no torch."""

import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tightwire.comm.all_reduce.entry import Setting
from tightwire.comm.all_reduce.names import split_name
from tightwire.comm.codec.codec_names import parse_format
from tightwire.comm.link.link import parse_link
from tightwire.comm.link.wire import NAMESPACES, USER_SPACE, LinkFacts, plan_link
from tightwire.comm.policy.rules import read_policy_file
from tightwire.comm.transport.segment import why_unusable
from tightwire.comm.transport.socket_join import read_secret
from tightwire.cuda_devices import CudaDevice, cuda_devices
from tightwire.kernels.cpu.library import available
from tightwire.model.checkpoint.config import LlamaConfig, check_context, check_ranks
from tightwire.model.checkpoint.header import Sizes, check_name, read_sizes
from tightwire.option import flag_of, naming_flag, require
from tightwire.server.config.parallel import CODED_DTYPE, POLICY_PREFIX, ParallelOptions
from tightwire.server.config.serve import EngineOptions, ModelOptions, ServeConfig
from tightwire.sizes import format_bytes

# Address space of a process beside its tensors: up to 2.6 GiB (bench/RESULTS.md), and further threads, 72 MiB each.
LIBRARY_BYTES = 4 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class DecidedSetting:
    """Where the ranks' sums run, and what led there."""

    setting: Setting
    gpus: Sequence[CudaDevice]  # this host's, if the ranks use them
    dtype: str  # of activations and weights; messages have that of ``setting``
    transport_reason: str  # why ``auto`` chose a slower transport, or empty


def decide_setting(config: ServeConfig, model: LlamaConfig, link: LinkFacts | None = None) -> DecidedSetting:
    """Decide the device, dtype and transport of the ranks. ValueError: one of them is impossible here."""
    device, gpus = _choose_device(config.model.device, config.parallel, config.hosts.nnodes or 1)
    transport, reason = choose_transport(config.parallel, device, link, config.hosts.several)
    if config.parallel.sum_dtype == CODED_DTYPE:
        emulated = link is not None and link.emulation == USER_SPACE
        over_wire = transport == "sockets" or config.hosts.several or link is not None  # also of stages alone
        why = "" if available() else "takes compiled kernels, which this host lacks"
        if emulated or transport == "process-group" or not over_wire:
            why = f"codes messages over sockets and a real wire, and these ranks have none ({transport})"
        if why:
            raise ValueError(f"--sum-dtype {CODED_DTYPE} {why}; use --sum-dtype bfloat16")
    crossed = None if config.parallel.sums_inside else link
    dtype = choose_dtype(config.model, model, device)
    setting = Setting(
        transport=transport,
        device=device,
        world_size=config.parallel.num_summing,
        num_nodes=config.parallel.sum_nodes,
        dtype=choose_sum_dtype(config.parallel, device, dtype),
        link="" if crossed is None else f"{crossed.name} ({crossed.emulation})",
        coded=config.parallel.sum_dtype == CODED_DTYPE and not config.parallel.sums_inside,
    )
    return DecidedSetting(setting=setting, gpus=gpus, dtype=dtype, transport_reason=reason)


def refuse_wrong_model(config: ServeConfig, flag: str = "--tp") -> None:
    """Refuse, with a ValueError, an unknown model, adapter or AllReduce, and sizes that exceed those of the model's header.

    ``flag``: what gives the number of ranks.
    """
    check_name(config.model.model)
    with naming_flag("draft_model"):
        check_name(config.model.model if config.engine.draft_model is None else config.engine.draft_model)
    adapters = config.adapters
    for name, folder in (*(("lora", folder) for _, folder in adapters.named), ("lora_dir", adapters.lora_dir or ".")):
        require(os.path.isdir(os.path.expanduser(folder)), name, folder, "a folder that exists")
    check_all_reduce_names(config.parallel)
    sizes = read_sizes(config.model.model)
    check_layout(config, config.model.device, sizes)
    if sizes is not None:
        check_ranks(sizes.num_heads, config.parallel.num_summing, flag)
        check_context(sizes.max_positions, config.engine.max_model_len or 0)


def refuse_early(config: ServeConfig) -> None:
    """Refuse, with a ValueError, what this machine cannot do, before anything is started. It needs the CPU kernels."""
    address_bytes_left()
    device, _ = _choose_device(config.model.device, config.parallel, config.hosts.nnodes or 1)
    choose_transport(config.parallel, device, several_hosts=config.hosts.several)
    with naming_flag("comm_secret_file"):
        read_secret(config.parallel.comm_secret_file)
    choose_overlap(config.parallel, device, config.hosts.several)
    choose_activations(config.model.activations, device)


def address_bytes_left() -> int | None:
    """What ``ulimit -v`` leaves to the tensors of a rank; None: it limits nothing. ValueError: it leaves nothing."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    if limit <= LIBRARY_BYTES:
        why = f"`ulimit -v` allows a process {format_bytes(limit)} of addresses, and libraries and threads take {format_bytes(LIBRARY_BYTES)}"
        raise ValueError(f"{why}; give `ulimit -v unlimited`, and limit the memory of a rank with --device-memory")
    return limit - LIBRARY_BYTES


def check_layout(config: ServeConfig, device: str, sizes: Sizes | LlamaConfig | None, prepared: bool = False) -> None:
    """Refuse, with a ValueError that names it, what the layout does not work with."""
    for option, why in obstacles(config, layout := config.parallel.layout, device, sizes, prepared):
        raise ValueError(f"--layout {layout} does not combine with {option}: {why}; leave one of them out")
    codec, name = parse_format(config.parallel.stage_codec), config.parallel.stage_codec
    if codec and sizes and sizes.hidden_size % codec.group_elems:
        row = f"a row has {sizes.hidden_size} numbers, which are not whole groups of {codec.group_elems}"
        advice = f"so a text would depend on its neighbours; give {name.split('-')[0]}-g64 or -g32"
        raise ValueError(f"--stage-codec {name}: {row}, {advice}")


def obstacles(
    config: ServeConfig, layout: str, device: str, sizes: Sizes | LlamaConfig | None, prepared: bool = False
) -> list[tuple[str, str]]:
    """Return what a layout does not work with, and why. ``prepared``: the model is a prepared folder."""
    if layout not in ("hybrid", "pipeline"):
        return []
    parallel, engine, weights = config.parallel, config.engine, config.weights.weights
    num_stages, named = parallel.num_stages, f"--stages {parallel.stages}" if parallel.stages else f"--tp {parallel.tp}"
    few = f"a stage has a layer or more, and the model has {sizes and sizes.num_layers}"
    cached = layout == "hybrid" and engine.prefix_cache == "all"
    given = [
        (parallel.tp == 1, "--tp 1", "a stage has a rank or more, and there is one"),
        (parallel.dp > 1, f"--dp {parallel.dp}", "the ranks of a replica are the stages of one"),
        (device == "cuda" and layout == "hybrid", "--device cuda", "keys and values are handed over between CPUs"),
        (device == "cuda" and num_stages < parallel.tp, named, f"a stage is one GPU; give --stages {parallel.tp}"),
        (weights not in ("auto", "resident"), f"--weights {weights}", "the layers of a stage stay in memory"),
        (engine.kv_offload, "--kv-offload", "a stage has its keys and values in memory"),
        (engine.plan_ahead == "on", "--plan-ahead on", "several steps are under way already"),
        (prepared, "a prepared folder", "it has no whole layers, which a stage computes"),
        (sizes is not None and num_stages > sizes.num_layers, named, few),
        (cached, "--prefix-cache all", "a stage has no keys and values of generated tokens"),
    ]
    if layout == "pipeline":
        transport, alone = parallel.transport, num_stages == parallel.tp
        sums, possible = "nothing is summed", ("auto", "sockets") if alone else ("auto", "sockets", "shared-memory")
        given += [
            (transport not in possible, f"--transport {transport}", "stages use sockets"),
            (parallel.overlap == "on", "--overlap on", sums if alone else "the ranks of a stage sum in memory"),
        ]
        for option in ("allreduce", "allreduce_decode", "comm_error_budget", "allreduce_extra") if alone else ():
            value = getattr(parallel, option)
            named = f"{flag_of(option)} {','.join(value) if isinstance(value, tuple) else value}"
            given.append((value not in ("auto", None, ()), named, sums))
    return [(option, why) for is_given, option, why in given if is_given]


def check_all_reduce_names(options: ParallelOptions) -> None:
    """Refuse, with a ValueError, unknown AllReduce names and unreadable policy files."""
    named = [("allreduce", options.allreduce), ("allreduce_decode", options.allreduce_decode)]
    for field, name in [*named, *(("allreduce_extra", name) for name in options.allreduce_extra)]:
        with naming_flag(field):
            if isinstance(name, str) and name.startswith(POLICY_PREFIX) and field != "allreduce_decode":
                read_policy_file(Path(name.removeprefix(POLICY_PREFIX)))
            elif isinstance(name, str):
                split_name(name)


def requested_link(options: ParallelOptions) -> LinkFacts | None:
    """The link requested by ``--link``, before it is created and measured. ValueError: not possible here."""
    return None if options.link is None else plan_link(parse_link(options.link), options.link_emulation)


def choose_transport(
    options: ParallelOptions, device: str, link: LinkFacts | None = None, several_hosts: bool = False
) -> tuple[str, str]:
    """The transport between ranks, and why ``auto`` chose a slower one. ValueError: the requested one is not possible."""
    asked = options.transport
    if (asked, device) in (("peer-memory", "cpu"), ("sockets", "cuda")):
        joins, there, other = ("GPUs", "the CPU", "cuda") if device == "cpu" else ("CPU processes", "CUDA", "cpu")
        why = f"--transport {asked} connects {joins}, and the ranks run on {there}"
        raise ValueError(f"{why}; leave it out, or use --device {other}")
    if options.num_ranks == 1:
        return "none", ""
    over_wire = several_hosts or (link is not None and link.emulation == NAMESPACES)
    if options.sums_inside and (over_wire or options.dp == 1):  # stages or replicas, joined by sockets
        over_wire = options.num_summing == 1
    if over_wire:  # memory is refused: it bypasses the wire; hidden states of GPUs pass through the hosts' memory
        over = "sockets" if device == "cpu" or options.layout == "pipeline" else "process-group"
        return (over if asked == "auto" else asked), ""
    reason = "it carries CPU tensors, and the ranks run on CUDA" if device == "cuda" else why_unusable()
    if asked == "shared-memory" and reason:
        raise ValueError(f"--transport shared-memory is unavailable: {reason}; use --transport sockets")
    if asked != "auto":
        return asked, ""
    if device == "cuda":
        return ("peer-memory" if options.tp > 1 else "process-group"), ""  # replicas do not sum
    return ("sockets", f"no shared memory: {reason}") if reason else ("shared-memory", "")


def choose_overlap(options: ParallelOptions, device: str, several_hosts: bool = False) -> bool:
    """Whether to overlap sums with computing. ``auto``: only over a wire; memory transfers use the cores that compute."""
    if options.overlap == "on" and (device != "cpu" or options.tp == 1):
        why = "a single rank sums nothing" if options.tp == 1 else "it works between CPU ranks, and these run on CUDA"
        raise ValueError(f"--overlap on is not possible: {why}; use --overlap auto or off")
    if options.overlap == "auto":
        by_wire = options.link is not None or (several_hosts and device == "cpu")
        return options.tp > 1 and by_wire and not options.sums_inside
    return options.overlap == "on"


def choose_plan_ahead(options: EngineOptions, device: str, num_replicas: int = 1) -> bool:
    """Whether to launch a step before the previous one has finished; on a CPU planning and computing share the cores."""
    return device == "cuda" and num_replicas == 1 if options.plan_ahead == "auto" else options.plan_ahead == "on"


def _choose_device(asked: str, options: ParallelOptions, num_hosts: int) -> tuple[str, Sequence[CudaDevice]]:
    """The device, and this host's CUDA devices if the ranks use them."""
    gpus, why = cuda_devices() if asked != "cpu" else ((), "")
    num_ranks = options.num_ranks // num_hosts
    device = ("cuda" if gpus else "cpu") if asked == "auto" else asked
    if device == "cuda" and not gpus:
        raise ValueError(f"--device cuda: no CUDA device can be used: {why or 'none is visible'}; use --device cpu")
    if device == "cuda" and num_ranks > len(gpus):
        replicas = f" --dp {options.dp}" if options.dp > 1 else ""
        fewer = "fewer of both, or --device cpu" if replicas else f"--tp {len(gpus)} or less, or --device cpu"
        needed = f"--tp {options.tp}{replicas} needs {num_ranks} CUDA devices, one per rank"
        raise ValueError(f"{needed}, and {len(gpus)} are visible{why and f' ({why})'}; use {fewer}")
    if options.link is not None and device != "cpu":
        raise ValueError("--link emulates a wire between CPU ranks, and --device auto chose CUDA; give --device cpu")
    return device, gpus if device == "cuda" else ()


def choose_activations(asked: str, device: str, packed: object = True) -> str:
    """``float`` or ``int8``. ``packed``: false for a model without packed weights. ValueError: int8 is not possible here.

    ``asked``: ``fastest`` for a model that drafts, because a guess may be rounded: int8 if there are compiled kernels.
    """
    if asked == "fastest":
        return "int8" if packed and device == "cpu" and available() else "float"
    if asked == "int8" and not (packed and device == "cpu"):
        on_cuda = "works on a CPU, and the ranks run on CUDA; leave it out, or use --device cpu"
        plain = "is for packed weights, and these are plain; add --quantization int8 or int4, or leave it out"
        raise ValueError(f"--activations int8 {plain if device == 'cpu' else on_cuda}")
    return "int8" if asked == "int8" else "float"


def choose_sum_dtype(options: ParallelOptions, device: str, dtype: str) -> str:
    """The dtype of the messages of partial sums. ``auto``: float32 where memory carries them, ``dtype`` on wires and GPUs."""
    if options.sum_dtype != "auto":
        return "bfloat16" if options.sum_dtype == CODED_DTYPE else options.sum_dtype
    one_host = options.sums_inside or (options.nodes == 1 and options.link is None)
    return "float32" if device == "cpu" and one_host else dtype


def choose_dtype(options: ModelOptions, model: LlamaConfig, device: str) -> str:
    # Packed numbers fit into float16, and CPU ranks add in float32; a sequence beyond its range ends with an error.
    if options.dtype == "float16" and model.dtype == "bfloat16" and not (model.packed_file and device == "cpu"):
        what = "sums of packed weights on CUDA need" if model.packed_file else "the checkpoint is in"
        why = f"{what} bfloat16, which has a larger range than float16"
        raise ValueError(f"--dtype float16: {why}; use --dtype bfloat16 or float32")
    if options.dtype != "auto":
        return options.dtype
    if device == "cpu":
        return "bfloat16"
    return "float32" if model.dtype == "float64" else model.dtype  # no kernel supports float64
