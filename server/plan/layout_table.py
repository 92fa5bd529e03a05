"""The layouts of a model on some hosts side by side: times, memory, and which one is best."""

import operator
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from statistics import fmean

import msgspec

from tightwire.comm.link.wire import LinkFacts
from tightwire.comm.policy.schedule import HostRates
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.layout import Layout, Shard, make_layout, whole_shard
from tightwire.model.open import Checkpoint, formats_of
from tightwire.model.stages import StagePlan, divide_layers
from tightwire.model.weights import EVERYTHING_RESIDENT
from tightwire.model.weights.formats import WeightFormats, layer_tensors, outer_tensors, split_model
from tightwire.server.config.limits import BLOCK_SIZE
from tightwire.server.config.parallel import ParallelOptions
from tightwire.server.config.serve import ServeConfig
from tightwire.server.config.weights import WeightOptions
from tightwire.server.plan.comm_decision import SumDecision
from tightwire.server.plan.layout_times import CROWD, REQUEST, Predictor, RowWork, Stages, Times, sums_of
from tightwire.server.plan.rank_bytes import SHARED_RUNTIME_BYTES, CacheShape, MemoryInputs, rank_bytes, split_ranks
from tightwire.server.plan.setting import DecidedSetting

CONTEXT = 8192  # tokens of the KV cache in the memory of a host, or the model's context
_PROMPT_ROWS = 256
Draft = Checkpoint | None  # the model that drafts, in the formats of --quantization


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One layout. ``fits``: the memory of each host holds its ``host_bytes``."""

    times: Times
    stages: tuple[tuple[int, int], ...] = ()
    host_bytes: tuple[int, ...]
    fits: bool = True

    @property
    def name(self) -> str:
        return ", ".join(filter(None, (self.times.layout, self.times.all_reduce)))


def work_of(inputs: MemoryInputs, ranks_each: int = 1) -> RowWork:
    """The work of a row in the mean layer. ``ranks_each``: of a host, to whose own the first does not hand keys and values over a wire."""
    model, outer = inputs.model, outer_bytes(inputs)
    return RowWork(
        num_layers=model.num_layers,
        row_elems=model.hidden_size,
        layer_bytes=fmean(layer_bytes(inputs)),
        layer_flops=2 * model.layer_matrix_elems,
        pair_flops=4 * model.num_heads * model.head_dim,
        head_bytes=outer.get("head", outer["embedding"]),
        head_flops=2 * model.vocab_size * model.hidden_size,
        handed_bytes=sum(inputs.layer_block(model, shard) for shard in inputs.layout.shards[ranks_each:]) / BLOCK_SIZE,
    )


def memory_inputs(
    config: ServeConfig, model: LlamaConfig, formats: WeightFormats, decided: DecidedSetting, draft: Draft = None
) -> MemoryInputs:
    """What a rank's memory depends on, without pools and what the table of layouts does not ask for. ``draft``: whole on rank 0."""
    alone = partial(replace, config, parallel=ParallelOptions(), weights=WeightOptions())
    own = draft and memory_inputs(alone(), draft.config, formats_of(draft, config.model.quantization), decided)
    split = partial(split_ranks, model, formats, config.parallel)
    return MemoryInputs(
        model=model,
        layout=split(by_stage=config.parallel.layout == "pipeline"),
        parts_of_stages=split(by_stage=True) if config.parallel.layout == "hybrid" else None,
        options=config.engine,
        pools=(),
        formats=formats.with_int8_activations() if config.model.activations == "int8" else formats,
        device=decided.setting.device,
        dtype=decided.dtype,
        draft=own,
    )


def compare_layouts(
    asked: SumDecision,
    inputs: MemoryInputs,
    link: LinkFacts,
    rates: Sequence[HostRates],
    room: Sequence[int] = (),
    shares: Sequence[float] | None = None,
) -> list[Row]:
    """One host alone, then tensor by AllReduce, hybrid with the first AllReduce, and pipeline.

    ``asked``: the sums, of a layout that sums. ``rates``: of each host. ``room``: the memory of each; empty: not limited.
    ``shares``: of each in tensors and stages, as stated; None: by the rates.
    """
    assert asked.comm is not None, "several hosts"
    model, shards = inputs.model, inputs.layout.shards
    each = len(shards) // len(rates)  # ranks of a host, of which the slowest decides
    row_bytes = asked.decided.setting.elem_bytes * model.hidden_size
    whole, work = layer_bytes(inputs)[0], work_of(inputs, each)
    parts = [layer_bytes(inputs, shard)[0] / whole for shard in shards]  # KV heads may be held twice
    of_hosts = [each * max(parts[first : first + each]) for first in range(0, len(parts), each)]
    predictor = Predictor(work=work, hosts=rates, shares=of_hosts, link=link.link, ranks_each=each)
    choosers = asked.comm.choosers.items()
    sums = {name: sums_of(own, work.num_layers, row_bytes, link.link) for name, own in choosers}
    (name, first), context = next(iter(sums.items())), min(CONTEXT, model.max_positions)
    alone = Predictor(work=work, hosts=rates[:1], shares=(1.0,), link=link.link).times("one host", "", None)
    found: list[tuple[Times, tuple[tuple[int, int], ...]]] = [(alone, ())]
    found += [(predictor.times("tensor", name, own), ()) for name, own in sums.items()]
    if len(rates) <= work.num_layers:
        by_prompt = divide_layers(work.num_layers, shares or work.speeds(rates, _PROMPT_ROWS)).layers
        found.append((predictor.times("hybrid", name, first, by_prompt), by_prompt))
        by_token = _token_stages(inputs, rates, work, room, shares)
        found.append((predictor.times("pipeline", "", None, by_token), by_token))
    rows = []
    for times, stages in found:
        own = inputs if times is not alone else replace(inputs, layout=make_layout(model, 1))
        needed = host_bytes(own, times.layout, stages, context, 1 if times is alone else len(rates))
        fits = all(least <= most for least, most in zip(needed, room, strict=False))
        rows.append(Row(times=times, stages=stages, host_bytes=tuple(needed), fits=fits))
    return rows


def choose_layout(rows: Sequence[Row]) -> tuple[Row, str]:
    """The row of several hosts with the shortest request, of those that fit and sum as was asked for, and why. ValueError: none fits."""
    names = "", next(row.times.all_reduce for row in rows if row.times.layout == "tensor")
    asked = [row for row in rows if row.times.all_reduce in names and row.times.layout != "one host"]
    ranked = sorted((row for row in asked if row.fits), key=lambda row: row.times.request_s)
    if not ranked:
        raise ValueError("no layout fits into the memory of the hosts")
    best, *others = ranked
    beside = [f"{row.times.layout} {row.times.request_s:.3g} s" for row in others]
    beside += [f"{row.times.layout} does not fit" for row in asked if not row.fits]
    why = f"{best.times.request_s:.3g} s for {REQUEST[0]} prompt tokens and {REQUEST[1]} more"
    return best, f"{why} ({', '.join(beside)})" if beside else why


def _token_stages(
    inputs: MemoryInputs, rates: Sequence[HostRates], work: RowWork, room: Sequence[int], shares: Sequence[float] | None
) -> tuple[tuple[int, int], ...]:
    """The stages of a pipeline: by the time of a crowd's token; if these do not fit, with as many layers as each host's memory holds."""
    sizes, rows = layer_bytes(inputs), max(1, CROWD // len(rates))
    layer_s, context = work.layer_s(rates[0], rows, 0), min(CONTEXT, inputs.model.max_positions)
    each_s, speeds = [layer_s * size / work.layer_bytes for size in sizes], shares or work.speeds(rates, rows)
    divide = partial(divide_layers, each_s, speeds, last=work.head_s(rates[0], rows))
    stages = divide().layers
    if all(map(operator.le, host_bytes(inputs, "pipeline", stages, context, len(rates)), room)):
        return stages
    largest = max(sizes) + inputs.layer_block(inputs.model, whole_shard(inputs.model)) * -(-context // BLOCK_SIZE)
    ranks, outer = rank_bytes(_in_stages(inputs, len(rates)), EVERYTHING_RESIDENT), outer_bytes(inputs)
    besides = _by_host(inputs, [rank.fixed - rank.weights for rank in ranks], len(rates))
    besides[0], besides[-1] = besides[0] + outer["embedding"], besides[-1] + outer.get("head", outer["embedding"])
    with suppress(ValueError):  # no stages fit, which their row says
        stages = divide(most=[(own - beside) // largest for own, beside in zip(room, besides, strict=True)]).layers
    return stages


def host_bytes(inputs: MemoryInputs, layout: str, stages: Stages, context: int, num_hosts: int) -> list[int]:
    """The bytes of each host's ranks with a KV cache of ``context`` tokens."""
    if stages:
        each, by_stage = len(inputs.layout.shards) // len(stages), _in_stages(inputs, len(stages))
        plan = StagePlan(tuple(stages), pipeline=layout == "pipeline", ranks_each=each)
        inputs = by_stage if plan.pipeline else replace(inputs, parts_of_stages=by_stage.layout)
        inputs = replace(inputs, stages=plan)
    num_blocks = CacheShape.of(inputs.model, inputs.options, bounded=inputs.stages is None).blocks(context)
    ranks = rank_bytes(inputs, EVERYTHING_RESIDENT)
    return _by_host(inputs, [rank.fixed + num_blocks * rank.block for rank in ranks], num_hosts)


def _by_host(inputs: MemoryInputs, of_ranks: Sequence[int], num_hosts: int) -> list[int]:
    each = len(of_ranks) // num_hosts
    shared = (each - 1) * SHARED_RUNTIME_BYTES if inputs.device == "cpu" else 0
    return [sum(of_ranks[first : first + each]) - shared for first in range(0, len(of_ranks), each)]


def _in_stages(inputs: MemoryInputs, num: int) -> MemoryInputs:
    """The inputs for ranks that hold the layers of stages, each split over its ranks."""
    each = split_model(inputs.model, inputs.formats, len(inputs.layout.shards) // num)
    return replace(inputs, layout=Layout(shards=each.shards * num))


def layer_bytes(inputs: MemoryInputs, shard: Shard | None = None) -> list[int]:
    """The bytes of each layer of ``shard``, or of whole layers."""
    shard = shard or whole_shard(inputs.model)
    layers = (layer_tensors(inputs.model, shard, index).values() for index in range(inputs.model.num_layers))
    return [sum(inputs.formats.num_bytes(fused, inputs.elem_bytes) for fused in layer) for layer in layers]


def outer_bytes(inputs: MemoryInputs) -> dict[str, int]:
    """The bytes of the whole embedding and head (if it is not the embedding), and of norms."""
    tensors = outer_tensors(inputs.model, whole_shard(inputs.model))
    return {name: inputs.formats.num_bytes(fused, inputs.elem_bytes) for name, fused in tensors.items()}
