"""The command line from outside: quick answers, refusals with a reason, `generate` and `pull` end to end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.server.local_engine import greedy_text
from tiny import make_tiny

from tightwire import __version__
from tightwire.__main__ import VERBS, main
from tightwire.model.checkpoint.catalog import is_cached, pull
from tightwire.server.cli import verbs as cli

SOURCE = Path(__file__).parents[3] / "src"
HEAVY = ("torch", "transformers", "numpy", "fastapi", "uvicorn", "pydantic", "zmq", "rich", "yaml")


def tightwire(*arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tightwire", *arguments],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny")


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--allreduce", "foo"], "--allreduce: unknown all-reduce 'foo'"),
        (["--allreduce", "flash:int9,int4"], "unknown codec 'int9'"),
        (["--allreduce", "policy:/no/such"], "--allreduce: the policy file /no/such cannot be read"),
        (["--transport", "peer-memory", "--device", "cpu"], "--transport peer-memory connects GPUs"),
        (["--overlap", "on"], "--overlap on is not possible: a single rank sums nothing"),
        (["no-such-model"], "no such model: 'no-such-model'"),
        (["./no-such-model"], "no such model: './no-such-model'"),
        (["smollm2-135M"], "did you mean 'smollm2-135m'?"),
        (["random:foo"], "unknown shape 'foo'; choose one of llama-3.2-1b"),
        (["/tmp"], "/tmp: has no config.json"),
        (["random:llama-3-8b", "--tp", "33"], "cannot split 32 query heads over 33 ranks; use --tp 32 or less"),
        (["random:llama-3-8b", "--max-model-len", "9000"], "--max-model-len 9000 exceeds the model's context of 8192"),
    ],
)
def test_what_the_options_alone_refuse_is_refused_before_torch_is_imported(arguments: list[str], message: str) -> None:
    code = (
        "import sys; from tightwire.__main__ import main; sys.exit(main(sys.argv[1:]) + 10 * ('torch' in sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", code, "serve", "--device", "cpu", *arguments]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr


def test_help_lists_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {verb} " in text for verb in VERBS)


def test_an_unknown_verb_is_told_what_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sevre"]) == 2
    error = capsys.readouterr().err
    assert "'sevre'" in error and all(verb in error for verb in VERBS)


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_of_the_table_exists_and_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main([verb, "--help"])
    except SystemExit as exit:
        code = exit.code
    assert code == 0
    assert f"tightwire {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hi", "--max-tokens", "0"], "must be at least 1"),
        (["hi", "--max-tokens", "1.5"], "must be a whole number"),
        (["hi", "--temperature", "-1"], "must be at least 0"),
        (["hi", "--temperature", "nan"], "must be at least 0"),
        ([], "PROMPT"),
        (["hi", "--port", "1"], "unknown argument '--port'"),
        (["hi", "--tp", "2", "--allreduce-extra", "ring"], "--allreduce-extra is for requests to `serve`"),
    ],
)
def test_generate_refuses_wrong_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.generate(arguments)
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
        (["hi" * 300], "shorten it to at most 511"),
        (["hi", "--max-tokens", "9000"], "shorten the prompt or ask for at most 510"),
    ],
)
def test_generate_refuses_with_exit_code_2(model: Path, arguments: list[str], message: str) -> None:
    done = tightwire("generate", *(["--model", str(model)] if "--model" not in arguments else []), *arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr and done.stdout == ""


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


def test_pull_prints_where_the_model_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not is_cached("smollm2-135m"):
        pytest.skip("the model is not in the cache; `tightwire pull` fetches it")
    assert cli.pull([]) == 0
    assert capsys.readouterr().out.strip() == str(pull())


def test_pull_refuses_an_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.pull(["llama-9"])
    assert exit.value.code == 2
    assert "smollm2-135m" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["serve", "generate"])
def test_ctrl_c_during_imports_is_neither_lost_nor_a_traceback(verb: str, model: Path) -> None:
    arguments = ["hello"] if verb == "generate" else ["--port", "0"]
    command = [sys.executable, "-m", "tightwire", verb, *arguments, "--model", str(model)]
    for delay_s in (0.15, 0.6):
        with subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        ) as process:
            _wait_for_main(process.pid)
            time.sleep(delay_s)
            process.send_signal(signal.SIGINT)
            assert process.wait(30) in (-signal.SIGINT, 130, 0)
            assert process.stderr is not None and b"Traceback" not in process.stderr.read()


def _wait_for_main(pid: int) -> None:
    """Until a rank has been started, so that Python itself and this package's first lines are past."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    deadline_s = time.monotonic() + 60
    while not children.read_text().strip():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_ctrl_c_anywhere_in_a_verb_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "pull", interrupted)
    assert main(["pull"]) == 130
