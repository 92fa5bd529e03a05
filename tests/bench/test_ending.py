"""How a run of a bench ends: files that cannot be written are an error of the run, beside the one it has."""

import json
from pathlib import Path
from typing import Any

import pytest

from tightwire.bench.ending import finish
from tightwire.bench.report.quiet import quiet_facts
from tightwire.bench.report.result_files import ResultFiles


def _result(error: str | None) -> dict[str, Any]:
    return {"cells": [1], "error": error}


def _write(files: ResultFiles, error: str | None) -> None:
    files.write_json(_result(error))


@pytest.mark.parametrize("error", [None, "interrupted"])
def test_what_is_kept_and_printed_has_the_runs_error(
    error: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ResultFiles(tmp_path, "run", ("json",))
    assert finish("comm", error, _result, files, _write) == error
    shown = json.loads(capsys.readouterr().out)
    assert shown == {**_result(error), "files": files.paths}
    assert json.loads(Path(files.paths[0]).read_text()) == _result(error)


def test_files_that_cannot_be_written_are_told_beside_the_runs_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(files: ResultFiles, error: str | None) -> None:
        raise ValueError("the disk is full")

    told = finish("comm", "interrupted", _result, ResultFiles(tmp_path, "run", ("json",)), refuse)
    assert told == "interrupted; the disk is full"
    out, err = capsys.readouterr()
    assert json.loads(out) == {"cells": [1], "error": told, "files": []}
    assert err == "tightwire bench comm: the disk is full\n"


def test_nothing_is_written_of_a_run_that_measured_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert finish("comm", "no ranks", _result, None, _write) == "no ranks"
    assert json.loads(capsys.readouterr().out)["files"] == []


def test_a_page_tells_how_quiet_it_was_where_that_is_known() -> None:
    assert quiet_facts({}) == []
    assert quiet_facts({"others_share": 0.25}) == [
        ("quiet", "others used 25% of this machine's cores while it was measured")
    ]
