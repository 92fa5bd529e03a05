"""`tightwire generate` from outside: refusals, the text of two ranks, Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.server.command import SOURCE, tightwire
from helpers.server.local_engine import greedy_text
from tiny import make_tiny

from tightwire.server.cli.generate import generate


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hi", "--max-tokens", "0"], "must be at least 1"),
        (["hi", "--max-tokens", "1.5"], "must be a whole number"),
        (["hi", "--temperature", "-1"], "must be 0 to 2"),
        (["hi", "--temperature", "nan"], "must be 0 to 2"),
        (["hi", "--temperature", "inf"], "must be 0 to 2, got inf"),
        (["hi", "--temperature", "3"], "must be 0 to 2, got 3"),
        (["a \udcff b"], "argument PROMPT: 'a \\udcff b' is not UTF-8"),
        ([], "PROMPT"),
        (["hi", "--port", "1"], "unknown argument '--port'"),
        (["hi", "--tp", "2", "--allreduce-extra", "ring"], "--allreduce-extra is for requests to `serve`"),
    ],
)
def test_generate_refuses_wrong_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        generate(arguments)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_generate_on_two_ranks_prints_the_text_of_one_alone_on_standard_output(model: Path) -> None:
    done = tightwire("generate", "hello", "--model", str(model), "--dtype", "float32", "--max-tokens", "6", "--tp", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{greedy_text(model, 'hello', 6)}\n" and len(done.stdout) > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hi", "--model", "no/such/model.gguf"], "no/such/model.gguf"),
        (["hi" * 300], "exceed the context of 512 tokens; shorten the prompt"),
        (["hi", "--max-tokens", "9000"], "exceed the context of 512 tokens; ask for at most 510"),
    ],
)
def test_generate_refuses_with_exit_code_2(
    model: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate([*(["--model", str(model)] if "--model" not in arguments else []), *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err and "Traceback" not in said.err and said.out == ""


def test_an_interrupted_generate_ends_with_130_and_no_traceback(tmp_path: Path) -> None:
    endless = make_tiny(tmp_path / "endless", max_position_embeddings=65_536)
    command = [sys.executable, "-m", "tightwire", "generate", "hello", "--model", str(endless), "--max-tokens", "60000"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert b"Traceback" not in process.stderr.read()


def test_chat_sends_a_message_and_the_speed_goes_to_standard_error(model: Path) -> None:
    given = ("--model", str(model), "--dtype", "float32", "--max-tokens", "6")
    done = tightwire("generate", "hello", "--chat", *given)
    assert done.returncode == 0, done.stderr
    assert done.stdout != f"{greedy_text(model, 'hello', 6)}\n", "that of the text itself"
    assert re.search(r"^6 tokens, [0-9.]+ tokens/s, first after [0-9]+ ms$", done.stderr, re.MULTILINE), done.stderr
