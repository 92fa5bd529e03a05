"""Runs ``tightwire bench train``: compares engine steps between emulated nodes with torch, byte formulas and a prediction.

The run fails if losses differ from those of an exact sum, or bytes differ from the formula.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from tightwire.bench.report.console import make_console
from tightwire.bench.report.environment import describe_environment
from tightwire.bench.report.progress import paused, progress_bar
from tightwire.bench.report.quiet import OthersWatch
from tightwire.bench.report.result_files import ResultFiles
from tightwire.bench.train import report
from tightwire.bench.train.arms import ARMS
from tightwire.bench.train.checks import Checks
from tightwire.bench.train.formulas import formulas_of
from tightwire.bench.train.measure import check_arm, measure_link
from tightwire.bench.train.models import open_model
from tightwire.bench.train.on_paper import extrapolate
from tightwire.bench.train.options import TrainBenchOptions, parse_options
from tightwire.bench.train.ranks import open_bench_ranks
from tightwire.bench.train.summary import LinkCells, fault_texts
from tightwire.comm.group.local_ranks import LocalRankError
from tightwire.comm.link.wire import LinkTooFastError
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.training.engine.units import plan_units
from tightwire.training.start.model import build_model

_NAME = "tightwire bench train"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 for a wrong result or a rank that failed, 2 for bad options, 130 after Ctrl-C."""
    run = TrainBench(parse_options(sys.argv[1:] if argv is None else argv))
    try:
        return run.run()
    except (LocalRankError, ValueError) as error:
        return run.fail(str(error))
    except KeyboardInterrupt:
        run.fail("interrupted")
        return 130


class TrainBench:
    """One run: its options, and what the ranks have reported so far."""

    def __init__(self, options: TrainBenchOptions) -> None:
        self._options = options
        self._cells: list[LinkCells] = []
        self._facts: dict[str, Any] = {}
        self._files: ResultFiles | None = None
        self._error: str | None = "not finished"
        self._console = make_console()
        self._progress = progress_bar()
        self._others: list[float] = []

    def run(self) -> int:
        options = self._options
        llama = open_model(options.model, options.seed).config
        checks = Checks(formulas=formulas_of(options, llama), dtype=options.dtype)
        self._facts = _facts(options, llama)
        if options.output is not None:
            self._files = ResultFiles(options.output, options.label)
        report.show_head(self._console, self._facts)
        with self._progress:
            self._check(checks)
            for link in options.links:
                try:
                    self._measure(link, checks)
                except LinkTooFastError as error:
                    self._facts["left_out"][link] = str(error)  # reported at the end
        self._facts["others_share"] = max(self._others)
        report.show_end(self._console, self._facts, self._rows())
        if options.output is not None:
            self._facts["on_paper"] = extrapolate()
        faults = [*fault_texts(self._rows()), *self._facts["left_out"].values()]
        for fault in faults:
            sys.stderr.write(f"{_NAME}: {fault}\n")
        self._finish("; ".join(faults) or None)
        return 1 if self._error else 0

    def fail(self, reason: str) -> int:
        """Print ``reason``, keep the results so far, and return 1."""
        sys.stderr.write(f"{_NAME}: {reason}\n")
        self._finish(reason)
        return 1

    def _check(self, checks: Checks) -> None:
        """Check each arm in fresh processes, so that memory is that arm's alone."""
        options = self._options
        task = self._progress.add_task("checking", total=len(options.arms))
        for arm in options.arms:
            self._progress.update(task, description=f"checking {arm}")
            with open_bench_ranks(
                nodes=options.nodes, ranks_per_node=options.ranks_per_node, link=None, timeout_s=options.timeout_s
            ) as (ranks, plan, _):
                for rank, checked in ranks.stream(check_arm, plan, options, arm):
                    checks.add(rank, checked)
            self._progress.advance(task)

    def _measure(self, link: str, checks: Checks) -> None:
        options = self._options
        steps = sum(1 if ARMS[arm].peer else 2 for arm in options.arms) * options.repeats * options.steps
        task = self._progress.add_task(link, total=steps * options.world_size)
        with open_bench_ranks(
            nodes=options.nodes, ranks_per_node=options.ranks_per_node, link=link, timeout_s=options.timeout_s
        ) as (ranks, plan, about):
            assert about is not None
            cells = LinkCells(
                link=link,
                bytes_per_s=about["bytes_per_s"],
                num_nodes=options.nodes,
                world_size=options.world_size,
                checks=checks,
            )
            self._cells.append(cells)
            watch = OthersWatch(ranks.pids)
            for rank, event in ranks.stream(measure_link, plan, options):
                cells.add(rank, event)
                self._progress.update(task, completed=cells.num_timed)
            self._others.append(watch.share())
        facts = {**about, "name": link, "rates": cells.rates()._asdict(), "others_share": self._others[-1]}
        self._facts["links"].append(facts)
        with paused(self._progress):
            report.show_link(self._console, facts, cells.rows())
        if self._files is not None:
            self._files.write_json(self._result())

    def _finish(self, error: str | None) -> None:
        """Write the results and print them on one line without samples. ``error``: why they are wrong or incomplete."""
        self._error = error
        if self._files is not None and self._rows():
            try:
                report.keep(self._files, self._result())
            except ValueError as unwritable:
                sys.stderr.write(f"{_NAME}: {unwritable}\n")
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


def _facts(options: TrainBenchOptions, llama: LlamaConfig) -> dict[str, Any]:
    return {
        "environment": describe_environment(),
        "model": options.model,
        "num_parameters": plan_units(build_model(llama, device=torch.device("cpu")), 1).num_parameters,
        "dtype": options.dtype,
        "nodes": options.nodes,
        "ranks_per_node": options.ranks_per_node,
        "sequences": options.sequences,
        "sequence_tokens": options.sequence_tokens,
        "steps": options.steps,
        "repeats": options.repeats,
        "seed": options.seed,
        "links": [],
        "left_out": {},
    }
