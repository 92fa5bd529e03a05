import csv
import json
import os
from pathlib import Path

import pytest

from tightwire.bench.report import result_files
from tightwire.bench.report.result_files import ResultFiles
from tightwire.bench.report.table import Column, Table


def test_the_folder_is_empty_until_something_was_measured(tmp_path: Path) -> None:
    files = ResultFiles(tmp_path / "new" / "folder", "a")

    assert list((tmp_path / "new" / "folder").iterdir()) == [] and files.paths == []


def test_files_are_written_whole_and_can_be_rewritten(tmp_path: Path) -> None:
    files = ResultFiles(tmp_path, "a")

    files.write("json", '{"n": 1}')
    files.write("json", '{"n": 2}')
    files.write("csv", Table(columns=[Column("X", "x"), Column("Y", "y")], rows=[{"x": 1, "y": None, "z": 3}]).csv())
    files.write("html", "<p>page</p>")

    json_path, csv_path, page = map(Path, files.paths)
    assert json.loads(json_path.read_text()) == {"n": 2}
    assert list(csv.reader(csv_path.read_text().splitlines())) == [["x", "y"], ["1", ""]]
    assert page.read_text() == "<p>page</p>" and page.suffix == ".html"
    assert len(list(tmp_path.iterdir())) == 3  # nothing is left beside


def test_runs_of_the_same_second_have_different_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Noon(result_files.datetime):
        @classmethod
        def now(cls, tz: object = None) -> "Noon":
            return cls(2026, 1, 1, 12)

    monkeypatch.setattr(result_files, "datetime", Noon)
    runs = [ResultFiles(tmp_path, "a") for _ in range(3)]
    for number, run in enumerate(runs):
        run.write("json", json.dumps({"run": number}))

    assert [Path(run.paths[0]).name for run in runs] == [f"a-20260101-120000{n}.json" for n in ("", "-2", "-3")]
    assert [json.loads(Path(run.paths[0]).read_text())["run"] for run in runs] == [0, 1, 2]


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ValueError, match=r"--output .*file cannot be written"):
        ResultFiles(tmp_path / "file", "a")


def test_a_deleted_folder_is_an_error(tmp_path: Path) -> None:
    files = ResultFiles(tmp_path / "folder", "a")
    os.rmdir(tmp_path / "folder")

    with pytest.raises(ValueError, match="the result could not be written to .*folder"):
        files.write("json", "{}")
