import subprocess
import sys
from typing import get_args

import pytest

from tightwire.__main__ import VERBS as TIGHTWIRE_VERBS
from tightwire.bench.cli import LAB, VERBS, load, main


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_its_options(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])

    assert caught.value.code == 0
    assert f"tightwire bench {verb}" in capsys.readouterr().out


@pytest.mark.parametrize("verb", [*VERBS, *LAB])
def test_the_tables_name_the_options_and_the_bench_of_each_verb(verb: str) -> None:
    options, bench, _ = (VERBS | LAB)[verb]

    assert load(bench).verb == verb
    assert get_args(load(bench).__orig_bases__[0]) == (load(options),)


@pytest.mark.parametrize("verb", ["comm", "stream", "train", "serve", "lab peers", "lab roofline"])
def test_a_deadline_that_no_clock_has_is_refused(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    flag = "--start-timeout" if "lab" in verb else "--timeout"
    with pytest.raises(SystemExit) as caught:
        load((VERBS | LAB)[verb.removeprefix("lab ")][0]).from_argv([flag, "1e30"], verb=verb)

    assert caught.value.code == 2
    assert f"argument {flag}: must be at most 1e+06, got 1e+30" in capsys.readouterr().err


def test_an_unknown_bench_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swim"]) == 2
    assert "unknown bench 'swim'; known are comm, compare, kernels" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "serve" in capsys.readouterr().out
    assert main(["lab", "--help"]) == 0
    assert "  structured  check" in capsys.readouterr().out  # the longest name; its text stands apart from it


def test_help_and_wrong_options_import_no_torch() -> None:
    """Otherwise each takes seconds."""
    asked = [[verb, "--help"] for verb in TIGHTWIRE_VERBS if verb != "bench"] + [
        ["bench", verb, "--help"] for verb in VERBS
    ]
    asked += [["bench", "lab", verb, "--help"] for verb in LAB]
    asked += [["bench", "comm", "--algorithms", "rign"], ["bench", "ttft", "--tp", "1"], ["tune", "--seconds", "0"]]
    asked += [["tune", "--allreduce", "rign"], ["bench", "kernels", "--codecs", "int7"]]
    program = f"""
import contextlib, io, sys
from tightwire.__main__ import main
for argv in {asked}:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        with contextlib.suppress(SystemExit):
            main(argv)
    assert "torch" not in sys.modules, argv
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("verb", LAB)
def test_the_projects_own_experiments_are_under_lab(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["lab", verb, "--help"])
    assert caught.value.code == 0 and f"tightwire bench lab {verb}" in capsys.readouterr().out
    assert main([verb]) == 2
    assert f"`tightwire bench lab {verb}`" in capsys.readouterr().err
    assert main(["lab", "--help"]) == 0
    assert f"  {verb} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["tft"], "unknown bench 'tft'; did you mean 'ttft'?"),
        (["lab", "peer"], "unknown bench 'peer'; did you mean 'peers'?"),
    ],
)
def test_a_misspelled_bench_is_suggested(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["ttft", "--port", "1"], "unknown argument '--port'; it is a flag of `tightwire serve`"),
        (["ttft", "--tensor-parallel-size", "2"], "vLLM's --tensor-parallel-size is --tp"),
        (["comm", "--rank", "2"], "did you mean '--ranks'?"),
    ],
)
def test_an_unknown_flag_of_a_bench_names_the_one_meant(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2 and words in capsys.readouterr().err
