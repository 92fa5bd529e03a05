"""Times the parts of a step on one rank: each kernel that the model calls, on the model's own weights and cache.

A step is timed as the server runs it, then again kernel by kernel with timers; a CPU serves a step of few rows as one compiled
program without timers. On a GPU the host waits after every kernel, so short kernels also show the time of a launch.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from tightwire.bench.stream.measure import bind_rank
from tightwire.bench.stream.options import StreamOptions
from tightwire.bench.stream.rank import Rank, make_step, run_step
from tightwire.comm.group.group import Group
from tightwire.comm.group.host import num_cores
from tightwire.kernels.spec.attention import PackedSequences
from tightwire.model import decoder, layer_kernels
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.hf_config import config_to_hf
from tightwire.model.open import open_checkpoint
from tightwire.model.parallel import TensorParallel
from tightwire.model.runner import ModelRunner
from tightwire.model.step import Batch
from tightwire.model.weights import EVERYTHING_RESIDENT

WHOLE = "whole step, as served"
_SUMS = "sums over ranks"
_PASSES = 3


@dataclass(frozen=True, slots=True)
class StepShape:
    """One step: ``sequences`` prompts of ``tokens``, or one generated token of each after ``tokens - 1`` others."""

    name: str
    sequences: int
    tokens: int
    is_decode: bool


@dataclass(slots=True)
class Part:
    """A part's calls in all layers, the bytes that they read and write in memory, and the seconds of each pass."""

    calls: int = 0
    num_bytes: int = 0
    flops: int = 0
    seconds: list[float] = field(default_factory=list)


def measure_parts(
    group: Group, model: str, quantization: str, all_reduce: str, loads: Sequence[StepShape]
) -> Iterator[tuple[StepShape, dict[str, Part]]]:
    """Time the parts of every load, in bfloat16. Runs on every rank."""
    options = StreamOptions(
        quantization=quantization,
        allreduce=all_reduce,
        threads=max(1, num_cores() // group.world_size),
        context=max(load.tokens for load in loads),
        batches=(max(load.sequences for load in loads),),
    )
    bind_rank(group, options)
    checkpoint = open_checkpoint(model)
    with closing(Rank(group, options, checkpoint).build(EVERYTHING_RESIDENT)) as runner:
        timed = [kernel for kernel in _KERNELS if kernel[2] != _SUMS or group.world_size > 1]
        for load in loads:
            yield load, _measure(runner, checkpoint.config, timed, load)


@torch.inference_mode()
def _measure(
    runner: ModelRunner, config: LlamaConfig, kernels: Sequence["_Kernel"], load: StepShape
) -> dict[str, Part]:
    query_len = 1 if load.is_decode else load.tokens
    token_ids = np.random.default_rng(0).integers(0, config.vocab_size, load.sequences * query_len)
    plan = make_step(token_ids, [query_len] * load.sequences, [load.tokens] * load.sequences, is_decode=load.is_decode)
    wait = torch.cuda.synchronize if runner.cache.device.type == "cuda" else lambda: None
    parts: dict[str, Part] = defaultdict(Part)
    for number in range(1 + _PASSES):  # the first one warms up
        one: dict[str, Part] = defaultdict(Part)
        _timed(one[WHOLE], _each_once, partial(run_step, runner), wait)(plan)
        with ExitStack() as stack:
            stack.enter_context(patch.object(Batch, "phase", "prefill"))
            stack.enter_context(patch.object(decoder, "MAX_PROGRAM_ROWS", 0))  # the layers run kernel by kernel
            for owner, attribute, name, cost in kernels:
                timer = _timed(one[name], cost, getattr(owner, attribute), wait)
                stack.enter_context(patch.object(owner, attribute, timer))
            logits_RV = runner.execute(plan)
        _timed(one["sampling"], lambda args, result: (0, 0), runner.choose, wait)(plan, logits_RV)
        for name, part in one.items():
            part.seconds = [*parts[name].seconds, sum(part.seconds)] if number else []
            parts[name] = part
    return dict(parts)


_Cost = Callable[[Sequence[Any], Any], tuple[int, int]]  # bytes and operations of a call


def _timed(part: Part, cost: _Cost, kernel: Callable[..., Any], wait: Callable[[], None]) -> Callable[..., Any]:
    """``kernel``, adding its time, bytes and operations to ``part``."""

    def run(*args: Any, **options: Any) -> Any:
        wait()
        start_s = time.perf_counter()
        result = kernel(*args, **options)
        wait()
        part.seconds.append(time.perf_counter() - start_s)
        num_bytes, flops = cost([arg for arg in args if not isinstance(arg, TensorParallel)], result)
        part.calls, part.num_bytes, part.flops = part.calls + 1, part.num_bytes + num_bytes, part.flops + flops
        return result

    return run


def _each_once(args: Sequence[Any], result: Any) -> tuple[int, int]:
    results = result if isinstance(result, tuple) else (result,)
    return sum(each.nbytes for each in (*args, *results) if isinstance(each, Tensor)), 0


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


# The module or class that the model finds it in, its name there, its part, its cost.
_Kernel = tuple[Any, str, str, _Cost]
_KERNELS: tuple[_Kernel, ...] = (
    (TensorParallel, "embed", "embedding", lambda args, result: (2 * result.nbytes, 0)),
    (layer_kernels, "linear", "products", _product),
    (layer_kernels, "gated_linear", "gate, up, SwiGLU", _product),
    (layer_kernels, "paged_attention", "attention", _attention),
    (layer_kernels, "add_rms_norm", "norm", _each_once),
    (layer_kernels, "rms_norm", "norm", _each_once),
    (decoder, "rms_norm", "norm", _each_once),
    # Queries, keys and values are read once and written once; the values' write is to the cache.
    (layer_kernels, "rotate_and_cache", "rope, cache write", lambda args, result: (2 * args[0].nbytes, 0)),
    (TensorParallel, "sum_rows", _SUMS, _each_once),
    (decoder, "linear", "logits", _product),
)


def time_transformers(group: Group, config: LlamaConfig, prompt_len: int, output_len: int) -> Iterator[float]:
    """Seconds of a token that transformers generates: random weights, one sequence, static cache, compiled."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(num_cores())
    torch.set_default_dtype(torch.bfloat16)
    with group.device:
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config_to_hf(config))).eval()
    model.forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    prompt = torch.ones(1, prompt_len, dtype=torch.long, device=group.device)
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "cache_implementation": "static"}

    @torch.inference_mode()
    def seconds(num_tokens: int) -> float:
        start = time.perf_counter()
        model.generate(prompt, max_new_tokens=num_tokens, min_new_tokens=num_tokens, pad_token_id=0, **options)
        if group.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for num_tokens in (output_len, output_len, 2):
        seconds(num_tokens)  # compiles
    yield median((seconds(output_len) - seconds(2)) / (output_len - 2) for _ in range(3))
