"""Runs ``tightwire bench train``: compares engine steps between emulated nodes with torch, byte formulas and a prediction."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from tightwire.bench.options import RankOptions
from tightwire.bench.ranks import open_ranks
from tightwire.bench.report.page import Item
from tightwire.bench.report.table import Metric
from tightwire.bench.run import Bench, BenchFailedError
from tightwire.bench.train import measure, report
from tightwire.bench.train.options import ARMS, TrainOptions
from tightwire.comm.group.local_ranks import LocalRankError, LocalRanks
from tightwire.comm.link.link import Link, parse_link
from tightwire.comm.link.wire import LinkTooFastError
from tightwire.model.checkpoint.errors import ModelError
from tightwire.training.engine.flat_parameters import plan_buckets
from tightwire.training.start.model import build_model

_SHOWN = ("model", "dtype", "nodes", "ranks_per_node", "sequences", "sequence_tokens", "steps", "repeats", "seed")


class TrainBench(Bench[TrainOptions]):
    verb = "train"
    metrics = (
        Metric(name="step_s", unit="ms", scale=1e3),
        Metric(name="computing_s", unit="ms", scale=1e3, decides=False),
    )
    columns = report.CSV_COLUMNS
    failures = ((LocalRankError, 1), (ModelError, 2), (ValueError, 1))

    def __init__(self, options: TrainOptions) -> None:
        super().__init__(options)
        self._by_link: list[report.LinkCells] = []

    def measure(self) -> None:
        options = self.options
        llama = measure.open_model(options.model, options.seed).config
        by_sequences = [replace(options, sequences=(count,)) for count in options.sequences]  # ranks take the first
        models = [report.model_arms(own, llama) for own in by_sequences]  # before ranks start: an arm may not fit
        parameters = plan_buckets(build_model(llama, device=torch.device("cpu")), 1).num_parameters
        self.facts = {name: getattr(options, name) for name in _SHOWN}
        self.facts |= {"num_parameters": parameters, "links": []}
        self.print(report.describe_setting(self.facts), "")
        faults: list[str] = []
        with self.watch_others(), self.progress:
            for own, model in zip(by_sequences, models, strict=True):
                checks = report.Checks(models=model, dtype=options.dtype)
                self.check(own, checks)
                for link in options.links:
                    try:
                        self._measure_link(own, link, checks)
                    except LinkTooFastError as error:
                        faults.append(str(error))
        if faults := [*report.fault_texts(self.cells()), *faults]:
            raise BenchFailedError("; ".join(faults))

    def cells(self) -> list[dict[str, Any]]:
        return [row for cells in self._by_link for row in cells.rows()]

    def sections(self, result: Mapping[str, Any]) -> list[Item]:
        return report.make_sections(result["cells"])

    def title(self, result: Mapping[str, Any]) -> tuple[str, str]:
        described = [report.describe_setting(result), *map(report.describe_link, result["links"])]
        return "Training between nodes", "; ".join(described)

    def check(self, options: TrainOptions, checks: report.Checks) -> None:
        """Check each arm in fresh processes, so that memory is that arm's alone."""
        task = self.progress.add_task("", total=len(options.arms))
        for arm in options.arms:
            self.progress.update(task, description=f"checking {arm}")
            with self._open_ranks(None) as (ranks, folder, _):
                for _, checked in ranks.stream(measure.check_arm, folder, options, arm):
                    checks.checked[arm] = checked
            self.progress.advance(task)

    def _measure_link(self, options: TrainOptions, link: str, checks: report.Checks) -> None:
        steps = sum(1 if ARMS[arm].peer else 2 for arm in options.arms) * options.repeats * options.steps
        task = self.progress.add_task(link, total=steps)
        with self._open_ranks(parse_link(link)) as (ranks, folder, facts):
            cells = report.LinkCells(link=link, sequences=options.sequences[0], checks=checks)
            self._by_link.append(cells)
            for _, event in ranks.stream(measure.measure_link, folder, options):
                cells.add(event)
                self.progress.update(task, completed=len(cells.steps))
        assert cells.rates is not None, "the ranks measure it before the steps"
        self.facts["links"].append({**facts, "name": link, "rates": cells.rates._asdict()})
        self.print(report.describe_link(self.facts["links"][-1]))
        for table in report.make_tables(cells.rows()):
            self.print_table(table)
        self.keep()

    @contextmanager
    def _open_ranks(self, link: Link | None) -> Iterator[tuple[LocalRanks, str, dict[str, Any]]]:
        """Start ranks; yields them, the folder where they find each other, and facts about the link."""
        options = self.options
        # A rank reports nothing during a step, which may contain several slow collectives.
        chosen = RankOptions(
            ranks=options.world_size,
            nodes=options.nodes,
            transport="process-group",
            link=link,
            timeout_s=5 * options.timeout_s,
        )
        with tempfile.TemporaryDirectory() as folder, open_ranks(chosen, (measure,)) as (ranks, joined):
            facts = joined["link"] or {}
            if "why" in facts:
                raise ValueError(f"the link cannot be emulated here: {facts['why']}")
            yield ranks, folder, facts
