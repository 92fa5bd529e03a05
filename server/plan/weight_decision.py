"""Decides which layers stay on the device, which are streamed and from where, and describes the cost."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec
import torch

from tightwire.comm.sizes import format_bytes
from tightwire.kernels.spec.packed_format import GROUP_ELEMS
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.layout import Layout
from tightwire.model.weights import WEIGHT_CODECS
from tightwire.model.weights.formats import QUANTIZED_AS, WeightFormats
from tightwire.model.weights.packed_layer import pack_model, weight_codec
from tightwire.model.weights.prepared.folder import Prepared
from tightwire.model.weights.residency import (
    EVERYTHING_RESIDENT,
    LEAST_STREAMED,
    WeightPlan,
    WeightSizes,
    check_codec,
    spread,
)
from tightwire.server.config.serve import ServeConfig
from tightwire.server.config.weights import WeightOptions
from tightwire.server.plan.memory_budget import LEAST_CONTEXT, MemoryBudget, NotEnoughMemoryError

# The KV cache's share of the memory the layers could use. Streamed layers cost a decode step the same transfer at any
# batch size, so many sequences gain more from cache, and few gain more from resident layers.
_CACHE_SHARE = {"latency": 0.2, "throughput": 0.6}
# Parts of a step that share one transfer of a layer. With more, steps of thousands of tokens delay decoding too long.
_MAX_PARTS = {"latency": 1, "throughput": 16}
# Bits per value of weights packed by ``--quantization``; codecs with the same names take 8.5 and 4.5.
_PACKED_BITS = {
    packed_as: f"{8 * packed.row_bytes(GROUP_ELEMS) / GROUP_ELEMS:g}" for packed_as, packed in QUANTIZED_AS.items()
}
# Share of the host's free memory for waiting layers; other programs and the page cache need the rest.
_HOST_SHARE = 0.8

MakeBudget = Callable[[WeightPlan, float | None], MemoryBudget]


@dataclass(frozen=True, slots=True)
class Files:
    """The model's files. ``exist`` is False for random weights."""

    exist: bool
    prepared: Prepared | None = None


IN_FILES = Files(exist=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightDecision:
    """The plan, its budget, and its description (empty: everything is resident, as expected)."""

    plan: WeightPlan
    budget: MemoryBudget
    notes: tuple[str, ...] = ()


def as_prepared(config: ServeConfig, prepared: Prepared) -> ServeConfig:
    """The options, with the values fixed by a prepared folder.

    Raises:
        ValueError: an option contradicts the folder; says what the folder has.
    """
    again = "or make another folder with `tightwire prepare`"
    tp, split = config.parallel.tp, config.parallel.tp_split
    if tp != prepared.tp:
        raise ValueError(
            f"{prepared.folder} is cut for {prepared.tp} ranks; give --tp {prepared.tp} (got {tp}), {again}"
        )
    if (split or None) != (prepared.shares or None):
        had = "none" if prepared.shares is None else ",".join(f"{share:g}" for share in prepared.shares)
        raise ValueError(f"{prepared.folder} was cut with --tp-split {had}; give the same, {again}")
    dtype, codec = prepared.manifest.dtype, prepared.manifest.codec
    name = next(name for name, own in WEIGHT_CODECS.items() if own == codec)
    for flag, asked, default, has in (
        ("--dtype", config.model.dtype, "auto", dtype),
        ("--quantization", config.model.quantization, "auto", "what it was prepared with"),
        ("--weight-codec", config.weights.weight_codec, "none", name),
    ):
        if asked not in (default, has):
            raise ValueError(f"{flag} {asked}: {prepared.folder} has {has}; leave {flag} out, {again}")
    model = replace(config.model, dtype=dtype)
    resident = config.weights.weights == "resident"  # resident layers were encoded when the folder was written
    weights = config.weights if resident else replace(config.weights, weight_codec=name)
    return replace(config, model=model, weights=weights)


def decide_weights(
    options: WeightOptions,
    model: LlamaConfig,
    layout: Layout,
    formats: WeightFormats,
    *,
    dtype: str,
    device: str,
    num_replicas: int = 1,
    num_nodes: int = 1,
    host_bytes: int,
    files: Files,
    make_budget: MakeBudget,
) -> WeightDecision:
    """Resolve ``--weights``.

    Args:
        num_replicas: copies of the layout's ranks, spread evenly over ``num_nodes``.
        host_bytes: free on the host, for layers that stream to CUDA devices.
        files: the files that layers could be streamed from; ``as_prepared`` has already checked prepared ones.
        make_budget: gives the budget of a plan, with a share of memory for the KV cache.
    Raises:
        NotEnoughMemoryError: the model does not fit even with all layers streamed, or with ``--weights resident``.
        ValueError: layers cannot be kept where requested.
    """
    prepared, num_layers = files.prepared, model.num_layers
    if prepared is None:
        _refuse_for_files(options)
    reading = {
        "io": "buffered" if prepared is None else prepared.choose_io("auto", host_bytes),
        "verify": options.verify_weights,
    }
    resident, refusal = _try(make_budget)
    if options.weights == "auto" and resident is not None and num_layers >= LEAST_STREAMED and not _is_roomy(resident):
        resident, refusal = None, None
    if options.weights == "resident" or (options.weights == "auto" and resident is not None):
        if resident is None:
            raise refusal or AssertionError
        return WeightDecision(plan=msgspec.structs.replace(EVERYTHING_RESIDENT, **reading), budget=resident)
    if num_layers < LEAST_STREAMED:
        raise refusal or ValueError(
            f"--weights {options.weights}: this model has {num_layers} layers, which two buffers hold"
        )
    if prepared is None:
        packed = pack_model(model, layout.shards[0], formats, getattr(torch, dtype), weight_codec(options.weight_codec))
        check_codec(options.weight_codec, packed.stored, formats)
    sizes = [WeightSizes(model, shard, formats, getattr(torch, dtype), options.weight_codec) for shard in layout.shards]

    def decide_moving(shared: bool) -> WeightDecision:
        def plan(num_streamed: int, origin: str) -> WeightPlan:
            return WeightPlan(
                source="partition" if shared else "stream",
                origin=origin,
                ranks_per_node=num_replicas // num_nodes if shared else 1,
                codec=options.weight_codec,
                streamed=spread(num_layers, num_streamed),
                max_parts=_MAX_PARTS[options.stream_policy],
                **reading,
            )

        whole = num_replicas * sum(size.per_pass(plan(num_layers, "host")) for size in sizes)
        origin = "files" if shared else _origin(options, device, whole, host_bytes, files)
        share = _CACHE_SHARE[options.stream_policy]
        try:
            every = make_budget(plan(num_layers, origin), share)
        except NotEnoughMemoryError as error:
            if files.exist or device != "cpu" or origin != "host":
                raise
            # Random weights are not in a file: streamed layers would wait in the memory that is too small for them.
            raise NotEnoughMemoryError(
                f"{error}\nrandom weights are in no file; `tightwire prepare` with this model writes a folder, which serves from the "
                "disk"
                + ("" if options.weight_codec == "int4" else ", and --weight-codec int4 lets layers wait encoded")
            ) from None
        num_streamed = options.stream_layers or num_layers
        if num_streamed > num_layers or num_streamed < LEAST_STREAMED:
            raise ValueError(
                f"--stream-layers must be {LEAST_STREAMED} to {num_layers}, all layers of this model, got {num_streamed}"
            )
        if options.stream_layers is None and resident is None:
            num_streamed = _fewest(lambda number: plan(number, origin), num_layers, every.step_blocks, make_budget)
        chosen = plan(num_streamed, origin)
        budget = every if num_streamed == num_layers else make_budget(chosen, None if resident else 1.0)
        return WeightDecision(
            plan=chosen, budget=budget, notes=_describe(chosen, num_layers, num_replicas * sizes, device)
        )

    if options.weights == "auto" and _may_share(options, device, num_replicas, num_nodes):
        with suppress(NotEnoughMemoryError):  # not one copy per node
            return decide_moving(shared=True)
    made = decide_moving(shared=options.weights == "partition")
    if resident is None:
        return made
    return replace(
        made,
        notes=(
            *made.notes,
            "warning: all weights would fit on the device; --weights resident answers sooner by all that streaming costs",
        ),
    )


def _refuse_for_files(options: WeightOptions) -> None:
    """Refuse options that need a prepared folder.

    Raises:
        ValueError: such an option is set.
    """
    if options.verify_weights:
        raise ValueError(
            "--verify-weights is for a prepared folder, whose layers have checksums; "
            "`tightwire prepare MODEL FOLDER` makes one to serve, or leave it out"
        )


def _may_share(options: WeightOptions, device: str, num_replicas: int, num_nodes: int) -> bool:
    """Whether ``auto`` lets the replicas of a node share layers instead of each reading all of them.

    Never on CUDA: each device's path to the host may be faster than its path to the others.
    """
    return num_replicas > num_nodes and device == "cpu" and options.stream_from == "auto"


def _try(make_budget: MakeBudget) -> tuple[MemoryBudget | None, NotEnoughMemoryError | None]:
    """The budget with everything resident, or the error."""
    try:
        return make_budget(EVERYTHING_RESIDENT, None), None
    except NotEnoughMemoryError as error:
        return None, error


def _is_roomy(budget: MemoryBudget) -> bool:
    """Whether resident weights leave room for LEAST_CONTEXT tokens, or for the smaller context that was requested."""
    return budget.room_tokens >= min(LEAST_CONTEXT, budget.max_positions)


def _fewest(plan: Callable[[int], WeightPlan], num_layers: int, num_blocks: int, make_budget: MakeBudget) -> int:
    """The smallest number of streamed layers that leaves room for at least ``num_blocks`` cache blocks."""
    few, many = LEAST_STREAMED - 1, num_layers  # too few; enough
    while many - few > 1:
        middle = (few + many) // 2
        try:
            enough = make_budget(plan(middle), 1.0).step_blocks >= num_blocks
        except NotEnoughMemoryError:
            enough = False
        few, many = (few, middle) if enough else (middle, many)
    return many


def _origin(options: WeightOptions, device: str, num_bytes: int, host_bytes: int, files: Files) -> str:
    """``host`` or ``disk``. On a CPU, host memory is device memory, so keeping layers there only helps if encoded."""
    fits = num_bytes <= host_bytes * _HOST_SHARE
    if options.stream_from == "host" and not fits:
        raise ValueError(
            f"--stream-from host: the layers take {format_bytes(num_bytes)} of the host's memory, of which "
            f"{format_bytes(host_bytes)} are free; use --stream-from disk, or --weight-codec int8 or int4"
        )
    worth = device == "cuda" or (options.weight_codec != "none" and files.prepared is None)
    origin = options.stream_from
    if origin == "auto":
        origin = "host" if fits and (worth or not files.exist) else "disk"
    if origin == "disk" and not files.exist:
        raise ValueError(
            "random weights are in no file to stream from; `tightwire prepare MODEL FOLDER` writes one to serve"
        )
    if origin == "disk" and options.weight_codec != "none" and files.prepared is None:
        raise ValueError(
            f"--weight-codec {options.weight_codec}: these files are not encoded; `tightwire prepare MODEL FOLDER "
            f"--weight-codec {options.weight_codec}` writes some that are, or use --stream-from host"
        )
    return origin


def _describe(plan: WeightPlan, num_layers: int, sizes: Sequence[WeightSizes], device: str) -> tuple[str, ...]:
    """Lines that describe the plan. ``sizes``: one per rank."""
    encoded = "" if plan.codec == "none" else f", plain matrices in {plan.codec}"
    if plan.source == "partition":
        kept = " and ".join(dict.fromkeys(format_bytes(size.kept(plan)) for size in sizes))
        place = f"the {plan.ranks_per_node} replicas of a node, which keep a part of each ({kept} a rank)"
    else:
        place = {"host": "host memory", "disk": "disk"}[plan.origin]
    per_pass = [format_bytes(size.per_pass(plan)) for size in sizes]
    resident = num_layers - len(plan.streamed)
    lines = [
        (
            f"weights: embedding, head and {resident} of {num_layers} layers stay; {len(plan.streamed)} stream from {place}{encoded}: "
            f"{' and '.join(dict.fromkeys(per_pass))} a step and rank"
        ),
    ]
    if device == "cuda" and plan.source == "stream" and plan.origin == "host":
        on_host = sum(size.on_host(plan) for size in sizes)
        lines.append(f"host memory holds {format_bytes(on_host)} of layers over {len(sizes)} ranks")
    if device == "cpu" and plan.codec != "none":
        lines.append(
            f"note: on a CPU what decodes layers takes its time from computing; packed by --quantization {plan.codec} in place of "
            f"--weight-codec {plan.codec} they come in {_PACKED_BITS[plan.codec]} bits a number, and products read them as they are"
        )
    return tuple(lines)
