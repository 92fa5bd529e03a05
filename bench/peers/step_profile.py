"""Prints the time of a step on one CPU rank by kernel, beside the time that its bytes and products need.

    python -m tightwire.bench.peers.step_profile [MODEL] [--quantization none] [--threads 2]

It profiles a prompt, then steps of generated tokens: as served, where one kernel computes a layer, and kernel by kernel.
The rates of copies and products are those of ``roofline``, measured in the same run.
"""

import argparse
import contextlib
import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch

from tightwire.bench.peers.roofline import measure_rates
from tightwire.bench.stream.arms import Load
from tightwire.bench.stream.rank import BLOCK_SIZE, make_step
from tightwire.comm.group.group import in_process_groups
from tightwire.model import eager_layers, parallel
from tightwire.model.build import RankGroups, RunnerOptions, build_runner
from tightwire.model.layout import make_layout
from tightwire.model.open import open_checkpoint
from tightwire.model.runner import ModelRunner
from tightwire.model.step import StepPlan
from tightwire.model.weights.formats import choose_formats, weight_bytes

_KERNELS = (
    ("embedding", parallel, "embedding"),
    ("norms", eager_layers, "rms_norm"),
    ("norms", eager_layers, "add_rms_norm"),
    ("matrix products", eager_layers, "linear"),
    ("rotation, cache write", eager_layers, "rotate_and_cache"),
    ("attention", eager_layers, "paged_attention"),
    ("SwiGLU", eager_layers, "swiglu"),
    ("logits", parallel, "linear_to_float"),
)


def main(argv: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(argv)
    torch.set_num_threads(given.threads)
    checkpoint = open_checkpoint(given.model)
    config = checkpoint.config
    formats = choose_formats(checkpoint.reader(), config, given.quantization)
    layout = make_layout(config, 1)
    longest = max(given.prompt_len, given.context)
    model_bytes = weight_bytes(config, layout.shards[0], formats, 2)
    _say(f"{given.model}: {formats.describe('bfloat16')}; {model_bytes / 1e6:.0f} MB; {given.threads} threads")
    _say(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}")
    rates = measure_rates("cpu")
    bytes_per_s, flops = rates["copy_bytes_per_s"], rates["product_flops"]
    _say(f"measured now: copies read and write {bytes_per_s / 1e9:.1f} GB/s; products {flops / 1e9:.0f} GFLOP/s")
    _say("")
    runner = build_runner(
        config,
        checkpoint.reader(),
        layout,
        RankGroups(in_process_groups(1)[0]),
        RunnerOptions(
            dtype=torch.bfloat16,
            max_model_len=longest,
            num_blocks=max(given.rows) * -(-longest // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            formats=formats,
        ),
    )
    prompt = make_step(Load(False, given.prompt_len), 0, config.vocab_size, seed=0)
    layer_weights = config.num_layers * config.layer_matrix_elems
    least_s = 2 * given.prompt_len * layer_weights / flops
    _report(f"A prompt of {given.prompt_len} tokens", runner, prompt, given.repeats, least_s, "its products")
    for rows in given.rows:
        step = make_step(Load(True, rows), given.context, config.vocab_size, seed=0)
        title = f"{rows} generated token{'s' * (rows > 1)} behind {given.context - 1} each"
        least_s = max(model_bytes / bytes_per_s, 2 * rows * layer_weights / flops)
        what = "reading the weights once, or its products"
        _report(f"{title}, as served", runner, step, given.repeats, least_s, what)
        model = runner._model  # pyright: ignore[reportPrivateUsage]
        with patch.object(model, "_program", None):
            _report(f"{title}, kernel by kernel", runner, step, given.repeats, least_s, what)
    return 0


def _report(title: str, runner: ModelRunner, plan: StepPlan, repeats: int, least_s: float, of_what: str) -> None:
    """Print the median step and the median of each kind of kernel in it."""
    steps: list[float] = []
    kinds: dict[str, list[float]] = {kind: [] for kind, _, _ in _KERNELS}
    for turn in range(repeats + 2):
        spent: dict[str, float] = defaultdict(float)
        with _timed(spent):
            start = time.perf_counter()
            runner.execute(plan)
            seconds = time.perf_counter() - start
        if turn >= 2:
            steps.append(seconds)
            for kind, times in kinds.items():
                times.append(spent[kind])
    step_s = statistics.median(steps)
    _say(f"{title}: {1e3 * step_s:.1f} ms; {of_what}: {1e3 * least_s:.1f} ms, {least_s / step_s:.0%} of it")
    parts = {kind: statistics.median(times) for kind, times in kinds.items()}
    parts["everything else"] = step_s - sum(parts.values())
    for kind, seconds in sorted(parts.items(), key=lambda part: -part[1]):
        if seconds:
            _say(f"  {kind:22} {1e3 * seconds:9.2f} ms  {seconds / step_s:5.1%}")
    _say("")


@contextlib.contextmanager
def _timed(spent: dict[str, float]) -> Iterator[None]:
    def timed(kind: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = kernel(*args, **kwargs)
            spent[kind] += time.perf_counter() - start
            return result

        return call

    with contextlib.ExitStack() as stack:
        for kind, module, name in _KERNELS:
            stack.enter_context(patch.object(module, name, timed(kind, getattr(module, name))))
        yield


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Print the time of a step by kernel.")
    add = parser.add_argument
    add("model", nargs="?", default="smollm2-135m", help="see `tightwire serve` (%(default)s)")
    add("--quantization", default="none", choices=("auto", "none", "int8", "int4"), help="weight formats (%(default)s)")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="(%(default)s)")
    add("--prompt-len", type=int, default=512, help="(%(default)s)")
    add("--context", type=int, default=256, help="tokens per sequence of the decode steps (%(default)s)")
    add("--rows", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32], help="(1,8,32)")
    add("--repeats", type=int, default=9, help="(%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
