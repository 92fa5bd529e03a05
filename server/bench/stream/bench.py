"""``tightwire bench stream``: steps with streamed weights against the time that their bytes and their computing take.

An answer that is not the resident weights' (where nothing is encoded), or a buffer used out of turn, fails the run.
"""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tightwire.comm.local_ranks import LocalRankError, LocalRanks
from tightwire.model.checkpoint import Checkpoint, open_checkpoint
from tightwire.model.errors import ModelError
from tightwire.model.layout import make_layout
from tightwire.model.weights.formats import check_split, choose_formats
from tightwire.model.weights.residency import LEAST_STREAMED
from tightwire.server.bench.console import make_console
from tightwire.server.bench.environment import describe_environment
from tightwire.server.bench.progress import paused, progress_bar
from tightwire.server.bench.quiet import OthersWatch
from tightwire.server.bench.result_files import ResultFiles
from tightwire.server.bench.stream import report
from tightwire.server.bench.stream.cells import SOURCES, Arm
from tightwire.server.bench.stream.measure import Answered, Timed, measure
from tightwire.server.bench.stream.options import ROUNDS, StreamBenchOptions, parse_options
from tightwire.server.bench.stream.ranks import open_stream_ranks
from tightwire.server.bench.stream.summary import Cells, fault_texts
from tightwire.server.devices import num_cores


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 for a wrong answer or a rank that failed, 2 for bad options, 130 after Ctrl-C."""
    run = StreamBench(parse_options(sys.argv[1:] if argv is None else argv))
    try:
        return run.run()
    except (LocalRankError, ModelError, ValueError) as error:
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
        self._error: str | None = "not finished"
        self._console = make_console()
        self._progress = progress_bar()

    def run(self) -> int:
        options = self._options
        checkpoint = open_checkpoint(options.model, options.seed)
        self._facts = _facts(options, checkpoint)
        if options.output is not None:
            self._files = ResultFiles(options.output, options.label)
        report.show_head(self._console, self._facts)
        others: list[float] = []
        for num_ranks in options.tp:
            with open_stream_ranks(num_ranks, options.device, options.timeout_s) as (ranks, transport):
                self._facts["transports"][num_ranks] = transport
                watch = OthersWatch(ranks.pids)
                self._measure(ranks, checkpoint)
                others.append(watch.share())
        self._facts["others_share"] = max(others)
        report.show_doubts(self._console, self._facts)
        faults = fault_texts(self._rows())
        for fault in faults:
            sys.stderr.write(f"tightwire bench stream: {fault}\n")
        self._finish("; ".join(faults) or None)
        return 1 if self._error else 0

    def fail(self, reason: str) -> int:
        """Keep what was measured, if anything was, and say why there is no more."""
        sys.stderr.write(f"tightwire bench stream: {reason}\n")
        self._finish(reason)
        return 1

    def _measure(self, ranks: LocalRanks, checkpoint: Checkpoint) -> None:
        options = self._options
        cells = Cells(world_size=ranks.world_size, cores=num_cores())
        self._cells.append(cells)
        per_arm = ROUNDS * (1 + 2 * len(options.loads)) * ranks.world_size
        blocks: Counter[Arm] = Counter()
        with self._progress:
            task = self._progress.add_task(f"tp {ranks.world_size}", total=len(options.arms) * per_arm)
            for rank, event in ranks.stream(measure, options, checkpoint.location):
                cells.add(rank, event)
                if isinstance(event, Answered):
                    self._progress.update(task, description=f"tp {ranks.world_size}: {event.arm.name}")
                elif isinstance(event, Timed):
                    blocks[event.arm] += 1
                    self._progress.update(task, completed=blocks.total())
                    if blocks[event.arm] == per_arm:
                        with paused(self._progress):
                            report.show_arm(self._console, cells.rows(event.arm))
                        if self._files is not None:
                            self._files.write_json(self._result())

    def _finish(self, error: str | None) -> None:
        """Keep what there is and print it on one line, without raw samples; ``error`` says why it cannot be trusted or is
        not complete."""
        self._error = error
        if self._files is not None and self._rows():
            try:
                report.keep(self._files, self._result())
            except ValueError as unwritable:
                sys.stderr.write(f"tightwire bench stream: {unwritable}\n")
                self._error = "; ".join(filter(None, [error, str(unwritable)]))
        files = self._files.paths if self._files is not None else []
        sys.stdout.write(json.dumps({**report.without_samples(self._result()), "files": files}) + "\n")
        sys.stdout.flush()

    def _rows(self) -> list[dict[str, Any]]:
        return [row for cells in self._cells for row in cells.rows()]

    def _result(self) -> dict[str, Any]:
        return {
            "schema": report.SCHEMA,
            "label": self._options.label,
            **self._facts,
            "cells": self._rows(),
            "error": self._error,
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
    if checkpoint.path is None and (in_files := [name for name in options.sources if SOURCES[name].in_files]):
        raise ValueError(f"random weights are in no file to stream from; leave {', '.join(in_files)} out of --sources")
    if not LEAST_STREAMED <= (options.stream_layers or config.num_layers) <= config.num_layers:
        raise ValueError(
            f"--stream-layers must be {LEAST_STREAMED} to {config.num_layers}, all layers of this model, got "
            f"{options.stream_layers or config.num_layers}"
        )
    return {
        "environment": describe_environment(),
        "model": options.model,
        "weights": formats.describe(options.dtype),
        "num_layers": config.num_layers,
        "stream_layers": options.stream_layers or config.num_layers,
        "device": options.device,
        "threads": options.threads,
        "all_reduce": options.all_reduce,
        "context": options.context,
        "seed": options.seed,
        "left_out": list(options.left_out),
        "transports": {},
    }
