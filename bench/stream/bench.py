"""``tightwire bench stream``: compares steps with streamed weights with the time of fetching and of computing.

The run fails if an arm without a codec generates other tokens than resident weights, or if a buffer is used out of order.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tightwire.bench.ranks import RankOptions, open_ranks, open_replicas
from tightwire.bench.report.page import Item
from tightwire.bench.report.table import Metric
from tightwire.bench.run import Bench, BenchFailedError
from tightwire.bench.stream import report
from tightwire.bench.stream.measure import Answered, Event, measure, measure_shared
from tightwire.bench.stream.options import ROUNDS, Arm, StreamBenchOptions
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

_SHOWN = ("model", "device", "threads", "all_reduce", "context", "seed")


class StreamBench(Bench[StreamBenchOptions]):
    """Exit codes: 0, 1 for a wrong answer or a failed rank, 2 for bad options, 130 after Ctrl-C."""

    verb = "stream"
    options_type = StreamBenchOptions
    description = (
        "Time steps with streamed weights beside fetching alone and computing alone, in turns in the same processes; check that "
        "the answers are those of resident weights."
    )
    metrics = (Metric(name="step", unit="ms", scale=1e3),)
    columns = report.CSV_COLUMNS
    failures = ((LocalRankError, 1), (PrepareError, 1), (ValueError, 2))

    def __init__(self, options: StreamBenchOptions) -> None:
        super().__init__(options)
        self._own = [arm for arm in options.arms if not arm.is_shared]
        self._shared = [arm for arm in options.arms if arm.is_shared]
        self._groups: list[report.Cells] = []

    def cells(self) -> list[dict[str, Any]]:
        return [row for cells in self._groups for row in cells.rows()]

    def sections(self, result: Mapping[str, Any]) -> list[Item]:
        return report.make_sections(result["cells"])

    def title(self, result: Mapping[str, Any]) -> tuple[str, str]:
        return "Streamed weights", report.describe_setting(self.facts)

    def measure(self) -> None:
        options = self.options
        checkpoint = open_checkpoint(options.model, options.seed)
        self.facts = self._describe(checkpoint)
        self.print(report.describe_setting(self.facts), "")
        most, cores = max(options.tp) * self.facts["dp"], num_cores()
        if options.device == "cpu" and most > cores:
            self.note(f"up to {most} ranks share {cores} cores; a pass lasts until its slowest rank is done\n")
        try:
            with self.watch_others():
                for tp in options.tp:
                    self._measure_own(tp, checkpoint)
                    self._measure_shared(tp, checkpoint)
        except ValueError as error:
            raise BenchFailedError(str(error)) from error
        self.print(report.verdict(self.cells()), "")

    def _measure_own(self, tp: int, checkpoint: Checkpoint) -> None:
        """Measure the arms that need no other replicas."""
        options = self.options
        if not self._own:
            return
        chosen = RankOptions(ranks=tp, device=options.device, timeout_s=options.timeout_s)
        with self._prepared_folders(checkpoint, tp) as folders, open_ranks(chosen) as (ranks, joined):
            self.facts["transports"][tp] = joined["transport"]
            events = ranks.stream(measure, options, checkpoint.location, folders)
            self._collect(self._new_cells(tp, 1), self._own, events)

    def _measure_shared(self, tp: int, checkpoint: Checkpoint) -> None:
        """Measure the arms of replicas that share layers, each with new replicas."""
        options = self.options
        if not self._shared:
            return
        cells = self._new_cells(tp, options.dp)
        for arm in self._shared:
            with open_replicas(tp=tp, dp=options.dp, timeout_s=options.timeout_s) as (ranks, replicas):
                events = ranks.stream(measure_shared, replicas, options, checkpoint.location, arm)
                self._collect(cells, [arm], events)

    @contextmanager
    def _prepared_folders(self, checkpoint: Checkpoint, tp: int) -> Iterator[Mapping[str, str]]:
        """Temporary prepared folders by codec. They are beside the results, so --output chooses the disk."""
        options = self.options
        with tempfile.TemporaryDirectory(prefix="stream-", dir=options.output) as place:
            folders: dict[str, str] = {}
            for codec in dict.fromkeys(arm.codec for arm in self._own if arm.is_prepared):
                self.print(f"tp {tp}: preparing {options.model}, layers in {codec}")
                chosen = PrepareOptions(
                    tp=tp, dtype=options.dtype, quantization=options.quantization, codec=WEIGHT_CODECS[codec]
                )
                prepare(checkpoint, Path(place) / codec, chosen)
                folders[codec] = str(Path(place) / codec)
            yield folders

    def _new_cells(self, tp: int, dp: int) -> report.Cells:
        self._groups.append(report.Cells(tp=tp, dp=dp))
        return self._groups[-1]

    def _collect(self, cells: report.Cells, arms: Sequence[Arm], events: Iterator[tuple[int, Event]]) -> None:
        """Add the events of ``arms`` to ``cells``, and show each arm when it has all its blocks."""
        each = ROUNDS * (1 + 2 * len(self.options.batches))
        blocks: Counter[Arm] = Counter()
        with self.progress:
            task = self.progress.add_task(f"tp {cells.tp}", total=len(arms) * each)
            for _, event in events:
                cells.add(event)
                if isinstance(event, Answered):
                    self.progress.update(task, description=f"tp {cells.tp}: {event.arm.name}")
                    continue
                blocks[event.arm] += 1
                self.progress.update(task, completed=blocks.total())
                if blocks[event.arm] == each:
                    self.print_table(report.arm_table(cells.rows(event.arm)))
                    self.keep()

    def _describe(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """The settings of the run."""
        options, config = self.options, checkpoint.config
        formats = choose_formats(checkpoint.reader(), config, options.quantization)
        for tp in options.tp:
            check_split(make_layout(config, tp), config, formats)
        whole, dtype = make_layout(config, 1).shards[0], getattr(torch, options.dtype)
        for codec in options.codecs:
            check_codec(codec, pack_model(config, whole, formats, dtype, weight_codec(codec)).stored, formats)
        if checkpoint.path is None and "files" in options.sources:
            raise ValueError("random weights are not in a file; remove files from --sources")
        num_streamed = options.stream_layers or config.num_layers
        if not LEAST_STREAMED <= num_streamed <= config.num_layers:
            raise ValueError(
                f"--stream-layers must be {LEAST_STREAMED} to {config.num_layers}, the model's layers, got {num_streamed}"
            )
        if options.context > config.max_positions:
            raise ValueError(f"--context {options.context} exceeds the model's {config.max_positions} positions")
        return {
            **{name: getattr(options, name) for name in _SHOWN},
            "weights": formats.describe(options.dtype),
            "num_layers": config.num_layers,
            "stream_layers": num_streamed,
            "dp": options.dp if self._shared else 1,
            "transports": {},
        }
