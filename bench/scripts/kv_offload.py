"""What a step of generated tokens costs on a CPU with its KV cache offloaded (``--kv-offload``), and without.

    python bench/scripts/kv_offload.py [MODEL] [--sequences 8] [--contexts 128,1000] [--threads 1]

One rank, bfloat16. The two caches take turns, step by step. Beside them stands what the step's bytes take at the rate of copying,
measured in the same run: where that is less than computing a layer, and a core is free for it, it is hidden. On a CPU host and
device are one memory, so what is shown is the discipline's cost, not what it is for.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch

from tightwire.comm.group.group import in_process_groups
from tightwire.comm.sizes import format_bytes
from tightwire.model.build import RankGroups, RunnerOptions, build_runner
from tightwire.model.cache.offloaded_cache import OffloadedCache
from tightwire.model.layout import make_layout
from tightwire.model.open import open_checkpoint
from tightwire.model.runner import ModelRunner
from tightwire.model.step import StepPlan, make_plan

_BLOCK = 16


def main() -> int:
    given = _parser().parse_args()
    torch.set_num_threads(given.threads)
    checkpoint = open_checkpoint(given.model)
    config, longest = checkpoint.config, max(given.contexts)
    blocks_each = -(-longest // _BLOCK)
    num_blocks = given.sequences * blocks_each
    runners = [
        build_runner(
            config,
            checkpoint.reader(),
            make_layout(config, 1),
            RankGroups(in_process_groups(1)[0]),
            RunnerOptions(
                dtype=torch.bfloat16,
                max_model_len=longest,
                num_blocks=num_blocks,
                slot_blocks=slot_blocks,
                block_size=_BLOCK,
            ),
        )
        for slot_blocks in (None, num_blocks)
    ]
    tables_BM = np.arange(num_blocks).reshape(given.sequences, blocks_each)
    for runner in runners:  # pages that nobody wrote are all one page, which costs nothing to copy
        for number in range(given.sequences):
            runner.execute(_plan(tables_BM[number : number + 1], longest, longest))
    cache = runners[1].cache
    assert isinstance(cache, OffloadedCache), "it was made so"
    _say(f"{given.model}, {given.sequences} sequences, {given.threads} threads, torch {torch.__version__}")
    for context in given.contexts:
        step = _plan(tables_BM[:, : -(-context // _BLOCK)], context, 1)
        on_device_s, on_host_s, rates = [], [], []
        before = cache.flow()
        for turn in range(given.repeats + 2):
            for runner, times in zip(runners, (on_device_s, on_host_s), strict=True):
                seconds = _time(runner, step)
                if turn >= 2:
                    times.append(seconds)
            rates.append(_copy_rate())
        flow, num_steps = cache.flow(), given.repeats + 2
        moved = (flow.num_bytes - before.num_bytes) / num_steps
        _say(
            f"context {context}: {1e3 * statistics.median(on_device_s):.1f} ms a step, offloaded "
            f"{1e3 * statistics.median(on_host_s):.1f} ms; {format_bytes(round(moved))} a step, at the rate of copying "
            f"({statistics.median(rates) / 1e9:.1f} GB/s) {1e3 * moved / statistics.median(rates):.1f} ms; "
            f"waited {1e3 * (flow.waited_s - before.waited_s) / num_steps:.1f} ms"
        )
    for runner in runners:
        runner.close()
    return 0


def _plan(tables_BM: np.ndarray, context: int, num_new: int) -> StepPlan:
    """The last ``num_new`` of ``context`` tokens, of sequences with these blocks."""
    num_seqs = len(tables_BM)
    token_ids = np.random.default_rng(0).integers(0, 256, num_seqs * num_new)
    return make_plan(
        token_ids=token_ids,
        query_lens=[num_new] * num_seqs,
        context_lens=[context] * num_seqs,
        block_tables=tables_BM,
        num_decode_rows=num_seqs if num_new == 1 else 0,
        logit_rows=np.arange(1, num_seqs + 1) * num_new - 1,
    )


def _time(runner: ModelRunner, plan: StepPlan) -> float:
    start = time.perf_counter()
    runner.execute(plan)
    return time.perf_counter() - start


def _copy_rate() -> float:
    """Bytes a second from one place to another that no cache holds, by one thread."""
    source, target = np.ones(1 << 26, np.uint8), np.zeros(1 << 26, np.uint8)
    start = time.perf_counter()
    np.copyto(target, source)
    return source.nbytes / (time.perf_counter() - start)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="What a decode step costs with its KV cache offloaded, and without.")
    add = parser.add_argument
    add("model", nargs="?", default="smollm2-135m", help="a known name or a path (%(default)s)")
    add("--sequences", type=int, default=8, help="(%(default)s)")
    add("--contexts", type=_numbers, default=[128, 1000], help="tokens in the cache, with commas (128,1000)")
    add("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1), help="default: all cores but one")
    add("--repeats", type=int, default=31, help="(%(default)s)")
    return parser


def _numbers(text: str) -> Sequence[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
