"""Times the parts of a step on one rank: each kernel that the layers call, on the model's own weights and cache.

The timers are around the kernels that ``EagerLayers`` calls, layer after layer, as the server runs them for prompts. A CPU
server computes the layers of a decode step in one call of a compiled program, which has no timers, so its parts are those of
the same kernels called one by one; the row ``whole step, as served`` is the program's time.

On a GPU the host waits after every kernel, so short kernels also show the time of a launch.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tightwire.bench.stream.rank import BLOCK_SIZE, make_step, one_all_reduce
from tightwire.comm.group.group import Group
from tightwire.kernels.layer_ops import rms_norm
from tightwire.kernels.spec.attention import PackedSequences
from tightwire.model import eager_layers
from tightwire.model.build import RankGroups, RunnerOptions, build_runner
from tightwire.model.layout import make_layout
from tightwire.model.open import open_checkpoint
from tightwire.model.parallel import TensorParallel
from tightwire.model.runner import ModelRunner
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.model.sampling.sampler import Sampler
from tightwire.model.step_arrays import Batch, StepArrays
from tightwire.model.transfer import upload
from tightwire.model.weights.formats import choose_formats
from tightwire.server.plan.devices import bind_to_cores, num_cores

WHOLE = "whole step, as served"
_PASSES = 3
_PARTS = {  # by the name under which ``EagerLayers`` calls the kernel
    "linear": "products",
    "paged_attention": "attention",
    "add_rms_norm": "norm",
    "rms_norm": "norm",
    "rotate_and_cache": "rope, cache write",
    "swiglu": "SwiGLU",
}


@dataclass(frozen=True, slots=True)
class StepShape:
    """One step: ``sequences`` prompts of ``tokens``, or one generated token of each after ``tokens - 1`` others."""

    name: str
    sequences: int
    tokens: int
    is_decode: bool


@dataclass(slots=True)
class Part:
    """A part's calls in all layers. ``num_bytes``: read and written in memory. ``seconds``: of each pass."""

    calls: int = 0
    num_bytes: int = 0
    flops: int = 0
    seconds: list[float] = field(default_factory=list)


def measure_parts(
    group: Group, model: str, quantization: str, all_reduce: str, loads: Sequence[StepShape]
) -> Iterator[tuple[StepShape, dict[str, Part]]]:
    """Time the parts of every load, in bfloat16. Runs on every rank."""
    threads = max(1, num_cores() // group.world_size)
    torch.set_num_threads(threads)
    bind_to_cores(group.rank, group.world_size, threads)
    checkpoint = open_checkpoint(model)
    layout = make_layout(checkpoint.config, group.world_size)
    routes = one_all_reduce(all_reduce, group) if group.world_size > 1 else None
    longest = max(load.tokens for load in loads)
    options = RunnerOptions(
        dtype=torch.bfloat16,
        max_model_len=longest,
        num_blocks=max(load.sequences * -(-load.tokens // BLOCK_SIZE) for load in loads),
        block_size=BLOCK_SIZE,
        formats=choose_formats(checkpoint.reader(), checkpoint.config, quantization),
    )
    groups = RankGroups(group, routes=routes)
    with closing(build_runner(checkpoint.config, checkpoint.reader(), layout, groups, options)) as runner:
        steps = _Steps(checkpoint.config, TensorParallel(group, layout, routes), runner, longest)
        for load in loads:
            yield load, steps.measure(load)


class _Steps:
    """Runs steps kernel by kernel with timers, and as the server runs them."""

    def __init__(self, config: Any, parallel: TensorParallel, runner: ModelRunner, max_positions: int) -> None:
        self._config, self._parallel, self._runner = config, parallel, runner
        self._angles = eager_layers.rope_table(config, max_positions, runner.cache.device)
        self._sampler = Sampler(config.vocab_size, runner.cache.device)
        self._cuda = runner.cache.device.type == "cuda"

    @torch.inference_mode()
    def measure(self, load: StepShape) -> dict[str, Part]:
        query_len = 1 if load.is_decode else load.tokens
        token_ids = np.random.default_rng(0).integers(0, self._config.vocab_size, load.sequences * query_len)
        lengths = [query_len] * load.sequences, [load.tokens] * load.sequences
        plan = make_step(token_ids, *lengths, is_decode=load.is_decode)
        arrays = StepArrays.from_plan(plan, BLOCK_SIZE)
        device = self._runner.cache.device
        values: dict[str, Any] = {own.name: getattr(arrays, own.name) for own in fields(StepArrays)}
        values |= {
            name: upload(array, torch.int32, device) for name, array in values.items() if name != "num_decode_rows"
        }
        batch = Batch(**values)
        parts: dict[str, Part] = defaultdict(Part)
        for number in range(1 + _PASSES):  # the first one warms up
            one: dict[str, Part] = defaultdict(Part)
            self._timed(one, WHOLE, _each_once, self._runner.execute)(plan)
            self._run(batch, load, one)
            for name, part in one.items():
                part.seconds = [*parts[name].seconds, sum(part.seconds)] if number else []
                parts[name] = part
        return dict(parts)

    def _run(self, batch: Batch, load: StepShape, parts: dict[str, Part]) -> None:
        config, parallel, weights = self._config, self._parallel, self._runner.weights
        cache, outer = self._runner.cache, self._runner.weights.outer
        embed = self._timed(parts, "embedding", _rows_copied, parallel.embed)
        residual_dtype = cache.dtype if self._cuda else torch.float32
        residual_TD = embed(outer.embedding, batch.token_ids_T, 0, batch.phase, residual_dtype)
        layers = eager_layers.EagerLayers(config, parallel.shard, cache, self._angles, batch, residual_TD)
        add = parallel.sum_rows
        if parallel.row_sums("o_proj", 0) is not None:
            add = self._timed(parts, "sums over ranks", _each_once, add)
        update_TD = None
        with self._timers_in_layers(parts):
            for index in range(config.num_layers):
                layers.place(index, weights.layer(index))
                for part, site in enumerate(("o_proj", "down_proj"), start=2 * index):
                    partial_TD = layers.run(part, update_TD)
                    row_sums = parallel.row_sums(site, index)
                    update_TD = add(partial_TD, row_sums, num_decode_rows=batch.num_decode_rows)
                weights.release(index)
                cache.release(index)
        assert update_TD is not None, "a model has at least one layer"
        hidden_TD = layers.residual_TD + update_TD
        last_RD = hidden_TD[batch.query_start_B1[1:].long() - 1]
        normed_RD = self._timed(parts, "norm", _each_once, rms_norm)(last_RD, outer.final_norm, config.norm_eps)
        logits_RV = self._timed(parts, "logits", _product, parallel.logits)(normed_RD, outer.head)
        if logits_RV is not None:
            params = SamplingParams(max_tokens=1, temperature=0.0)
            rows = [
                SimpleNamespace(params=params, stop_ids=frozenset(), token_ids=[0], num_prompt_tokens=1)
                for _ in range(load.sequences)
            ]
            self._timed(parts, "sampling", _each_once, self._sampler.sample)(logits_RV, rows)

    @contextmanager
    def _timers_in_layers(self, parts: dict[str, Part]) -> Iterator[None]:
        """Put timers around the kernels that ``EagerLayers`` calls."""
        costs = {"linear": _product, "paged_attention": _attention, "rotate_and_cache": _rotation}
        kernels = {name: getattr(eager_layers, name) for name in _PARTS}
        try:
            for name, kernel in kernels.items():
                setattr(eager_layers, name, self._timed(parts, _PARTS[name], costs.get(name, _each_once), kernel))
            yield
        finally:
            for name, kernel in kernels.items():
                setattr(eager_layers, name, kernel)

    def _timed(
        self, parts: dict[str, Part], name: str, cost: Callable[..., tuple[int, int]], kernel: Callable[..., Any]
    ) -> Callable[..., Any]:
        """``kernel``, adding its time, bytes and operations to the part ``name``."""

        def run(*args: Any, **options: Any) -> Any:
            self._wait()
            start_s = time.perf_counter()
            result = kernel(*args, **options)
            self._wait()
            part = parts[name]
            part.seconds.append(time.perf_counter() - start_s)
            num_bytes, flops = cost(args, result)
            part.calls, part.num_bytes, part.flops = part.calls + 1, part.num_bytes + num_bytes, part.flops + flops
            return result

        return run

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def _each_once(args: Sequence[Any], result: Any) -> tuple[int, int]:
    """Each tensor is read or written once."""
    results = result if isinstance(result, tuple) else (result,)
    return sum(each.nbytes for each in (*args, *results) if isinstance(each, Tensor)), 0


def _rows_copied(args: Sequence[Any], result: Tensor) -> tuple[int, int]:
    return 2 * result.nbytes, 0


def _product(args: Sequence[Any], result: Tensor | None) -> tuple[int, int]:
    x_TD, weight_OD = args[:2]
    num_outputs, num_inputs = weight_OD.shape
    out_bytes = 0 if result is None else result.nbytes
    return x_TD.nbytes + weight_OD.nbytes + out_bytes, 2 * len(x_TD) * num_outputs * num_inputs


def _attention(args: Sequence[Any], result: Tensor) -> tuple[int, int]:
    """Each sequence's keys and values are read once; every query meets the tokens up to its own."""
    q_THE, keys_NKPE, _, sequences = args[:4]
    assert isinstance(sequences, PackedSequences)
    contexts_B, queries_B = sequences.context_lens_B.long(), sequences.query_start_B1.diff().long()
    pairs = int((queries_B * (contexts_B - queries_B) + queries_B * (queries_B + 1) // 2).sum())
    token_bytes = 2 * keys_NKPE.shape[1] * keys_NKPE.shape[3] * keys_NKPE.element_size()
    return q_THE.nbytes + result.nbytes + int(contexts_B.sum()) * token_bytes, 4 * q_THE[0].numel() * pairs


def _rotation(args: Sequence[Any], result: Tensor) -> tuple[int, int]:
    """Queries, keys and values are read once and written once; the values' write is to the cache."""
    return 2 * args[0].nbytes, 0
