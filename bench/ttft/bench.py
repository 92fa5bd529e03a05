"""``tightwire bench ttft``: which AllReduce, for this model, these prompts, this wire, at what accuracy.

Starts one server, in which every AllReduce to compare is at hand and each request names its own; so all share weights,
processes and the machine's state. What was measured is kept whatever comes after: a dead server, Ctrl-C.
"""

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tightwire.bench.ending import finish, say
from tightwire.bench.report.console import make_console
from tightwire.bench.report.environment import describe_environment
from tightwire.bench.report.progress import paused, progress_bar
from tightwire.bench.report.quiet import OthersWatch
from tightwire.bench.report.result_files import ResultFiles
from tightwire.bench.ttft import report
from tightwire.bench.ttft.argv import to_argv
from tightwire.bench.ttft.child import ServerChild, ServerDiedError
from tightwire.bench.ttft.facts import Facts, find_facts
from tightwire.bench.ttft.meter import RequestFailedError
from tightwire.bench.ttft.options import GROUPS, TtftOptions, parse_options
from tightwire.bench.ttft.run import Run, WrongAnswerError
from tightwire.server.cli.remote import RemoteError, connect

_START_TIMEOUT_S = 1800.0  # weights may have to be fetched, or read from a slow disk


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 for a wrong answer or a server that failed, 2 for bad options, 130 after Ctrl-C."""
    return TtftBench(parse_options(sys.argv[1:] if argv is None else argv)).run()


class TtftBench:
    """One run: its options, the server it starts, and what was measured so far."""

    def __init__(self, options: TtftOptions, start: Callable[[Sequence[str]], ServerChild] = ServerChild) -> None:
        self._options, self._start = options, start
        self._files: ResultFiles | None = None
        self._facts: dict[str, Any] = {}
        self._run: Run | None = None
        self._child: ServerChild | None = None
        self._console = make_console()
        self._progress = progress_bar()

    def run(self) -> int:
        """Returns the exit status."""
        error, status = "interrupted", 130
        try:
            if self._options.output is not None:
                self._files = ResultFiles(self._options.output, self._options.label)
            self._measure(find_facts(self._options))
            error, status = None, 0
        except KeyboardInterrupt:
            pass
        except WrongAnswerError as wrong:
            error, status = f"wrong answer: {wrong}", 1
        except (ServerDiedError, RequestFailedError, RemoteError) as failure:
            error, status = str(failure), 1
        except ValueError as refusal:  # the server's too
            error, status = str(refusal), 2
        return self._end(error, status)

    def _measure(self, facts: Facts) -> None:
        self._facts = report.facts(self._options, facts, describe_environment())
        run = self._run = Run(self._options, facts, told=self._told, expected=self._expected, kept=self._kept)
        report.show_head(self._console, self._facts, run.num_entries)
        watch = OthersWatch()
        with self._progress:
            self._task = self._progress.add_task("starting the server", total=None)
            with self._start(to_argv(facts.config, GROUPS)) as child:
                self._child = child
                remote = connect(child.wait_ready(_START_TIMEOUT_S))
                try:
                    asyncio.run(run.measure(remote))
                except (RequestFailedError, RemoteError):
                    child.check()  # a server that died says more than a connection that broke
                    raise
                finally:
                    self._facts["comm"] = run.comm
                    self._facts["server_log"] = child.log
        self._facts["others_share"] = watch.share()

    def _told(self, what: str, done: int, total: int) -> None:
        self._progress.update(self._task, description=what, completed=done, total=total)

    def _expected(self, seconds: float) -> None:
        with paused(self._progress):
            report.show_expected(self._console, seconds)

    def _kept(self) -> None:
        """After every block, so that a crash loses one at most."""
        assert self._run is not None, "it is the run that calls"
        self._facts["comm"] = self._run.comm
        if self._files is not None:
            self._keep(self._files, self._result(None), page=False)

    def _keep(self, files: ResultFiles, result: dict[str, Any], *, page: bool) -> None:
        measured = self._run.measured() if self._run is not None else None
        if self._run is None or measured is None:
            return
        full = {**result, "samples": report.samples(measured), "traced_all_reduces": self._run.traces}
        files.write_csv(report.CSV_COLUMNS, report.csv_rows(measured))
        if page:
            # Matplotlib takes half a second to import, belongs to an extra, and is of use only here.
            from tightwire.bench.ttft.page import make_page

            files.write_html(make_page(full))
        files.write_json(full)

    def _result(self, error: str | None) -> dict[str, Any]:
        measured = self._run.measured() if self._run is not None else None
        return report.result(self._facts, measured, self._options, error)

    def _end(self, error: str | None, status: int) -> int:
        """Show and keep what there is, say what went wrong, and end with one line of JSON."""
        result = self._result(error)
        if result["cells"]:
            report.show(self._console, result)
        if error is not None:
            say("ttft", error)
        line = {key: value for key, value in result.items() if key not in ("comm", "server_log")}
        error = finish(
            "ttft",
            error,
            lambda error: {**line, "error": error},
            self._files,
            lambda files, _: self._keep(files, result, page=True),
        )
        return status or (1 if error else 0)
