"""Steps of one model at several numbers of ranks, which take turns on the same cores: is a rank a core worth it?

    python bench/scripts/rank_steps.py [MODEL] [--ranks 1,2] [--batches 1,8] [--prompt-rows 512] [--rounds 12]

The cores are divided among a model's ranks; a rank has a thread for each of its own. Weights and tokens are the same, ranks
that do not run are idle, and a block begins only when nothing else uses the cores. Medians of blocks' medians.
"""

import argparse
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import torch

from tightwire.bench.report.quiet import wait_for_quiet
from tightwire.bench.stream.cells import Load
from tightwire.bench.stream.measure import Rank
from tightwire.bench.stream.options import StreamBenchOptions
from tightwire.bench.stream.ranks import open_stream_ranks
from tightwire.comm.group.group import Group
from tightwire.model.open import open_checkpoint
from tightwire.model.runner import ModelRunner
from tightwire.model.weights.residency import EVERYTHING_RESIDENT

_BLOCK = {True: 30, False: 3}  # timed steps of a block, of generated tokens and of a prompt
_QUIET = 0.1  # share of the cores that others may use
_BUILT: dict[str, tuple[Rank, ModelRunner]] = {}  # in a rank's process, from its first block on


def main() -> int:
    given = _parser().parse_args()
    options = StreamBenchOptions(
        model=given.model,
        batches=given.batches,
        prompt_rows=given.prompt_rows,
        context=given.context,
        quantization=given.quantization,
        timeout_s=300,
    )
    seconds: dict[tuple[Load, int], list[float]] = defaultdict(list)
    turns = [(load, number) for load in options.loads for number in given.ranks]
    with ExitStack() as stack:
        worlds = {number: stack.enter_context(open_stream_ranks(number, "cpu", 300))[0] for number in given.ranks}
        for taken in range(1 + given.rounds):
            for load, number in random.sample(turns, len(turns)):
                wait_for_quiet(_QUIET, 60)
                medians = [median for _, median in worlds[number].stream(run_block, options, load)]
                if taken:  # the first compiles
                    seconds[load, number].append(max(medians))
    for load in options.loads:
        least = min(statistics.median(seconds[load, number]) for number in given.ranks)
        for number in given.ranks:
            blocks = sorted(1e3 * block for block in seconds[load, number])
            middle = statistics.median(blocks)
            sys.stdout.write(
                f"{load.name:>12}  {number} ranks: {middle:8.2f} ms ({blocks[0]:.2f} to {blocks[-1]:.2f}), "
                f"{middle / (1e3 * least):.2f} of the least\n"
            )
    return 0


def run_block(group: Group, options: StreamBenchOptions, load: Load) -> Iterator[float]:
    """The median of a block's steps, in seconds."""
    if options.model not in _BUILT:
        cores = sorted(os.sched_getaffinity(0))
        own = cores[group.rank :: group.world_size] or cores
        os.sched_setaffinity(0, own)
        torch.set_num_threads(len(own))
        rank = Rank(group, options, open_checkpoint(options.model, options.seed))
        _BUILT[options.model] = rank, rank.build(EVERYTHING_RESIDENT)
    rank, runner = _BUILT[options.model]
    step = msgspec.structs.replace(rank.step(load), num_candidates=1)  # as for greedy requests
    times = []
    for number in range(1 + _BLOCK[load.is_decode]):
        group.transport.barrier()
        start = time.perf_counter()
        runner.execute(step)
        if number:
            times.append(time.perf_counter() - start)
    yield statistics.median(times)


def _parser() -> argparse.ArgumentParser:
    def numbers(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(",")))

    parser = argparse.ArgumentParser(description="Steps at several numbers of ranks, in turns.")
    add = parser.add_argument
    add("model", nargs="?", default="smollm2-135m", help="as for serve (%(default)s)")
    add("--ranks", type=numbers, default=(1, 2), help="(1,2)")
    add("--batches", type=numbers, default=(1, 8), help="sequences that get a token each (1,8)")
    add("--prompt-rows", type=int, default=512, help="tokens of a prompt (%(default)s)")
    add("--context", type=int, default=128, help="of generated tokens (%(default)s)")
    add("--quantization", default="none", choices=("auto", "none", "int8", "int4"), help="of the weights (%(default)s)")
    add("--rounds", type=int, default=12, help="blocks of each kind (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
