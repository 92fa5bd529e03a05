"""The table of verbs: what loads for a help text, refusals, and exit codes."""

import os
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
