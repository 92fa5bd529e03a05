"""The table of verbs: what loads for a help text, refusals, and exit codes."""

import errno
import os
import signal
import subprocess
import sys

import pytest
from helpers.server.command import SOURCE, tightwire

from tightwire import __version__
from tightwire.__main__ import VERBS, main
from tightwire.server.cli import pull

HEAVY = ("torch", "transformers", "numpy", "fastapi", "uvicorn", "pydantic", "zmq", "rich", "yaml")


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], [], ["serve", "--help"], ["generate", "--help"]])
def test_help_and_version_import_nothing_heavy(arguments: list[str]) -> None:
    code = f"import sys; from tightwire.__main__ import main\ntry: main({arguments})\nexcept SystemExit: pass\n"
    code += f"print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.alone
@pytest.mark.parametrize("argument", ["--version", "--help"])
def test_help_and_version_cost_far_less_than_half_a_second_of_cpu(argument: str) -> None:
    before = os.times()
    done = tightwire(argument)
    after = os.times()
    assert done.returncode == 0
    spent_s = after.children_user - before.children_user + after.children_system - before.children_system
    assert spent_s < 0.25


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tightwire {__version__}\n"


def test_alone_it_prints_the_four_things_one_does_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = [line.split()[:2] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert lines == [["tightwire", verb] for verb in ("serve", "chat", "doctor", "bench")]


def test_help_lists_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {verb} " in text for verb in VERBS)


def test_an_unknown_verb_is_told_what_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sevre"]) == 2
    error = capsys.readouterr().err
    assert error == "tightwire: unknown verb 'sevre'; did you mean 'serve'?\n"
    assert main(["swim"]) == 2
    error = capsys.readouterr().err
    assert "'swim'" in error and all(verb in error for verb in VERBS)


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_of_the_table_exists_and_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main([verb, "--help"])
    except SystemExit as exit:
        code = exit.code
    assert code == 0
    assert f"tightwire {verb}" in capsys.readouterr().out


def test_ctrl_c_anywhere_in_a_verb_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(pull, "pull", interrupted)
    assert main(["pull"]) == 130


def _shell(command: str, buffered: bool = True) -> tuple[int, str, str]:
    """Exit code, output and errors of ``command``, in which $TIGHTWIRE is this program; the code of a pipe's first part."""
    environment = {"PYTHONPATH": str(SOURCE), "TIGHTWIRE": f"{sys.executable} -m tightwire"}
    environment["PYTHONUNBUFFERED"] = "" if buffered else "1"
    command = f'{command}; exit "${{PIPESTATUS[0]}}"'
    done = subprocess.run(
        ["bash", "-c", command], env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("buffered", [True, False])
def test_a_full_disk_is_one_line(buffered: bool) -> None:
    code, _, errors = _shell("$TIGHTWIRE --help >/dev/full", buffered)
    assert (code, errors) == (1, "tightwire: the output cannot be written: No space left on device\n")


# Rich, which prints tables, ends the program with 1 in its own way.
_TABLE = "from rich import print; import tightwire.__main__ as own; own._run = print; raise SystemExit(own.main(['a table']))"


@pytest.mark.parametrize("program", ["$TIGHTWIRE --help", f'{sys.executable} -c "{_TABLE}"'], ids=["help", "table"])
@pytest.mark.parametrize("buffered", [True, False])
def test_when_nobody_reads_the_output_the_program_ends_silently(program: str, buffered: bool) -> None:
    code, _, errors = _shell(f"(sleep 0.5; {program}) | true", buffered)
    assert (code, errors) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize(
    ("command", "code"),
    [("serve --help >&-", 0), ("swim 2>&-", 2), ("chat --url http://127.0.0.1:9 <&-", 1), ("swim <&- >&- 2>&-", 2)],
)
def test_closed_streams_are_no_fault(command: str, code: int) -> None:
    given, _, errors = _shell(f"$TIGHTWIRE {command}")
    assert given == code and "Traceback" not in errors


def test_child_processes_have_the_streams_too() -> None:
    child = "import sys; sys.stdout.flush(); sys.stderr.flush()"
    program = f"import subprocess, sys, tightwire.__main__ as own; own._open_standard_streams(); subprocess.run([sys.executable, '-c', '{child}'], check=True)"
    assert _shell(f'{sys.executable} -c "{program}" >&- 2>&-')[0] == 0


def test_other_failures_of_the_system_are_not_taken_for_those_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(argv: list[str]) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "/some/file")

    monkeypatch.setattr(pull, "pull", failing)
    with pytest.raises(OSError, match="/some/file"):
        main(["pull"])
