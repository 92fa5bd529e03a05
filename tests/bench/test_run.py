"""A run of a bench: its files, the line on stdout and the exit code for each way to end."""

import csv
import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tightwire.bench.options import OutputOptions
from tightwire.bench.report import plot
from tightwire.bench.report.page import Item
from tightwire.bench.report.plot import Plot
from tightwire.bench.report.table import Column, Metric, Table
from tightwire.bench.run import Bench, BenchFailedError


class Swim(Bench):
    verb = "swim"
    metrics = (Metric(name="seconds"),)
    columns = (Column("stroke", "name"), Column("s", "time.p50", ".1f"))
    failures = ((ConnectionError, 2), (OSError, 3))

    def __init__(self, options: OutputOptions, end: Callable[["Swim"], None] = lambda bench: None) -> None:
        super().__init__(options)
        self._measured: list[dict[str, Any]] = []
        self._run_to_end = end

    def measure(self) -> None:
        self.facts = {"pool": "deep", "raw": [1, 2], "others_share": 0.5}
        self._measured = [{"name": "crawl", "time": {"p50": 2.0}, "samples": {"seconds": [1.0, None, 3.0]}}]
        self.keep()
        self._run_to_end(self)

    def cells(self) -> list[dict[str, Any]]:
        return self._measured

    def title(self, result: Mapping[str, Any]) -> tuple[str, str]:
        return "Swimming", result["pool"]


def run(bench: Bench, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any], str]:
    status = bench.run()
    out, err = capsys.readouterr()
    return status, json.loads(out.splitlines()[-1]), err


def test_files_hold_the_samples_and_the_line_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, line, err = run(Swim(OutputOptions(output=tmp_path, label="x")), capsys)

    assert (status, err, line["error"]) == (0, "", None)
    assert line["cells"] == [{"name": "crawl", "time": {"p50": 2.0}}] and "raw" not in line
    assert (line["schema"], line["label"], line["pool"]) == ("tightwire.bench.swim/2", "x", "deep")
    kept, table, page = map(Path, line["files"])
    full = json.loads(kept.read_text())
    assert full["cells"][0]["samples"] == {"seconds": [1.0, None, 3.0]} and full["raw"] == [1, 2]
    assert full["metrics"][0]["name"] == "seconds"
    assert list(csv.reader(table.read_text().splitlines())) == [["name", "time.p50"], ["crawl", "2.0"]]
    text = page.read_text()
    assert "<h1>Swimming</h1>" in text and "<td>2.0</td>" in text and "<dt>pool</dt><dd>deep</dd>" in text
    assert "<dt>other load</dt><dd>other programs used 50% of" in text


def test_numbers_that_json_does_not_have_are_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def make_infinite(bench: Swim) -> None:
        bench.facts |= {"rates": {"inside": float("inf")}, "shares": (float("nan"), 1.0)}

    assert Swim(OutputOptions(output=tmp_path), make_infinite).run() == 0

    text = capsys.readouterr().out.splitlines()[-1]
    for result in (text, Path(json.loads(text)["files"][0]).read_text()):
        assert "Infinity" not in result and "NaN" not in result
        assert '"rates": {"inside": null}, "shares": [null, 1.0]' in result


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_files_are_written_leaves_none_without_its_companions(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)

    class Interrupted(Swim):
        def csv(self, result: Mapping[str, Any]) -> Table | None:
            if result["error"] is None:  # at the end
                signal.raise_signal(number)
            return super().csv(result)

    status, line, _ = run(Interrupted(OutputOptions(output=tmp_path)), capsys)

    assert status == 0 and json.loads(Path(line["files"][0]).read_text())["error"] is None
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".csv", ".html"}
    assert signal.getsignal(number) is before


def test_sigterm_ends_a_run_as_ctrl_c_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By itself it would leave the folders and processes that only a context manager removes."""
    removed: list[str] = []

    def terminate(bench: Swim) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            removed.append("the model's copies")

    status, line, _ = run(Swim(OutputOptions(output=tmp_path), terminate), capsys)

    assert (status, line["error"], removed) == (130, "interrupted", ["the model's copies"])


@pytest.mark.parametrize(
    ("failure", "status", "words"),
    [
        (BenchFailedError("wrong answer"), 1, "wrong answer"),
        (ConnectionResetError("gone"), 2, "gone"),
        (FileNotFoundError("no pool"), 3, "no pool"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_was_measured_is_kept_with_the_reason_of_the_end(
    failure: BaseException, status: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(bench: Swim) -> None:
        raise failure

    found, line, err = run(Swim(OutputOptions(output=tmp_path), fail), capsys)

    assert (found, line["error"], err) == (status, words, f"tightwire bench swim: {words}\n")
    kept = json.loads(Path(line["files"][0]).read_text())
    assert (kept["error"], len(kept["cells"])) == (words, 1)


def test_a_bug_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(bench: Swim) -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        Swim(OutputOptions(), fail).run()


def test_files_that_cannot_be_written_are_an_error_beside_that_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(bench: Swim) -> None:
        monkeypatch.setattr(type(bench), "_write", refuse)
        raise KeyboardInterrupt

    def refuse(*_: object) -> None:
        raise ValueError("the disk is full")

    status, line, err = run(Swim(OutputOptions(output=tmp_path), interrupt), capsys)

    assert (status, line["error"]) == (130, "interrupted; the disk is full")
    assert "tightwire bench swim: the disk is full\n" in err


def test_a_disk_that_is_full_in_a_round_and_at_the_end_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Filling(Swim):
        failures = ((ValueError, 2),)

    def refuse(*_: object) -> None:
        raise ValueError("the disk is full")

    monkeypatch.setattr(Filling, "_write", refuse)

    status, line, err = run(Filling(OutputOptions(output=tmp_path)), capsys)

    assert (status, line["error"], err) == (2, "the disk is full", "tightwire bench swim: the disk is full\n")


def test_nothing_is_written_by_a_run_that_measured_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Dry(Swim):
        def measure(self) -> None:
            raise BenchFailedError("no water")

    status, line, _ = run(Dry(OutputOptions(output=tmp_path)), capsys)

    assert (status, line["files"], list(tmp_path.iterdir())) == (1, [], [])


def test_a_terminal_gets_the_json_only_if_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    Swim(OutputOptions(output=tmp_path)).run()
    shown = "".join(capsys.readouterr().out.split())
    assert '"schema"' not in shown and f"written:{tmp_path}" in shown

    assert Swim(OutputOptions(json=True)).run() == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["schema"] == "tightwire.bench.swim/2"


def test_without_matplotlib_all_but_the_plots_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Plotted(Swim):
        def sections(self, result: Mapping[str, Any]) -> list[Item]:
            return [Plot(title="P", draw=lambda axes: None), *super().sections(result)]

    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    assert Plotted(OutputOptions(output=tmp_path)).run() == 0

    assert "note: the page has no plots: matplotlib is not installed" in capsys.readouterr().out
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".csv", ".html"}
    assert "<td>2.0</td>" in next(tmp_path.glob("*.html")).read_text()
