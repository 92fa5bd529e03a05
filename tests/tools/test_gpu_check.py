"""The check of a machine with a GPU goes on after a failure, keeps what it has found, and carries what is missing."""

import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gpu_check
import gpu_machine
import gpu_programs
import gpu_stages
import pytest
from gpu_check import check, install_wheels, table
from gpu_machine import PORT, CommandError, LeftOutError, Machine, Stage, last_json
from gpu_sizes import FULL, SMALL, Sizes
from gpu_stages import STAGES, asked
from helpers.kernels.interpreted import needs_triton
from helpers.parsed_commands import parse
from packaging.requirements import Requirement

from tightwire.bench.stream.bench import StreamBench
from tightwire.bench.stream.options import StreamOptions
from tightwire.model.open import open_checkpoint


def _python(program: str) -> tuple[str, ...]:
    return sys.executable, "-c", program


def _stage(name: str, program: str, limit_s: float = 60.0) -> Stage:
    return Stage(name, lambda machine: machine.figures(*_python(program)), limit_s)


def _raises(error: BaseException) -> Any:
    def run(machine: Machine | None) -> None:
        raise error

    return run


def test_what_a_command_writes_is_kept_though_it_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.wait()

    monkeypatch.setattr(subprocess, "Popen", Ended)
    with pytest.raises(CommandError, match="no memory"):
        Machine(tmp_path).run(("sh", "-c", "echo no memory >&2; exit 1"))


def test_stages_after_a_failure_run_and_results_are_written_as_it_goes(tmp_path: Path) -> None:
    known: list[list[str]] = []

    def last(machine: Machine) -> object:
        known.append(list(json.loads((tmp_path / "results.json").read_text())["stages"]))
        return machine.figures(*_python("print('{\"speed\": 3}'); print('a warning')"))

    stages = (
        _stage("fails", "print('half a result'); raise SystemExit('no memory')"),
        Stage("hangs", lambda machine: machine.run(("sh", "-c", "echo begun; sleep 60")), 1.0),
        _stage("says nothing", "print('done')"),
        _stage("measures and fails", 'print(\'{"cells": [1], "error": "too slow"}\'); raise SystemExit(1)'),
        Stage("a bug", _raises(KeyError("cells")), 60.0),
        Stage("lacks", _raises(LeftOutError("no such package", {"half": 1})), 60.0),
        Stage("last", last, 60.0),
    )
    results = check(Machine(tmp_path), stages)
    assert json.loads((tmp_path / "results.json").read_text()) == results and not results["ok"]
    assert known == [["fails", "hangs", "says nothing", "measures and fails", "a bug", "lacks"]]
    found = results["stages"]
    assert [each["status"] for each in found.values()] == ["failed"] * 5 + ["left out", "ok"]
    # Which of the two lines is first depends on PYTHONUNBUFFERED.
    assert re.match(r"ended with 1; (?=.*half a result).*no memory", found["fails"]["reason"], re.DOTALL)
    assert "longer" in found["hangs"]["reason"]
    assert found["measures and fails"]["reason"] == "too slow" and found["measures and fails"]["figures"]["cells"] == [
        1
    ]
    assert found["says nothing"]["reason"] == "ended without a JSON object; see log.txt"
    assert found["a bug"]["reason"] == "KeyError: 'cells'"
    assert found["lacks"]["reason"] == "no such package" and found["lacks"]["figures"] == {"half": 1}
    assert found["last"]["figures"] == {"speed": 3}
    log = (tmp_path / "log.txt").read_text()
    assert "no memory" in log and "begun" in log
    assert "left out: lacks" in table(results)


def test_what_does_not_fit_is_skipped_and_another_command_goes_on(tmp_path: Path) -> None:
    quick = "print('{\"speed\": 3}')"
    results = check(Machine(tmp_path), (_stage("first", quick, 20.0), _stage("second", quick, 60.0)), total_s=29.0)
    assert results["stages"]["second"]["status"] == "skipped" and not results["ok"]
    assert "skipped: second\nanother command goes on" in table(results)
    known = {"first": results["stages"]["first"]}
    assert check(Machine(tmp_path), (_stage("second", quick),), known=known, kept=tmp_path / "kept.json")["ok"]
    assert list(json.loads((tmp_path / "kept.json").read_text())["stages"]) == ["first", "second"]


def test_a_running_commands_output_is_in_the_log_and_it_ends_with_the_check(tmp_path: Path) -> None:
    """Whatever lends such a machine kills the check, and not the sessions that it started."""
    child = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(300)"
    program = f"from pathlib import Path; from gpu_machine import Machine; Machine(Path({str(tmp_path)!r})).run({_python(child)!r})"
    path = os.pathsep.join((f"{gpu_check.ROOT}/tools", f"{gpu_check.ROOT}/src"))
    checked = subprocess.Popen(_python(program), env={**os.environ, "PYTHONPATH": path})
    log, deadline = tmp_path / "log.txt", time.monotonic() + 60
    while not (log.exists() and "\npid " in log.read_text()):
        assert time.monotonic() < deadline and checked.poll() is None
        time.sleep(0.05)
    pid = int(log.read_text().rpartition("\npid ")[2].split()[0])
    checked.send_signal(signal.SIGKILL)
    checked.wait()
    while Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_bench_that_took_too_long_gives_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is interrupted as by Ctrl-C, and writes its cells then."""
    late = CommandError("took longer than its stage may", 'begun\n{"cells": [1], "error": "interrupted"}\n')
    monkeypatch.setattr(Machine, "run", lambda *_, **__: _raises(late)(None))
    found = check(Machine(tmp_path), (_stage("slow", ""),))["stages"]["slow"]
    assert found["status"] == "failed" and found["figures"]["cells"] == [1] and "longer" in found["reason"]


def test_standard_output_is_kept_apart_where_it_is_asked_for(tmp_path: Path) -> None:
    """Libraries warn on the other one, which are no part of an answer."""
    program = "import sys; print('answer'); sys.stderr.write('a warning')"
    assert Machine(tmp_path).run(_python(program), into=tmp_path / "answer") == "answer\n"
    assert "a warning" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize("passes_apart", [True, False])
def test_kernels_do_not_overlap_where_tests_pass_only_so(
    passes_apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, seen = Machine(tmp_path), list[Sequence[str]]()

    def run(self: Machine, command: Sequence[str], *, environment: Any = gpu_machine.NOTHING) -> str:
        seen.append(command)
        if passes_apart and environment == {"TIGHTWIRE_OVERLAP": "0"}:
            return "1 passed"
        raise CommandError("ended with 1", "tests/gpu/a.py::b[1] PASSED\nFAILED tests/gpu/a.py::c[2] - wrong\n")

    monkeypatch.setattr(Machine, "run", run)
    with pytest.raises(CommandError, match="OVERLAP=0" if passes_apart else "ended with 1") as failed:
        gpu_stages.decode(machine)
    assert seen[1][-1] == "tests/gpu/a.py::c[2]" and failed.value.figures["passed"] == 1
    assert machine.environment.get("TIGHTWIRE_OVERLAP") == ("0" if passes_apart else None)


def test_a_busy_port_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(gpu_machine, "PORT", str(taken.getsockname()[1]))
        with pytest.raises(RuntimeError, match="is in use, perhaps by a server"), Machine(tmp_path).serving("a-model"):
            pass


def test_the_last_object_is_found_whatever_follows_it() -> None:
    report = json.dumps({"ok": False, "inner": {"a": [1]}}, indent=2)
    assert last_json(f"[##] begins\n{report}\n/usr/lib/x.py:3: UserWarning: late\n") == json.loads(report)
    assert last_json("no object\n[1, 2]") is None


def test_outcomes_of_tests_are_counted_with_workers_and_without() -> None:
    lines = "tests/gpu/test_a.py::test_b[x] PASSED [ 50%]", "tests/gpu/test_a.py::test_c FAILED [100%]"
    workers = "[gw3] [ 25%] PASSED tests/gpu/test_a.py::test_b[x] ", "an ERROR of no test"
    assert gpu_stages._counts("\n".join((*lines, *workers))) == {"passed": 2, "failed": 1, "error": 0, "skipped": 0}


class _Recorder(Machine):
    """Notes commands instead of running them; all of them answer with what stages look for."""

    def __init__(self, out: Path, sizes: Sizes) -> None:
        super().__init__(out, sizes)
        self.commands: list[list[str]] = []

    def run(self, command: Sequence[str], *, into: Path | None = None, environment: Any = None) -> str:
        self.commands.append(list(command))
        if folder := next((word.removeprefix("run=") for word in command if word.startswith("run=")), ""):
            Path(folder).mkdir(parents=True)
            Path(folder, "metrics.jsonl").write_text('{"tokens_per_s": 3.0}\n')
        return '{"devices": ["a", "b"], "speed": {}, "tokens_per_s": 1}\n[1.0, 0.0]\n'

    @contextmanager
    def serving(self, *options: str) -> Iterator[str]:
        self.commands.append([*gpu_machine.TIGHTWIRE, "serve", *options, "--port", PORT])
        yield "http://127.0.0.1:1"


@pytest.mark.parametrize("sizes", [FULL, SMALL], ids=["full", "small"])
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_every_command_of_a_stage_is_accepted(
    stage: Stage, sizes: Sizes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = gpu_check.ROOT
    monkeypatch.chdir(tmp_path)
    gpu_programs.models()
    monkeypatch.setattr(gpu_stages, "SITE", tmp_path / "site")
    monkeypatch.setattr(gpu_stages.shutil, "which", lambda name: name)
    machine = _Recorder(tmp_path, sizes)
    if sizes.tests.get(stage.name, "") is None:
        with pytest.raises(LeftOutError):
            stage.run(machine)
        return
    stage.run(machine)
    assert machine.commands
    for _, *words in machine.commands:
        with monkeypatch.context() as patched:
            match words:
                case ["-m", "tightwire", *argv]:
                    _accept(patched, ["device=cpu" if word == "device=cuda" else word for word in argv])
                case ["tools/gpu_programs.py", name, options]:
                    inspect.signature(gpu_programs.PROGRAMS[name]).bind(**json.loads(options))
                case ["-m", module, *_]:
                    assert importlib.util.find_spec(module)
        assert all((root / word).exists() for word in words if word.startswith(("tests/", "tools/")))


def _accept(monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> None:
    parse(monkeypatch, argv)
    if argv[:2] == ["bench", "stream"]:  # whether the codecs have something to encode
        options = StreamOptions.from_argv(argv[2:], verb="stream")
        StreamBench(options)._describe(open_checkpoint(options.model))


def test_each_command_kind_is_seen() -> None:
    """Of those stages whose commands once could not work."""
    assert {"train", "stream 70B", "transformers", "codecs", "sums over peer memory"} <= {each.name for each in STAGES}
    assert set(SMALL.tests) == {each.name for each in STAGES if each.name.startswith("tests of")}


def test_what_is_asked_is_beside_what_was_measured() -> None:
    served = [
        {"name": "a generated token, one request", "seconds": 0.005, "share": 0.7},
        {"name": "first token of 8010", "seconds": 0.2, "share": 0.6},
    ]
    codecs = [{"operation": "encode", "share_of_copy": share} for share in (0.9, 0.85)]
    stages: dict[str, Any] = {
        "decode and prefill": {"figures": {"cells": served}},
        "codecs": {"figures": {"cells": codecs}},
        "int4": {"figures": {"cells": [{"tpot_s": {"p50": 0.002}}]}},
        "stream": {"figures": {"cells": [{"bytes_per_step": 95, "step_s": 1.0}], "copy_bytes_per_s": 100.0}},
        "transformers": {"figures": None},
        "serve": {"figures": {"cells": [{"tpot_s": {"p50": 0.004}}]}},
        "eager": {"figures": {"cells": [{"tpot_s": {"p50": 0.016}}]}},
        "packed products": {"figures": {"of_bfloat16": {"Q4_0": 0.3}}},
    }
    rows = {row["figure"]: (row["measured"], row["met"]) for row in asked(stages)}
    assert rows["decode, share of the copy rate"] == (0.7, False)
    assert rows["prompt of 8k, share of the product rate"] == (0.6, True)
    assert rows["encode, least of all codecs, share of the copy rate"] == (0.85, True)
    assert rows["decode, least of all codecs, share of the copy rate"] == (None, None)
    assert rows["int4 decode, of bfloat16's time"] == (pytest.approx(0.4), True)
    assert rows["products with one row, Q4_0, of bfloat16's time"] == (0.3, True)
    assert rows["streamed step, share of pinned copies"] == (0.95, True)
    assert rows["decode, times as fast by graphs"] == (4.0, None)
    assert rows["decode, times as fast as transformers"] == (None, None)
    assert "decode, share of the copy rate" in table({"asked": asked(stages), "stages": {}})


@needs_triton
@pytest.mark.slow
def test_stages_run_on_the_emulated_device(tmp_path: Path) -> None:
    """The quickest of them; `make gpu-check ARGS="--rehearse"` runs all."""
    stages = "packages,facts,codecs,sums over NCCL,sanitizer"
    command = [sys.executable, "tools/gpu_check.py", "--rehearse", "--limit-s", "300", "--stages", stages]
    environment = {**os.environ, "OUT": str(tmp_path), "PYTHONPATH": f"{gpu_check.ROOT}/src"}
    run = subprocess.run(command, cwd=gpu_check.ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr + run.stdout
    end = json.loads(run.stdout.splitlines()[-1])
    left_out = {"sums over NCCL": "left out", "sanitizer": "left out"}
    assert end["stages"] == {**dict.fromkeys(("packages", "facts", "codecs"), "ok"), **left_out}
    assert json.loads((tmp_path / "results.json").read_text())["stages"]["codecs"]["figures"]["cells"]


def test_wheels_are_installed_for_packages_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "WHEELS", tmp_path)
    for name in ("torch-1.0-cp312-cp312-any.whl", "no_such_package-1.0-py3-none-any.whl"):
        (tmp_path / name).touch()
    machine = _Recorder(tmp_path, FULL)
    assert install_wheels(machine) == ["no_such_package-1.0-py3-none-any.whl"]
    assert "--no-index" in machine.commands[0]
    assert machine.commands[0][-1].endswith("no_such_package-1.0-py3-none-any.whl")
    monkeypatch.setattr(gpu_check, "PACKAGES", ["numpy", "one-more"])
    with pytest.raises(RuntimeError, match="missing: one-more; `make gpu-wheels`"):
        install_wheels(machine)


def test_what_was_measured_before_a_stages_time_was_over_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    late = CommandError("took longer than its stage may")
    monkeypatch.setattr(_Recorder, "figures", lambda *_, **__: _raises(late)(None))
    with pytest.raises(CommandError) as streamed:
        gpu_stages.stream(_Recorder(tmp_path, FULL))
    assert streamed.value.figures == {"copy_bytes_per_s": 1.0}
    monkeypatch.setattr(gpu_programs, "_prompt_s", lambda *_: 2.0)
    monkeypatch.setattr(gpu_programs, "time_transformers", lambda *_: _raises(KeyboardInterrupt())(None))
    with pytest.raises(KeyboardInterrupt):
        gpu_programs.transformers(**FULL.transformers)
    assert last_json(capsys.readouterr().out) == {"prompt_s": 2.0}


def test_where_nothing_is_kept_it_goes_on_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine may be lent."""
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(gpu_check, "SITE", tmp_path / "site")
    monkeypatch.setattr(gpu_check, "STAGES", (Stage("one", lambda _: 1, 60.0),))
    monkeypatch.setattr(gpu_check, "install_wheels", lambda _: [])
    assert gpu_check.main(["--go-on"]) == 0
    assert list(json.loads((tmp_path / "results.json").read_text())["stages"]) == ["packages", "one"]


def test_an_unknown_stage_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_check.main(["--stages", "serve,fly"])
    assert "there is no stage fly; stages are packages, facts" in capsys.readouterr().err


def test_wheels_have_the_pinned_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pydantic, for one, takes a single version of pydantic-core."""
    commands: list[list[str]] = []
    monkeypatch.setattr(gpu_check, "WHEELS", tmp_path)
    monkeypatch.setattr(gpu_check.subprocess, "run", lambda command, check: commands.append(command))
    gpu_check.fetch_wheels()
    pinned = Path(gpu_check.ROOT, "constraints.txt").read_text().splitlines()
    assert set(commands[0][-len(gpu_check.PACKAGES) :]) <= set(pinned)


def test_stages_have_names_of_their_own_and_fit_one_command() -> None:
    names = [stage.name for stage in STAGES]
    assert len(set(names)) == len(names) and gpu_check.TOTAL_S < 600
    assert all(stage.limit_s < gpu_check.TOTAL_S for stage in STAGES)


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
