"""``tightwire bench stream``: steps with streamed weights against the time that their bytes and their computing take.

An answer that is not the resident weights' (where nothing is encoded), or a buffer used out of turn, fails the run.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tightwire.bench.ending import finish, say
from tightwire.bench.replicas import open_replicas
from tightwire.bench.report.console import make_console
from tightwire.bench.report.environment import describe_environment
from tightwire.bench.report.progress import paused, progress_bar
from tightwire.bench.report.quiet import OthersWatch
from tightwire.bench.report.result_files import ResultFiles
from tightwire.bench.stream import report
from tightwire.bench.stream.cells import SOURCES, Arm
from tightwire.bench.stream.events import PROBE, Answered, Probed, Timed
from tightwire.bench.stream.folders import prepared_folders
from tightwire.bench.stream.measure import measure, measure_shared
from tightwire.bench.stream.options import ROUNDS, StreamBenchOptions, parse_options
from tightwire.bench.stream.ranks import open_stream_ranks
from tightwire.bench.stream.summary import Cells, fault_texts
from tightwire.comm.group.local_ranks import LocalRankError
from tightwire.model.checkpoint.errors import PrepareError
from tightwire.model.layout import make_layout
from tightwire.model.open import Checkpoint, open_checkpoint
from tightwire.model.weights.formats import check_split, choose_formats
from tightwire.model.weights.packed_layer import pack_model, weight_codec
from tightwire.model.weights.residency import LEAST_STREAMED, check_codec
from tightwire.server.plan.devices import num_cores


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 for a wrong answer or a rank that failed, 2 for bad options, 130 after Ctrl-C."""
    run = StreamBench(parse_options(sys.argv[1:] if argv is None else argv))
    try:
        checkpoint = run.open()
    except ValueError as error:
        return run.fail(str(error), status=2)
    try:
        return run.run(checkpoint)
    except (LocalRankError, PrepareError, ValueError) as error:
        return run.fail(str(error))
    except KeyboardInterrupt:
        run.fail("interrupted")
        return 130


class StreamBench:
    """One run: its options, and what the ranks have reported so far."""

    def __init__(self, options: StreamBenchOptions) -> None:
        self._options = options
        self._cells: list[Cells] = []
        self._facts: dict[str, Any] = {}
        self._files: ResultFiles | None = None
        self._console = make_console()
        self._progress = progress_bar()

    def open(self) -> Checkpoint:
        """The model, which can be measured as the options say.

        Raises:
            ValueError: it cannot; nothing has been started.
        """
        checkpoint = open_checkpoint(self._options.model, self._options.seed)
        self._facts = _facts(self._options, checkpoint)
        return checkpoint

    def run(self, checkpoint: Checkpoint) -> int:
        options = self._options
        if options.output is not None:
            self._files = ResultFiles(options.output, options.label)
        report.show_head(self._console, self._facts)
        others: list[float] = []
        own = [arm for arm in options.arms if not arm.is_shared]
        shared = [arm for arm in options.arms if arm.is_shared]
        for num_ranks in options.tp:
            if own:
                others.append(self._run_own(num_ranks, len(own), checkpoint))
            others += [self._run_shared(num_ranks, arm, checkpoint) for arm in shared]
        self._facts["others_share"] = max(others)
        report.show_end(self._console, self._result())
        faults = fault_texts(self._rows())
        for fault in faults:
            say("stream", fault)
        return 1 if self._finish("; ".join(faults) or None) else 0

    def _run_own(self, num_ranks: int, num_arms: int, checkpoint: Checkpoint) -> float:
        """The arms whose ranks need no other replicas; returns the share of the cores that others used meanwhile."""
        options = self._options
        with (
            prepared_folders(checkpoint, options, num_ranks, self._console) as folders,
            open_stream_ranks(num_ranks, options.device, options.timeout_s) as (ranks, transport),
        ):
            self._facts["transports"][num_ranks] = transport
            watch = OthersWatch(ranks.pids)
            cells = self._cells_of(num_ranks, num_ranks)
            self._measure(cells, num_arms, ranks.stream(measure, options, checkpoint.location, folders))
            return watch.share()

    def _run_shared(self, num_ranks: int, arm: Arm, checkpoint: Checkpoint) -> float:
        """An arm of replicas that share layers; returns the same."""
        options = self._options
        with open_replicas(tp=num_ranks, dp=options.dp, timeout_s=options.timeout_s) as (ranks, replicas):
            watch = OthersWatch(ranks.pids)
            cells = self._cells_of(num_ranks, num_ranks * options.dp)
            self._measure(cells, 1, ranks.stream(measure_shared, replicas, options, checkpoint.location, arm))
            return watch.share()

    def fail(self, reason: str, status: int = 1) -> int:
        """Keep what was measured, if anything was, and say why there is no more."""
        say("stream", reason)
        self._finish(reason)
        return status

    def _cells_of(self, tp: int, world_size: int) -> Cells:
        """Those of as many ranks so far, or new ones."""
        for cells in self._cells:
            if (cells.tp, cells.world_size) == (tp, world_size):
                return cells
        self._cells.append(Cells(tp=tp, world_size=world_size, cores=num_cores()))
        return self._cells[-1]

    def _measure(self, cells: Cells, num_arms: int, events: Iterator[tuple[int, Probed | Answered | Timed]]) -> None:
        """What the ranks tell of ``num_arms`` arms."""
        most = ROUNDS * (2 + 2 * len(self._options.loads)) * cells.world_size
        blocks: Counter[Arm] = Counter()
        with self._progress:
            task = self._progress.add_task(f"tp {cells.tp}", total=num_arms * most)
            for rank, event in events:
                cells.add(rank, event)
                if isinstance(event, Answered):
                    self._progress.update(task, description=f"tp {cells.tp}: {event.arm.name}")
                elif isinstance(event, Timed):
                    blocks[event.arm] += 1
                    self._progress.update(task, completed=blocks.total())
                    if blocks[event.arm] == most - (0 if event.arm.has_raw else ROUNDS * cells.world_size):
                        with paused(self._progress):
                            report.show_arm(self._console, cells.rows(event.arm))
                        if self._files is not None:
                            self._files.write_json(self._result())

    def _finish(self, error: str | None) -> str | None:
        """What is wrong with the run at last."""
        return finish("stream", error, self._line, self._files if self._rows() else None, self._keep)

    def _line(self, error: str | None) -> dict[str, Any]:
        return report.without_samples(self._result(error))

    def _keep(self, files: ResultFiles, error: str | None) -> None:
        report.keep(files, self._result(error))

    def _rows(self) -> list[dict[str, Any]]:
        return [row for cells in self._cells for row in cells.rows()]

    def _result(self, error: str | None = "not finished") -> dict[str, Any]:
        return {
            "schema": report.SCHEMA,
            "label": self._options.label,
            **self._facts,
            "cells": self._rows(),
            "error": error,
        }


def _facts(options: StreamBenchOptions, checkpoint: Checkpoint) -> dict[str, Any]:
    """What is measured.

    Raises:
        ValueError, ModelError: it cannot be.
    """
    config = checkpoint.config
    formats = choose_formats(checkpoint.reader(), config, options.quantization)
    for num_ranks in options.tp:
        check_split(make_layout(config, num_ranks), config, formats)
    whole, dtype = make_layout(config, 1).shards[0], getattr(torch, options.dtype)
    for codec in options.codecs:
        check_codec(codec, pack_model(config, whole, formats, dtype, weight_codec(codec)).stored, formats)
    if checkpoint.path is None and (in_files := [name for name in options.sources if SOURCES[name].in_files]):
        raise ValueError(f"random weights are in no file to stream from; leave {', '.join(in_files)} out of --sources")
    if not LEAST_STREAMED <= (options.stream_layers or config.num_layers) <= config.num_layers:
        raise ValueError(
            f"--stream-layers must be {LEAST_STREAMED} to {config.num_layers}, all layers of this model, got "
            f"{options.stream_layers or config.num_layers}"
        )
    for flag, num_tokens in (
        ("--context", options.context),
        ("--prompt-rows", options.prompt_rows or 0),
        ("the prompt that forecasts are made from", PROBE.rows),
    ):
        if num_tokens > config.max_positions:
            raise ValueError(f"{flag}: {num_tokens} tokens, and the model was trained for {config.max_positions}")
    return {
        "environment": describe_environment(),
        "model": options.model,
        "weights": formats.describe(options.dtype),
        "num_layers": config.num_layers,
        "stream_layers": options.stream_layers or config.num_layers,
        "device": options.device,
        "threads": options.threads,
        "dp": options.dp if any(arm.is_shared for arm in options.arms) else 1,
        "all_reduce": options.all_reduce,
        "context": options.context,
        "seed": options.seed,
        "left_out": list(options.left_out),
        "transports": {},
    }
