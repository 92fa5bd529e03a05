import subprocess
import sys

import pytest

from tightwire.__main__ import VERBS as TIGHTWIRE_VERBS
from tightwire.bench.cli import VERBS, main


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_its_options(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])

    assert caught.value.code == 0
    assert f"tightwire bench {verb}" in capsys.readouterr().out


def test_an_unknown_bench_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swim"]) == 2
    assert "unknown bench 'swim'; choose one of answers, comm, compare, kernels" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "serve" in capsys.readouterr().out


def test_help_and_wrong_options_import_no_torch() -> None:
    """Otherwise each takes seconds."""
    asked = [[verb, "--help"] for verb in TIGHTWIRE_VERBS if verb != "bench"] + [
        ["bench", verb, "--help"] for verb in VERBS
    ]
    asked += [["bench", "comm", "--algorithms", "rign"], ["bench", "ttft", "--tp", "1"], ["tune", "--seconds", "0"]]
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
