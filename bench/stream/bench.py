"""Runs ``tightwire bench stream``: compares steps with streamed weights with the time of their bytes and of computing.

The run fails if an arm without a codec generates other tokens than resident weights, or if a buffer is used out of order.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tightwire.bench.options import parse_options
from tightwire.bench.ranks import open_replicas
from tightwire.bench.report.html import Section
from tightwire.bench.report.progress import paused
from tightwire.bench.report.quiet import OthersWatch, show_others
from tightwire.bench.report.table import Metric, Table, print_table
from tightwire.bench.run import Bench, BenchFailedError
from tightwire.bench.stream import page
from tightwire.bench.stream.arms import PROBE, SOURCES, Answered, Arm, Event, Timed
from tightwire.bench.stream.measure import measure, measure_shared
from tightwire.bench.stream.options import ROUNDS, StreamBenchOptions
from tightwire.bench.stream.rank import open_stream_ranks
from tightwire.bench.stream.summary import Cells, fault_texts
from tightwire.comm.group.local_ranks import LocalRankError
from tightwire.model.checkpoint.errors import PrepareError
from tightwire.model.layout import make_layout
from tightwire.model.open import Checkpoint, open_checkpoint
from tightwire.model.prepare import PrepareOptions, prepare
from tightwire.model.weights import WEIGHT_CODECS
from tightwire.model.weights.formats import check_split, choose_formats
from tightwire.model.weights.packed_layer import pack_model, weight_codec
from tightwire.model.weights.residency import LEAST_STREAMED, check_codec
from tightwire.server.plan.devices import num_cores


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 for a wrong answer or a failed rank, 2 for bad options, 130 after Ctrl-C."""
    options = parse_options(
        StreamBenchOptions,
        sys.argv[1:] if argv is None else argv,
        verb="stream",
        description="Time steps with streamed weights against their bytes and their computing, in turns in the same processes; "
        "check that answers are those of resident weights.",
    )
    return StreamBench(options).run()


class StreamBench(Bench):
    verb = "stream"
    metrics = (Metric(name="step", unit="ms", scale=1e3),)
    failures = ((LocalRankError, 1), (PrepareError, 1), (ValueError, 2))

    def __init__(self, options: StreamBenchOptions) -> None:
        super().__init__(options)
        self._options = options
        self._groups: list[Cells] = []  # one for each number of ranks

    def cells(self) -> list[dict[str, Any]]:
        return [row for cells in self._groups for row in cells.rows()]

    def csv(self, result: Mapping[str, Any]) -> Table:
        return page.csv_table(result["cells"])

    def sections(self, result: Mapping[str, Any]) -> list[Section]:
        return page.make_sections(result["cells"], [*self._crowds(), *self._options.left_out])

    def title(self, result: Mapping[str, Any]) -> tuple[str, str]:
        return "Streamed weights", page.describe_setting(self.facts)

    def measure(self) -> None:
        options = self._options
        checkpoint = open_checkpoint(options.model, options.seed)
        self.facts = _facts(options, checkpoint)
        for words in (page.describe_setting(self.facts), *options.left_out, ""):
            self.console.print(words, soft_wrap=True)
        try:
            self._measure_all(checkpoint)
        except ValueError as error:
            raise BenchFailedError(str(error)) from error
        for words in (page.verdict(self.cells()), *self._crowds(), ""):
            self.console.print(words, soft_wrap=True)
        show_others(self.console, self.facts)
        if faults := fault_texts(self.cells()):
            raise BenchFailedError("; ".join(faults))

    def _crowds(self) -> list[str]:
        return page.crowds(num_cores(), self._options.device, self.cells())

    def _measure_all(self, checkpoint: Checkpoint) -> None:
        options = self._options
        others: list[float] = []
        num_own = sum(not arm.is_shared for arm in options.arms)
        for num_ranks in options.tp:
            if num_own:
                others.append(self._measure_own(num_ranks, num_own, checkpoint))
            others += [self._measure_shared(num_ranks, arm, checkpoint) for arm in options.arms if arm.is_shared]
        self.facts["others_share"] = max(others)

    def _measure_own(self, num_ranks: int, num_arms: int, checkpoint: Checkpoint) -> float:
        """Measure the arms without other replicas; returns the share of the cores that other programs used."""
        options = self._options
        with (
            self._prepared_folders(checkpoint, num_ranks) as folders,
            open_stream_ranks(num_ranks, options.device, options.timeout_s) as (ranks, transport),
        ):
            self.facts["transports"][num_ranks] = transport
            watch = OthersWatch(ranks.pids)
            cells = self._group_of(num_ranks, num_ranks)
            self._collect(cells, num_arms, ranks.stream(measure, options, checkpoint.location, folders))
            return watch.share()

    def _measure_shared(self, num_ranks: int, arm: Arm, checkpoint: Checkpoint) -> float:
        """Measure an arm of replicas that share layers; returns the same."""
        options = self._options
        with open_replicas(tp=num_ranks, dp=options.dp, timeout_s=options.timeout_s) as (ranks, replicas):
            watch = OthersWatch(ranks.pids)
            cells = self._group_of(num_ranks, num_ranks * options.dp)
            self._collect(cells, 1, ranks.stream(measure_shared, replicas, options, checkpoint.location, arm))
            return watch.share()

    @contextmanager
    def _prepared_folders(self, checkpoint: Checkpoint, num_ranks: int) -> Iterator[Mapping[str, str]]:
        """Temporary prepared folders by codec. They are beside the results, so --output chooses the disk."""
        options = self._options
        if options.output is not None:
            options.output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="stream-", dir=options.output) as place:
            folders: dict[str, str] = {}
            for codec in dict.fromkeys(arm.codec for arm in options.arms if SOURCES[arm.source].is_prepared):
                self.console.print(f"tp {num_ranks}: preparing {options.model}, layers in {codec}")
                chosen = PrepareOptions(
                    tp=num_ranks, dtype=options.dtype, quantization=options.quantization, codec=WEIGHT_CODECS[codec]
                )
                prepare(checkpoint, Path(place) / codec, chosen)
                folders[codec] = str(Path(place) / codec)
            yield folders

    def _group_of(self, tp: int, world_size: int) -> Cells:
        for cells in self._groups:
            if (cells.tp, cells.world_size) == (tp, world_size):
                return cells
        self._groups.append(Cells(tp=tp, world_size=world_size, cores=num_cores()))
        return self._groups[-1]

    def _collect(self, cells: Cells, num_arms: int, events: Iterator[tuple[int, Event]]) -> None:
        """Add the events of ``num_arms`` arms, and show each arm when all its blocks are there."""
        most = ROUNDS * (2 + 2 * len(self._options.loads)) * cells.world_size
        blocks: Counter[Arm] = Counter()
        with self.progress:
            task = self.progress.add_task(f"tp {cells.tp}", total=num_arms * most)
            for rank, event in events:
                cells.add(rank, event)
                if isinstance(event, Answered):
                    self.progress.update(task, description=f"tp {cells.tp}: {event.arm.name}")
                elif isinstance(event, Timed):
                    blocks[event.arm] += 1
                    self.progress.update(task, completed=blocks.total())
                    if blocks[event.arm] == most - (0 if event.arm.has_raw else ROUNDS * cells.world_size):
                        rows = cells.rows(event.arm)
                        with paused(self.progress):
                            print_table(self.console, page.arm_table(rows))
                            self.console.print(page.forecast_line(rows[0]) + "\n", soft_wrap=True)
                        self.keep()


def _facts(options: StreamBenchOptions, checkpoint: Checkpoint) -> dict[str, Any]:
    """The settings of the run.

    Raises:
        ValueError, ModelError: the model cannot be measured with these options.
    """
    config = checkpoint.config
    formats = choose_formats(checkpoint.reader(), config, options.quantization)
    for num_ranks in options.tp:
        check_split(make_layout(config, num_ranks), config, formats)
    whole, dtype = make_layout(config, 1).shards[0], getattr(torch, options.dtype)
    for codec in options.codecs:
        check_codec(codec, pack_model(config, whole, formats, dtype, weight_codec(codec)).stored, formats)
    if checkpoint.path is None and (in_files := [name for name in options.sources if SOURCES[name].in_files]):
        raise ValueError(f"random weights are not in a file; remove {', '.join(in_files)} from --sources")
    num_streamed = options.stream_layers or config.num_layers
    if not LEAST_STREAMED <= num_streamed <= config.num_layers:
        raise ValueError(
            f"--stream-layers must be {LEAST_STREAMED} to {config.num_layers}, all layers of this model, got {num_streamed}"
        )
    for flag, num_tokens in (
        ("--context", options.context),
        ("--prompt-rows", options.prompt_rows or 0),
        ("the prompt for the forecast", PROBE.rows),
    ):
        if num_tokens > config.max_positions:
            raise ValueError(f"{flag}: {num_tokens} tokens exceed the model's {config.max_positions} positions")
    return {
        "model": options.model,
        "weights": formats.describe(options.dtype),
        "num_layers": config.num_layers,
        "stream_layers": num_streamed,
        "device": options.device,
        "threads": options.threads,
        "dp": options.dp if any(arm.is_shared for arm in options.arms) else 1,
        "all_reduce": options.all_reduce,
        "context": options.context,
        "seed": options.seed,
        "left_out": list(options.left_out),
        "transports": {},
    }
