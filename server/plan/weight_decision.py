"""Decides which layers stay on the device, which are streamed and from where, and describes the cost."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import torch

from tightwire.kernels.spec.gguf_blocks import GROUP_ELEMS
from tightwire.large_file import choose_io
from tightwire.model.weights import EVERYTHING_RESIDENT, LEAST_STREAMED, WEIGHT_CODECS, WeightPlan
from tightwire.model.weights.formats import QUANTIZED_AS
from tightwire.model.weights.packed_layer import pack_model, weight_codec
from tightwire.model.weights.prepared.folder import Prepared
from tightwire.model.weights.residency import WeightSizes, check_codec
from tightwire.server.config.serve import ServeConfig
from tightwire.server.config.weights import WeightOptions
from tightwire.server.plan.gpu_copies import copy_rates
from tightwire.server.plan.memory_budget import LEAST_CONTEXT, MemoryBudget, NotEnoughMemoryError, make_budget
from tightwire.server.plan.rank_bytes import MemoryInputs
from tightwire.sizes import format_bytes

# The KV cache's share of the memory the layers could use. Streamed layers cost a decode step the same transfer at any
# batch size, so many sequences gain more from cache, and few gain more from resident layers.
_CACHE_SHARE = {"latency": 0.2, "throughput": 0.6}
# Parts of a step that share one transfer of a layer. With more, steps of thousands of tokens delay decoding too long.
_MAX_PARTS = {"latency": 1, "throughput": 16}
# Bits per value of weights packed by ``--quantization``; codecs with the same names take 8.5 and 4.5.
_PACKED_BITS = {name: f"{8 * packed.row_bytes(GROUP_ELEMS) / GROUP_ELEMS:g}" for name, packed in QUANTIZED_AS.items()}
# On GPUs shared layers must be so many times as fast, as noise would decide a tie, and leave this part of the cache for sequences.
_LEAST_GAIN, _LEAST_CACHE = 1.2, 0.5
# Share of the host's free memory for waiting layers; other programs and the page cache need the rest.
_HOST_SHARE = 0.8


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
    """The options, with the values fixed by a prepared folder. ValueError: an option contradicts the folder."""
    or_make = "or make another folder with `tightwire prepare`"
    tp, split = config.parallel.tp, config.parallel.tp_split
    if tp != prepared.tp:
        fix = f"give --tp {prepared.tp} (got {tp}), {or_make}"
        raise ValueError(f"{prepared.folder} is split over {prepared.tp} ranks; {fix}")
    if (split or None) != (shares := prepared.manifest.shares or None):
        made_with = "none" if shares is None else ",".join(f"{share:g}" for share in shares)
        raise ValueError(f"{prepared.folder} was made with --tp-split {made_with}; give the same, {or_make}")
    dtype, codec = prepared.manifest.dtype, prepared.manifest.codec
    name = next(name for name, own in WEIGHT_CODECS.items() if own == codec)
    for flag, asked, default, stored in (
        ("--dtype", config.model.dtype, "auto", dtype),
        ("--quantization", config.model.quantization, "auto", "the format it was prepared with"),
        ("--weight-codec", config.weights.weight_codec, "none", name),
    ):
        if asked not in (default, stored):
            raise ValueError(f"{flag} {asked}: {prepared.folder} stores {stored}; leave {flag} out, {or_make}")
    model = replace(config.model, dtype=dtype)
    resident = config.weights.weights == "resident"  # resident layers were encoded when the folder was written
    weights = config.weights if resident else replace(config.weights, weight_codec=name)
    return replace(config, model=model, weights=weights)


def decide_weights(
    options: WeightOptions, inputs: MemoryInputs, *, num_nodes: int = 1, files: Files = IN_FILES
) -> WeightDecision:
    """Resolve ``--weights``. NotEnoughMemoryError: it does not fit. ValueError: layers cannot stay as requested."""
    num_layers, refusal, resident = inputs.model.num_layers, None, None
    try:
        resident = make_budget(inputs)
    except NotEnoughMemoryError as error:
        refusal = error
    if options.weights == "auto" and resident is not None and num_layers >= LEAST_STREAMED:
        # Layers stream rather than leave no room for LEAST_CONTEXT tokens, or for a smaller context that was requested.
        is_roomy = resident.room_tokens >= min(LEAST_CONTEXT, resident.max_positions)
        resident = resident if is_roomy else None
    if options.weights == "resident" or (options.weights == "auto" and resident is not None):
        if resident is None:
            raise refusal or AssertionError
        plan = msgspec.structs.replace(EVERYTHING_RESIDENT, io=_how_to_read(inputs, files))
        return WeightDecision(plan=plan, budget=resident)
    if num_layers < LEAST_STREAMED:
        few = f"this model has {num_layers} layers, which the two buffers hold; use --weights auto"
        raise refusal or ValueError(f"--weights {options.weights}: {few}")
    if files.prepared is None:
        dtype, codec = getattr(torch, inputs.dtype), weight_codec(options.weight_codec)
        packed = pack_model(inputs.model, inputs.layout.shards[0], inputs.formats, dtype, codec)
        check_codec(options.weight_codec, packed.stored, inputs.formats)
    streaming = _Streaming(options, inputs, num_nodes, files, resident)
    if options.weights != "auto" or options.stream_from != "auto" or inputs.num_replicas <= num_nodes:
        return streaming.decide(shared=options.weights == "partition")
    try:  # replicas of a node share layers instead of each reading all of them
        shared = streaming.decide(shared=True)
    except NotEnoughMemoryError:  # a node's memory does not hold one copy
        return streaming.decide(shared=False)
    return shared if inputs.device == "cpu" else streaming.shared_or_alone(shared)


@dataclass(frozen=True, slots=True)
class _Streaming:
    """Decides which layers stream. ``resident``: the budget with none streamed; None: the model needs streaming."""

    options: WeightOptions
    inputs: MemoryInputs
    num_nodes: int
    files: Files
    resident: MemoryBudget | None

    def decide(self, *, shared: bool) -> WeightDecision:
        """The decision. ``shared``: the replicas of a node keep a part of each streamed layer."""
        options, num_layers = self.options, self.inputs.model.num_layers
        sizes = self.inputs.weight_sizes(options.weight_codec) * self.inputs.num_replicas
        origin = "files" if shared else self._origin(sizes)
        every = self._budget_of_all(origin)
        num_streamed = options.stream_layers or num_layers
        if not LEAST_STREAMED <= num_streamed <= num_layers:
            raise ValueError(f"--stream-layers must be {LEAST_STREAMED} to {num_layers} (all), got {num_streamed}")
        if options.stream_layers is None and self.resident is None:
            num_streamed = self._fewest(origin, every.step_blocks)
        plan, budget = self._plan(num_streamed, origin), every
        if num_streamed < num_layers:
            budget = make_budget(self.inputs, plan, None if self.resident else 1.0)
        notes = _describe(plan, num_layers, sizes, self.inputs.device)
        if self.resident is not None:
            notes += ("warning: all weights would fit on the device; --weights resident avoids the cost of streaming",)
        return WeightDecision(plan=plan, budget=budget, notes=notes)

    def shared_or_alone(self, shared: WeightDecision) -> WeightDecision:
        """On GPUs, shared layers if they arrive clearly faster than from the host and leave enough cache, and why."""
        try:
            alone = self.decide(shared=False)
        except ValueError as error:
            return _noted(shared, f"replicas share layers, as each cannot stream its own: {str(error).splitlines()[0]}")
        if alone.plan.origin == "disk":
            return _noted(shared, "replicas share layers, because each would read its own from disk")
        if self.num_nodes > 1:  # each host would time its own copies, and all must decide alike
            return _noted(alone, "replicas stream their own layers: on several nodes copies are not timed")
        num_replicas, sizes = self.inputs.num_replicas, self.inputs.weight_sizes(self.options.weight_codec)
        rates, why = copy_rates(num_replicas * len(sizes))
        if rates is None:
            return _noted(alone, f"warning: replicas stream their own layers; copies of the GPUs were not timed: {why}")
        host_s = max(size.per_pass(alone.plan) for size in sizes) / rates.host
        gpus_s = max(size.per_pass(shared.plan) for size in sizes) * (1 - 1 / num_replicas) / rates.gpus
        caches = shared.budget.step_blocks, alone.budget.step_blocks
        is_better = _LEAST_GAIN * gpus_s <= host_s and caches[0] >= _LEAST_CACHE * caches[1]
        facts = (
            f"the layers of a step arrive in {gpus_s:.2g} s from other GPUs ({rates.gpus / 1e9:.1f} GB/s while all receive), "
            f"in {host_s:.2g} s from the host ({rates.host / 1e9:.1f} GB/s); {caches[0]} cache blocks fit if shared, {caches[1]} if not"
        )
        if is_better:
            return _noted(shared, f"replicas share layers: {facts}")
        asked = f"sharing has to be {_LEAST_GAIN:g} times as fast, with {_LEAST_CACHE:.0%} of the cache"
        return _noted(alone, f"replicas stream their own layers: {facts}; {asked} (--weights partition shares anyhow)")

    def _plan(self, num_streamed: int, origin: str) -> WeightPlan:
        shared = origin == "files"
        return WeightPlan(
            source="partition" if shared else "stream",
            origin=origin,
            ranks_per_node=self.inputs.num_replicas // self.num_nodes if shared else 1,
            codec=self.options.weight_codec,
            streamed=spread(self.inputs.model.num_layers, num_streamed),
            max_parts=_MAX_PARTS[self.options.stream_policy],
            io=_how_to_read(self.inputs, self.files),
        )

    def _budget_of_all(self, origin: str) -> MemoryBudget:
        plan = self._plan(self.inputs.model.num_layers, origin)
        try:
            return make_budget(self.inputs, plan, _CACHE_SHARE[self.options.stream_policy])
        except NotEnoughMemoryError as error:
            if self.files.exist or self.inputs.device != "cpu" or origin != "host":
                raise
            # Random weights are not in a file: streamed layers would wait in the memory that is too small for them.
            advice = "`tightwire prepare` writes this model to a folder that can be streamed from disk"
            if self.options.weight_codec != "int4":
                advice += ", and --weight-codec int4 keeps waiting layers encoded"
            raise NotEnoughMemoryError(f"{error}\nrandom weights are not in a file; {advice}") from None

    def _fewest(self, origin: str, num_blocks: int) -> int:
        """The smallest number of streamed layers that leaves room for at least ``num_blocks`` cache blocks."""
        few, many = LEAST_STREAMED - 1, self.inputs.model.num_layers  # too few; enough
        while many - few > 1:
            middle = (few + many) // 2
            try:
                enough = make_budget(self.inputs, self._plan(middle, origin), 1.0).step_blocks >= num_blocks
            except NotEnoughMemoryError:
                enough = False
            few, many = (few, middle) if enough else (middle, many)
        return many

    def _origin(self, sizes: Sequence[WeightSizes]) -> str:
        """``host`` or ``disk``. On a CPU, host memory is device memory, so keeping layers there only helps if encoded."""
        options, host_bytes, all_layers = self.options, self.inputs.host_bytes, self.inputs.model.num_layers
        num_bytes = sum(size.per_pass(self._plan(all_layers, "host")) for size in sizes)
        fits = num_bytes <= host_bytes * _HOST_SHARE
        if options.stream_from == "host" and not fits:
            taken = f"{format_bytes(num_bytes)} of the host's memory, of which {format_bytes(host_bytes)} are free"
            advice = "use --stream-from disk, or --weight-codec int8 or int4"
            raise ValueError(f"--stream-from host: the layers take {taken}; {advice}")
        encodes = options.weight_codec != "none" and self.files.prepared is None
        origin = options.stream_from
        if origin == "auto":
            useful = self.inputs.device == "cuda" or encodes or not self.files.exist
            origin = "host" if fits and useful else "disk"
        if origin == "disk" and not self.files.exist:
            raise ValueError("random weights are in no file to stream; `tightwire prepare MODEL FOLDER` writes one")
        if origin == "disk" and encodes:
            asked = f"--weight-codec {options.weight_codec}"
            advice = f"`tightwire prepare MODEL FOLDER {asked}` writes encoded ones, or use --stream-from host"
            raise ValueError(f"{asked}: the files are not encoded; {advice}")
        return origin


def _noted(decision: WeightDecision, note: str) -> WeightDecision:
    return replace(decision, notes=(*decision.notes, note))


def _how_to_read(inputs: MemoryInputs, files: Files) -> str:
    return "buffered" if files.prepared is None else choose_io(files.prepared.paths, inputs.host_bytes)


def _describe(plan: WeightPlan, num_layers: int, sizes: Sequence[WeightSizes], device: str) -> tuple[str, ...]:
    """Lines that describe the plan. ``sizes``: one per rank."""
    encoded = "" if plan.codec == "none" else f", plain matrices in {plan.codec}"
    if plan.source == "partition":
        kept = " and ".join(dict.fromkeys(format_bytes(size.kept(plan)) for size in sizes))
        place = f"the {plan.ranks_per_node} replicas of a node, each with a part of every layer ({kept} a rank)"
    else:
        place = {"host": "host memory", "disk": "disk"}[plan.origin]
    per_pass = " and ".join(dict.fromkeys(format_bytes(size.per_pass(plan)) for size in sizes))
    resident = f"embedding, head and {num_layers - len(plan.streamed)} of {num_layers} layers are resident"
    lines = [f"weights: {resident}; {len(plan.streamed)} stream from {place}{encoded}: {per_pass} a step and rank"]
    if device == "cuda" and plan.source == "stream" and plan.origin == "host":
        on_host = sum(size.on_host(plan) for size in sizes)
        lines.append(f"host memory holds {format_bytes(on_host)} of layers over {len(sizes)} ranks")
    if device == "cpu" and plan.codec != "none":
        bits = f"{_PACKED_BITS[plan.codec]} bits a number, which matrix products read without decoding"
        instead = f"--quantization {plan.codec} in place of --weight-codec {plan.codec} stores {bits}"
        lines.append(f"note: on a CPU, decoding layers takes time from computing; {instead}")
    return tuple(lines)


def spread(num_layers: int, num_streamed: int) -> tuple[int, ...]:
    """Return the layers to stream, spread evenly between the others, which gives each the most time to arrive."""
    return tuple((2 * k + 1) * num_layers // (2 * num_streamed) for k in range(num_streamed))
