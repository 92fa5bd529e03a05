"""Runs ``tightwire bench train``: compares engine steps between emulated nodes with torch, byte formulas and a prediction.

The run fails if losses differ from those of an exact sum, or bytes differ from the formula.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tightwire.bench.options import parse_options
from tightwire.bench.report.page import Item
from tightwire.bench.report.table import Metric
from tightwire.bench.run import Bench, BenchFailedError
from tightwire.bench.train import page
from tightwire.bench.train.arms import ARMS, open_model
from tightwire.bench.train.cells import LinkCells, fault_texts
from tightwire.bench.train.checks import Checks, model_arms
from tightwire.bench.train.measure import check_arm, measure_link
from tightwire.bench.train.options import TrainBenchOptions
from tightwire.bench.train.ranks import open_bench_ranks
from tightwire.comm.group.local_ranks import LocalRankError
from tightwire.comm.link.link import parse_link
from tightwire.comm.link.wire import LinkTooFastError
from tightwire.training.engine.flat_parameters import plan_buckets
from tightwire.training.start.model import build_model


def main(argv: Sequence[str]) -> int:
    """Returns 0, 1 for a wrong result or a rank that failed, 2 for bad options, 130 after Ctrl-C."""
    description = (
        "Time training steps of a Llama with random weights between emulated nodes, beside torch's data parallelism: bytes, "
        "exposed communication, memory and losses, and a prediction of each time. Needs root for the links."
    )
    return TrainBench(parse_options(TrainBenchOptions, argv, verb="train", description=description)).run()


class TrainBench(Bench):
    verb = "train"
    metrics = (
        Metric(name="step_s", unit="ms", scale=1e3),
        Metric(name="computing_s", unit="ms", scale=1e3, decides=False),
    )
    columns = page.CSV_COLUMNS
    failures = ((LocalRankError, 1), (ValueError, 1))

    def __init__(self, options: TrainBenchOptions) -> None:
        super().__init__(options)
        self._options = options
        self._by_link: list[LinkCells] = []

    def measure(self) -> None:
        options = self._options
        llama = open_model(options.model, options.seed).config
        checks = Checks(models=model_arms(options, llama), dtype=options.dtype)
        self.facts = {
            "model": options.model,
            "num_parameters": plan_buckets(build_model(llama, device=torch.device("cpu")), 1).num_parameters,
            "dtype": options.dtype,
            "nodes": options.nodes,
            "ranks_per_node": options.ranks_per_node,
            "sequences": options.sequences,
            "sequence_tokens": options.sequence_tokens,
            "steps": options.steps,
            "repeats": options.repeats,
            "seed": options.seed,
            "links": [],
        }
        self.print(page.describe_setting(self.facts), "")
        faults: list[str] = []
        with self.watch_others(), self.progress:
            self._check(checks)
            for link in options.links:
                try:
                    self._measure_link(link, checks)
                except LinkTooFastError as error:
                    faults.append(str(error))
        self.print(page.describe_predictions(self.cells()))
        self.print_table(page.ratio_table(self.cells()))
        if faults := [*fault_texts(self.cells()), *faults]:
            raise BenchFailedError("; ".join(faults))

    def cells(self) -> list[dict[str, Any]]:
        return [row for cells in self._by_link for row in cells.rows()]

    def sections(self, result: Mapping[str, Any]) -> list[Item]:
        return page.make_sections(result["cells"])

    def title(self, result: Mapping[str, Any]) -> tuple[str, str]:
        return "Training between nodes", "; ".join(
            [page.describe_setting(result), *map(page.describe_link, result["links"])]
        )

    def _check(self, checks: Checks) -> None:
        """Check each arm in fresh processes, so that memory is that arm's alone."""
        options = self._options
        task = self.progress.add_task("", total=len(options.arms))
        for arm in options.arms:
            self.progress.update(task, description=f"checking {arm}")
            with open_bench_ranks(options, link=None) as (ranks, plan, _):
                for rank, checked in ranks.stream(check_arm, plan, options, arm):
                    checks.add(rank, checked)
            self.progress.advance(task)

    def _measure_link(self, link: str, checks: Checks) -> None:
        options = self._options
        steps = sum(1 if ARMS[arm].peer else 2 for arm in options.arms) * options.repeats * options.steps
        task = self.progress.add_task(link, total=steps * options.world_size)
        with open_bench_ranks(options, link=link) as (ranks, plan, about):
            assert about is not None
            cells = LinkCells(
                link=link,
                asked_bytes_per_s=parse_link(link).bytes_per_s or 0.0,
                bytes_per_s=about["bytes_per_s"],
                world_size=options.world_size,
                checks=checks,
            )
            self._by_link.append(cells)
            for rank, event in ranks.stream(measure_link, plan, options):
                cells.add(rank, event)
                self.progress.update(task, completed=cells.num_timed)
        facts = {**about, "name": link, "rates": cells.rates()._asdict()}
        self.facts["links"].append(facts)
        self.print(page.describe_link(facts))
        self.print_table(page.step_table(cells.rows()))
        self.print_table(page.check_table(cells.rows()))
        self.keep()
