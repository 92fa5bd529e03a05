"""``tightwire bench stream``: compares steps with streamed weights with the time of fetching and of computing."""

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tightwire.bench.options import RankOptions
from tightwire.bench.ranks import open_ranks
from tightwire.bench.report.page import Item, Text
from tightwire.bench.report.table import Metric, Table
from tightwire.bench.run import Bench, BenchFailedError
from tightwire.bench.stream import report
from tightwire.bench.stream.measure import Answered, measure
from tightwire.bench.stream.options import ROUNDS, Arm, StreamOptions
from tightwire.comm.group.host import num_cores
from tightwire.comm.group.local_ranks import LocalRankError
from tightwire.model.checkpoint.errors import PrepareError
from tightwire.model.layout import make_layout
from tightwire.model.open import Checkpoint, open_checkpoint
from tightwire.model.prepare import PrepareOptions, prepare
from tightwire.model.weights import LEAST_STREAMED, WEIGHT_CODECS
from tightwire.model.weights.formats import choose_formats, split_model
from tightwire.model.weights.packed_layer import pack_model, weight_codec
from tightwire.model.weights.residency import check_codec

_SHOWN = ("model", "device", "threads", "allreduce", "context", "seed")


class StreamBench(Bench[StreamOptions]):
    verb = "stream"
    metrics = (Metric(name="step", unit="ms", scale=1e3),)
    columns = report.CSV_COLUMNS
    failures = ((LocalRankError, 1), (PrepareError, 1), (ValueError, 2))

    def __init__(self, options: StreamOptions) -> None:
        super().__init__(options)
        self._groups: list[report.Cells] = []

    def cells(self) -> list[dict[str, Any]]:
        return [row for cells in self._groups for row in cells.rows()]

    def sections(self, result: Mapping[str, Any]) -> list[Item]:
        rows, columns = result["cells"], [*report.ARM_COLUMNS, *report.CELL_COLUMNS]
        table = Table(title="All cells", columns=columns, rows=rows, note=report.LEGEND)
        return [Text(title="Findings", lines=[report.verdict(rows)]), table]

    def title(self, result: Mapping[str, Any]) -> tuple[str, str]:
        return "Streamed weights", report.describe_setting(self.facts)

    def measure(self) -> None:
        options = self.options
        checkpoint = open_checkpoint(options.model, options.seed)
        self.facts = self._describe(checkpoint)
        self.print(report.describe_setting(self.facts), "")
        most, cores = max(options.tp), num_cores()
        if options.device == "cpu" and most > cores:
            self.note(f"up to {most} ranks share {cores} cores; a pass lasts until its slowest rank is done\n")
        try:
            with self.watch_others():
                for tp in options.tp:
                    self._measure_with(tp, checkpoint)
        except ValueError as error:
            raise BenchFailedError(str(error)) from error
        self.print(report.verdict(self.cells()), "")

    def _measure_with(self, tp: int, checkpoint: Checkpoint) -> None:
        """Measure all arms with ``tp`` ranks, and show each when it has all its turns."""
        options, cells = self.options, report.Cells(tp=tp)
        self._groups.append(cells)
        each = ROUNDS * (1 + 2 * len(options.batches))
        chosen = RankOptions(ranks=tp, device=options.device, timeout_s=options.timeout_s)
        with open_ranks(chosen) as (ranks, joined), self._prepared_folders(checkpoint, tp) as folders, self.progress:
            self.facts["transports"][tp] = joined["transport"]
            turns: Counter[Arm] = Counter()
            task = self.progress.add_task(f"tp {tp}", total=len(options.arms) * each)
            for _, event in ranks.stream(measure, options, checkpoint.location, folders):
                cells.add(event)
                if isinstance(event, Answered):
                    self.progress.update(task, description=f"tp {tp}: {event.arm.name}")
                    continue
                turns[event.arm] += 1
                self.progress.update(task, completed=turns.total())
                if turns[event.arm] == each:
                    rows = cells.rows(event.arm)
                    title = f"{rows[0]['arm']}, tp {tp}"
                    self.print_table(Table(columns=report.CELL_COLUMNS, rows=rows, title=title))
                    self.keep()

    @contextmanager
    def _prepared_folders(self, checkpoint: Checkpoint, tp: int) -> Iterator[Mapping[str, str]]:
        """Temporary prepared folders by codec. They are next to the results, so --output chooses the disk."""
        options = self.options
        with tempfile.TemporaryDirectory(prefix="stream-", dir=options.output) as place:
            folders: dict[str, str] = {}
            for codec in dict.fromkeys(arm.codec for arm in options.arms if arm.is_prepared):
                self.print(f"tp {tp}: preparing {options.model}, layers in {codec}")
                chosen = PrepareOptions(
                    tp=tp, dtype=options.dtype, quantization=options.quantization, codec=WEIGHT_CODECS[codec]
                )
                prepare(checkpoint, Path(place) / codec, chosen)
                folders[codec] = str(Path(place) / codec)
            yield folders

    def _describe(self, checkpoint: Checkpoint) -> dict[str, Any]:
        options, config = self.options, checkpoint.config
        formats = choose_formats(checkpoint.reader(), config, options.quantization)
        for tp in options.tp:
            split_model(config, formats, tp)
        whole, dtype = make_layout(config, 1).shards[0], getattr(torch, options.dtype)
        for codec in options.codecs:
            check_codec(codec, pack_model(config, whole, formats, dtype, weight_codec(codec)).stored, formats)
        if checkpoint.path is None and "files" in options.sources:
            raise ValueError("random weights are not in a file; remove files from --sources")
        num_streamed = options.stream_layers or config.num_layers
        if not LEAST_STREAMED <= num_streamed <= config.num_layers:
            raise ValueError(
                f"--stream-layers must be {LEAST_STREAMED} to {config.num_layers} layers, got {num_streamed}"
            )
        if options.context > config.max_positions:
            raise ValueError(f"--context {options.context} exceeds the model's {config.max_positions} positions")
        return {
            **{name: getattr(options, name) for name in _SHOWN},
            "weights": formats.describe(options.dtype),
            "num_layers": config.num_layers,
            "stream_layers": num_streamed,
            "transports": {},
        }
