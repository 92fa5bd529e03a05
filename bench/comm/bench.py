"""``tightwire bench comm``: times every AllReduce between processes of this machine, and checks every result.

A wrong answer fails the run, whatever else was measured: other bits on another rank or in a later call, an error above
the algorithm's bound, bytes that are not those of its formula.
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tightwire.bench.comm import report as comm_report
from tightwire.bench.comm.measure import Checked, MeasurePlan, Timed, measure
from tightwire.bench.comm.options import CommBenchOptions, parse_options
from tightwire.bench.comm.ranks import open_ranks
from tightwire.bench.comm.summary import Cells
from tightwire.bench.ending import finish, say
from tightwire.bench.report.console import make_console
from tightwire.bench.report.environment import describe_environment
from tightwire.bench.report.progress import paused, progress_bar
from tightwire.bench.report.quiet import OthersWatch, show_others
from tightwire.bench.report.result_files import ResultFiles
from tightwire.comm.all_reduce.registry import make_all_reduce
from tightwire.comm.group.group import Group
from tightwire.comm.group.local_ranks import LocalRankError, LocalRanks
from tightwire.comm.protocols import AllReduce
from tightwire.comm.sizes import format_bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 for a wrong answer or a rank that failed, 2 for bad options, 130 after Ctrl-C."""
    run = CommBench(parse_options(sys.argv[1:] if argv is None else argv))
    try:
        return run.run()
    except (LocalRankError, ValueError) as error:
        return run.fail(str(error))
    except KeyboardInterrupt:
        run.fail("interrupted")
        return 130


class CommBench:
    """One run: its options, and what the ranks have reported so far."""

    def __init__(self, options: CommBenchOptions, make: Callable[[str, Group], AllReduce] = make_all_reduce) -> None:
        self._options = options
        self._plan = MeasurePlan(
            algorithms=options.names,
            sizes=options.sizes,
            dtype=options.dtype,
            repeats=options.repeats,
            seconds_per_size=options.seconds_per_size,
            seed=options.seed,
            make=make,
        )
        self._cells = Cells(options.ranks)
        self._facts: dict[str, Any] = {}
        self._files: ResultFiles | None = None
        self._console = make_console()
        self._progress = progress_bar()

    def run(self) -> int:
        options = self._options
        if options.output is not None:
            self._files = ResultFiles(options.output, options.label)
        self._facts = {
            "environment": describe_environment(),
            "ranks": options.ranks,
            "nodes": options.num_nodes,
            "dtype": options.dtype,
            "device": options.device,
            "seed": options.seed,
        }
        with open_ranks(options) as (ranks, facts):
            self._facts |= facts
            comm_report.show_head(self._console, self._facts)
            watch = OthersWatch(ranks.pids)
            self._measure(ranks)
            self._facts["others_share"] = watch.share()
        show_others(self._console, self._facts)
        faults = self._cells.faults()
        for fault in faults:
            say("comm", f"wrong answer: {fault}")
        return 1 if self._finish("; ".join(faults) or None) else 0

    def fail(self, reason: str) -> int:
        """Keep what was measured, if anything was, and say why there is no more."""
        say("comm", reason)
        self._finish(reason)
        return 1

    def _measure(self, ranks: LocalRanks) -> None:
        finished: Counter[int] = Counter()
        with self._progress:
            task = self._progress.add_task("", total=None)
            for rank, event in ranks.stream(measure, self._plan):
                self._cells.add(rank, event)
                size = format_bytes(event.size)
                if rank > 0:
                    pass  # ranks go together
                elif isinstance(event, Checked):
                    self._progress.update(task, description=f"{size}: {event.algorithm} checked", total=None)
                else:
                    self._progress.update(task, description=size, total=event.rounds, completed=event.done)
                if isinstance(event, Timed) and event.done == event.rounds:
                    finished[event.size] += 1
                    if finished[event.size] == ranks.world_size:
                        with paused(self._progress):
                            comm_report.show_size(self._console, event.size, self._cells.rows())
                        if self._files is not None:
                            comm_report.keep_raw(self._files, self._result(), self._cells.samples())

    def _finish(self, error: str | None) -> str | None:
        """What is wrong with the run at last."""
        return finish("comm", error, self._result, self._files if self._cells.rows() else None, self._keep)

    def _keep(self, files: ResultFiles, error: str | None) -> None:
        comm_report.keep(files, self._result(error), self._cells.samples())

    def _result(self, error: str | None = "not finished") -> dict[str, Any]:
        return {
            "schema": comm_report.SCHEMA,
            "label": self._options.label,
            **self._facts,
            "cells": self._cells.rows(),
            "error": error,
        }
