"""The check of a machine with a GPU goes on after a failure, keeps what it has found, and carries what is missing."""

import importlib.metadata
import json
import sys
from pathlib import Path

import gpu_check
import pytest
from gpu_check import Machine, Stage, check, install_wheels
from packaging.requirements import Requirement

HELLO = sys.executable, "-c", "print('noise'); print('{\"speed\": 3}')"


def _fails(machine: Machine) -> str:
    return machine.run((sys.executable, "-c", "print('half a result'); raise SystemExit('no memory')"))


def _hangs(machine: Machine) -> str:
    return machine.run((sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"), 1.0)


def test_stages_after_a_failure_run_and_results_are_written_as_it_goes(tmp_path: Path) -> None:
    known: list[list[str]] = []

    def last(machine: Machine) -> object:
        known.append(list(json.loads((tmp_path / "results.json").read_text())["stages"]))
        return machine.figures(*HELLO)

    stages = (
        Stage("fails", _fails),
        Stage("hangs", _hangs),
        Stage("absent", last, "no_such_package"),
        Stage("last", last),
    )
    results = check(Machine(tmp_path, "a model", 30.0), stages)
    assert json.loads((tmp_path / "results.json").read_text()) == results and not results["ok"]
    assert known == [["fails", "hangs", "absent"]]
    errors = {name: each.get("error", "") for name, each in results["stages"].items()}
    assert "ended with 1; half a result" in errors["fails"] and "longer than 1 s" in errors["hangs"]
    assert results["stages"]["absent"]["left_out"] == "no_such_package is not installed"
    assert results["stages"]["last"]["figures"] == {"speed": 3}
    log = (tmp_path / "log.txt").read_text()
    assert "no memory" in log and "begun" in log


def test_wheels_are_installed_for_packages_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(gpu_check, "WHEELS", tmp_path)
    monkeypatch.setattr(gpu_check.subprocess, "run", lambda command, check: commands.append(command))
    for name in ("torch-1.0-cp312-cp312-any.whl", "no_such_package-1.0-py3-none-any.whl"):
        (tmp_path / name).touch()
    assert install_wheels() == ["no_such_package-1.0-py3-none-any.whl"]
    assert "--no-index" in commands[0] and commands[0][-1].endswith("no_such_package-1.0-py3-none-any.whl")


def test_an_unknown_stage_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_check.main(["--stages", "serve,fly"])
    assert "there is no stage fly; stages are facts, build" in capsys.readouterr().err


def test_wheels_have_the_pinned_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pydantic, for one, takes a single version of pydantic-core."""
    commands: list[list[str]] = []
    monkeypatch.setattr(gpu_check, "WHEELS", tmp_path)
    monkeypatch.setattr(gpu_check.subprocess, "run", lambda command, check: commands.append(command))
    gpu_check.fetch_wheels()
    pinned = Path(gpu_check.ROOT, "constraints.txt").read_text().splitlines()
    assert set(commands[0][-len(gpu_check.PACKAGES) :]) <= set(pinned)


def test_stages_have_names_of_their_own_and_fit_one_command() -> None:
    names = [stage.name for stage in gpu_check.STAGES]
    assert len(set(names)) == len(names) and gpu_check.LIMIT_S < 600


def test_what_carried_packages_need_is_carried_or_comes_with_torch() -> None:
    """FastAPI, for one, needs opentelemetry-api."""
    there = {
        "anyio",
        "typing-extensions",
        "annotated-doc",
        "click",
        "h11",
        "numpy",
        "pyyaml",
        "tqdm",
        "requests",
        "pytest",
    }
    for name in gpu_check.PACKAGES:
        for each in map(Requirement, importlib.metadata.requires(name) or []):
            if each.marker is None or each.marker.evaluate({"extra": "", "python_version": "3.12"}):
                assert each.name.lower().replace("_", "-") in {*gpu_check.PACKAGES, *there}, f"{name} needs {each}"
