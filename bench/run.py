"""Runs a bench: measures, keeps files after each round, ends with one line of JSON for scripts, returns the exit code."""

import json
import math
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, ClassVar, Generic, TypeVar

from tightwire.bench.options import OutputOptions
from tightwire.bench.report.console import make_console, paused, progress_bar
from tightwire.bench.report.environment import describe_environment
from tightwire.bench.report.page import Item, render
from tightwire.bench.report.plot import NO_PLOTS, Plot, has_matplotlib
from tightwire.bench.report.quiet import QUIET_SHARE, OthersWatch, describe_others
from tightwire.bench.report.result_files import ResultFiles
from tightwire.bench.report.table import Column, Metric, Table, print_table

RAW_KEYS = ("samples", "raw")  # in the JSON file, not in the line on stdout


class BenchFailedError(Exception):
    """A check of a bench failed, or a part of the measurement did: exit code 1, the samples are kept."""


_Options = TypeVar("_Options", bound=OutputOptions)


class Bench(ABC, Generic[_Options]):
    """One run of a bench; ``bench.report`` says what a subclass and its cells are.

    ``bench compare`` reads ``metrics``, ``pairing_keys`` and each cell's ``name``, ``samples``, ``batch``, ``requested``, ``failed``.
    """

    verb: ClassVar[str]
    of_lab: ClassVar[bool] = False  # a verb of `tightwire bench lab`
    version: ClassVar[int] = 2  # of the result's layout
    metrics: ClassVar[tuple[Metric, ...]] = ()
    columns: ClassVar[tuple[Column, ...]] = ()  # of the CSV file, which has a row for each cell
    # Keys of the result: where they are equal in two results, samples of the same index are compared in pairs.
    pairing_keys: ClassVar[tuple[str, ...]] = ()
    # Exit codes of expected exceptions; others are bugs and keep their traceback.
    failures: ClassVar[tuple[tuple[type[Exception], int], ...]] = ()

    def __init__(self, options: _Options) -> None:
        self.options = options
        self.measured: list[dict[str, Any]] = []
        self.console = make_console()
        self.progress = progress_bar()
        self.facts: dict[str, Any] = {}
        self.label = options.label or self.verb
        self._output = options.output
        self._files: ResultFiles | None = None
        self._environment: dict[str, Any] = {}

    @abstractmethod
    def measure(self) -> None:
        """Measure and print everything, ``keep`` each round; BenchFailedError or a ``failure``: it is wrong or not complete."""

    def cells(self) -> list[dict[str, Any]]:
        return self.measured

    def title(self, result: Mapping[str, Any]) -> tuple[str, str]:
        """The heading of the page and the line below it."""
        return f"bench {self.verb}", self.label

    def sections(self, result: Mapping[str, Any]) -> Sequence[Item]:
        """Plots, tables and texts of the HTML page; by default the table of the CSV file."""
        table = self.csv(result)
        return [] if table is None else [table]

    def csv(self, result: Mapping[str, Any]) -> Table | None:
        """The table of the CSV file, or None without one."""
        return Table(title="All cells", columns=self.columns, rows=result["cells"]) if self.columns else None

    def show_end(self, result: Mapping[str, Any]) -> None:
        """Print what belongs at the end, also of a run that failed."""
        return

    def run(self) -> int:
        """Returns the exit code: 0, that of a failure, 130 after Ctrl-C or SIGTERM."""
        error, status, failures = None, 0, ((BenchFailedError, 1), *self.failures)
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # by itself it leaves servers and temporary folders
        try:
            if self._output is not None:
                self._files = ResultFiles(self._output, self.label)
            self._environment = describe_environment()
            self.measure()
        except KeyboardInterrupt:
            error, status = "interrupted", 130
        except tuple(kind for kind, _ in failures) as failure:
            error = str(failure)
            status = next(code for kind, code in failures if isinstance(failure, kind))
        for number in before:
            signal.signal(number, signal.SIG_IGN)  # a file without its companions would look complete
        try:
            return self._end(error, status)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def keep(self) -> None:
        """Write JSON and CSV with the cells measured so far; quick enough between two rounds."""
        if self._files is not None:
            self._write(self._files, self.result("not finished"))

    def result(self, error: str | None) -> dict[str, Any]:
        """The whole result, raw samples included."""
        return {
            "schema": f"tightwire.bench.{self.verb}/{self.version}",
            "label": self.label,
            "environment": self._environment,
            "metrics": [asdict(metric) for metric in self.metrics],
            "pairing_keys": self.pairing_keys,
            **self.facts,
            "cells": self.cells(),
            "error": error,
        }

    def say(self, text: str) -> None:
        lab = "lab " if self.of_lab else ""
        sys.stderr.write(f"tightwire bench {lab}{self.verb}: {text}\n")

    def print(self, *lines: str, style: str | None = None) -> None:
        """Print lines of text, with the progress bar hidden."""
        with paused(self.progress):
            for line in lines:
                self.console.print(line, style=style, markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a warning."""
        self.print(f"note: {text}", style="yellow")

    def print_table(self, table: Table) -> None:
        with paused(self.progress):
            print_table(self.console, table)

    @contextmanager
    def watch_others(self) -> Iterator[None]:
        """Record the share of the cores that other programs use meanwhile. Processes that the bench starts inside must end inside."""
        watch = OthersWatch()
        yield
        share = self.facts["others_share"] = watch.share()
        if share > QUIET_SHARE:
            self.note(f"{describe_others(share)}; times are too long\n")

    def _end(self, error: str | None, status: int) -> int:
        """Show and write the result; the run also fails if that cannot be written. Returns the exit code."""
        result = self.result(error)
        self.show_end(result)
        if error is not None:
            self.say(error)
        if self._files is not None and result["cells"]:
            try:
                self._write(self._files, result)
                if items := self.sections(result):
                    self._files.write("html", self._render(result, items))
                    if not has_matplotlib() and any(isinstance(item, Plot) for item in items):
                        self.note(f"the page has no plots: {NO_PLOTS}")
            except ValueError as unwritable:
                if (reason := str(unwritable)) != error:
                    self.say(reason)
                    result["error"] = "; ".join(filter(None, [error, reason]))
                status = status or 1
        paths = [] if self._files is None else self._files.paths
        if self.options.json or not sys.stdout.isatty():
            sys.stdout.write(json.dumps({**plain(result, RAW_KEYS), "files": paths}) + "\n")
            sys.stdout.flush()
        elif paths:
            self.print(f"written: {', '.join(paths)}")
        return status

    def _write(self, files: ResultFiles, result: Mapping[str, Any]) -> None:
        files.write("json", json.dumps(plain(result)) + "\n")
        if (table := self.csv(result)) is not None:
            files.write("csv", table.csv())

    def _render(self, result: Mapping[str, Any], items: Sequence[Item]) -> str:
        facts = {**self._environment, **self.facts}
        if (share := facts.pop("others_share", None)) is not None:
            facts["other load"] = describe_others(share)
        alarms = [result["error"]] if result["error"] else []
        return render(self.verb, *self.title(result), items, alarms=alarms, facts=facts)


def plain(value: Any, left_out: Sequence[str] = ()) -> Any:
    """Plain data without the entries that ``left_out`` names, at any depth; None for infinity and NaN, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: plain(inner, left_out) for key, inner in value.items() if key not in left_out}
    if isinstance(value, (list, tuple)):
        return [plain(inner, left_out) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
