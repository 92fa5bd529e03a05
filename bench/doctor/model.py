"""``tightwire doctor MODEL``: what the model is, how it would be kept in memory, and a bound of its speed here."""

import math
import time
from collections import Counter
from collections.abc import Iterator

import torch
from msgspec import Struct

from tightwire.comm.group.host import num_cores
from tightwire.kernels.spec.int8_heads import SCALE_BYTES
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.tensors import EMBEDDING, HEAD, expected_tensors
from tightwire.model.open import formats_of, open_checkpoint
from tightwire.model.weights import EVERYTHING_RESIDENT
from tightwire.model.weights.formats import WeightFormats, split_model
from tightwire.server.cli.http_process import take_defaults
from tightwire.server.config.serve import EngineOptions, ModelOptions, ServeConfig
from tightwire.server.plan.rank_bytes import CacheShape, MemoryInputs, rank_bytes
from tightwire.server.plan.setting import decide_setting
from tightwire.sizes import aligned, format_bytes

_KINDS = {".self_attn.": "attention", ".mlp.": "MLP", EMBEDDING: "embedding", HEAD: "head"}
_CONTEXT, _TPS = 8192, (1, 2, 4)
_READ_S, _READ_BYTES = 0.6, 256 << 20  # larger than any cache


class Kind(Struct, frozen=True):
    """Matrices of one kind: how many are stored and kept in which format, and their bytes in memory."""

    name: str
    stored: dict[str, int] = {}
    in_memory: dict[str, int] = {}
    num_bytes: int = 0


class RankMemory(Struct, frozen=True):
    """Memory of the largest of ``tp`` ranks as ``serve`` plans it; ``other_bytes``: the process and the largest step."""

    tp: int
    weights_bytes: int = 0
    other_bytes: int = 0
    cache_bytes: int = 0
    int8_cache_bytes: int = 0
    problem: str = ""  # why the model cannot be cut so


class ModelReport(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The output of ``--json``. ``tokens_per_s`` is a bound: the measured read rate divided by ``token_bytes``."""

    model: str
    unsupported: str = ""  # the reason; the rest is then empty
    family: str = ""
    num_parameters: int = 0
    context: int = 0
    note: str = ""  # of a checkpoint that is quantized
    kinds: list[Kind] = []
    rank_context: int = 0  # tokens of ``cache_bytes``
    blocks: str = ""  # of those, by kind of layer; empty without windows
    ranks: list[RankMemory] = []
    token_bytes: int = 0
    read_bytes_per_s: float = 0.0
    tokens_per_s: float = 0.0


def examine_model(model: str, tp: int = 1) -> ModelReport:
    """Open the model, which fetches one that is not here, and measure how fast memory is read. ``tp``: beside ``_TPS``."""
    try:
        given = ServeConfig(model=ModelOptions(model=model))
        checkpoint = open_checkpoint(given.model.model)
        take_defaults(given, checkpoint, checkpoint.tokenizer())
        config, formats = checkpoint.config, formats_of(checkpoint, "auto")
        decided = decide_setting(given, config)
    except ValueError as error:
        return ModelReport(model=model, unsupported=str(error))
    device, context = decided.setting.device, min(_CONTEXT, config.max_positions)
    tps = sorted({*_TPS, tp}) if checkpoint.prepared is None else [checkpoint.prepared.tp]
    kinds = _kinds(config, formats, decided.dtype)
    # Of an embedding that is not the head, a token reads one row.
    token_bytes = sum(kind.num_bytes for kind in kinds if kind.name != "embedding" or config.tied_embeddings)
    rate = measure_read_rate(device)
    return ModelReport(
        model=checkpoint.name,
        family=config.family,
        num_parameters=sum(math.prod(shape) for _, shape in expected_tensors(config)),
        context=config.max_positions,
        note=checkpoint.note,
        kinds=kinds,
        rank_context=context,
        blocks=CacheShape.of(config, EngineOptions()).describe(context),
        ranks=[_memory(config, formats, tp, decided.dtype, device, context) for tp in tps],
        token_bytes=token_bytes,
        read_bytes_per_s=rate,
        tokens_per_s=rate / token_bytes,
    )


def measure_read_rate(device: str) -> float:
    """Return bytes a second at which all usable cores, or the first GPU, sum a large tensor; the best of some passes."""
    torch.set_num_threads(num_cores())
    numbers_N = torch.ones(_READ_BYTES // 4, device=device)
    best_s, end = math.inf, time.perf_counter() + _READ_S
    while (start := time.perf_counter()) < end:
        numbers_N.sum().item()
        best_s = min(best_s, time.perf_counter() - start)
    return _READ_BYTES / best_s


def _memory(config: LlamaConfig, formats: WeightFormats, tp: int, dtype: str, device: str, context: int) -> RankMemory:
    try:
        layout = split_model(config, formats, tp)
    except ValueError as error:
        return RankMemory(tp, problem=str(error))
    inputs = MemoryInputs(
        model=config, layout=layout, options=EngineOptions(), pools=(), dtype=dtype, formats=formats, device=device
    )
    largest = max(rank_bytes(inputs, EVERYTHING_RESIDENT), key=lambda rank: rank.fixed + rank.block)
    cache = largest.block * CacheShape.of(config, inputs.options).blocks(context)
    codes = cache // (config.head_dim * inputs.elem_bytes) * (config.head_dim + SCALE_BYTES)
    return RankMemory(tp, largest.weights, largest.fixed - largest.weights, cache, codes)


def _kinds(config: LlamaConfig, formats: WeightFormats, dtype: str) -> list[Kind]:
    found: dict[str, Kind] = {}
    for name, shape in ((name, shape) for name, shape in expected_tensors(config) if len(shape) > 1):
        if (kind := next((kind for part, kind in _KINDS.items() if part in name), None)) is None:
            continue
        packed, own = formats.packed.get(name), found.get(kind, Kind(kind))
        row_bytes = getattr(torch, dtype).itemsize * shape[1] if packed is None else packed.row_bytes(shape[1])
        found[kind] = Kind(
            kind,
            Counter(own.stored) + Counter([formats.plain[name] if packed is None else packed.name]),
            Counter(own.in_memory) + Counter([dtype if packed is None else packed.name]),
            own.num_bytes + shape[0] * row_bytes,
        )
    return list(found.values())


def describe_model(report: ModelReport) -> Iterator[str]:
    """Yield the lines of a screen."""
    yield f"{report.model}: {report.family}, {report.num_parameters / 1e6:,.1f} million parameters, context {report.context}"
    if report.note:
        yield report.note
    rows = [["", "read as", "in memory as", "bytes"]]
    for kind in report.kinds:
        names = [", ".join(f"{num} {name}" for name, num in found.items()) for found in (kind.stored, kind.in_memory)]
        rows.append([kind.name, *names, format_bytes(kind.num_bytes)])
    yield from aligned(rows, num_left=4)
    if all(kind.name != "head" for kind in report.kinds):
        yield "the head is the embedding"
    yield f"a rank's memory with a context of {report.rank_context} tokens:"
    for rank in report.ranks:
        own = {"weights": rank.weights_bytes, "cache": rank.cache_bytes, "process and steps": rank.other_bytes}
        parts = " + ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in own.items())
        codes = f"cache with --kv-cache-dtype int8: {format_bytes(rank.int8_cache_bytes)}"
        yield f"  --tp {rank.tp}  {rank.problem or f'{parts} = {format_bytes(sum(own.values()))}; {codes}'}"
    if report.blocks:
        yield f"  cache: {report.blocks}"
    yield (
        f"at most {report.tokens_per_s:,.1f} tokens/s here for one request: a token reads {format_bytes(report.token_bytes)}, and "
        f"memory is read at {report.read_bytes_per_s / 1e9:.1f} GB/s (a bound, just measured; computing takes time too)"
    )
