"""`tightwire serve` before torch is imported: refusals with a reason, and Ctrl-C at any time (of `generate` too)."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.server.command import SOURCE
from tiny import make_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--allreduce", "foo"], "--allreduce: unknown all-reduce 'foo'"),
        (["explain", "--allreduce", "foo"], "tightwire explain: --allreduce: unknown all-reduce 'foo'"),
        (["--speculation", "draft", "--draft-model", "no-such"], "--draft-model: no such model: 'no-such'"),
        (["prepare", "no-such-model", "/no/such"], "tightwire prepare: no such model: 'no-such-model'"),
        (["--draft-model="], "--draft-model: no such model: ''"),
        (["--lora", "x=/no/such"], "--lora must be a folder that exists, got '/no/such'"),
        (["--lora-dir", "/dev/null"], "--lora-dir must be a folder that exists, got '/dev/null'"),
        (["--chat-template", "/no/such"], "--chat-template /no/such: cannot be read"),
        (["--comm-secret-file", "/no/such"], "--comm-secret-file: the shared secret cannot be read from /no/such"),
        (["--host", "no.such.invalid"], "cannot listen on --host no.such.invalid --port 8000: "),
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
    verb, *arguments = arguments if arguments[0] in ("explain", "prepare") else ["serve", *arguments]
    device = ["--device", "cpu"] if verb != "prepare" else []
    command = [sys.executable, "-c", code, verb, *device, *arguments]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(("verb", "flag"), [("serve", "--port"), ("serve", "--uds"), ("generate", "")])
def test_a_signal_during_imports_is_neither_lost_nor_a_traceback(
    verb: str, flag: str, model: Path, tmp_path: Path
) -> None:
    arguments = {"--port": ["--port", "0"], "--uds": ["--uds", str(tmp_path / "socket")]}.get(flag, ["hello"])
    command = [sys.executable, "-m", "tightwire", verb, *arguments, "--model", str(model)]
    for number, delay_s in ((signal.SIGINT, 0.15), (signal.SIGINT, 0.6), (signal.SIGHUP, 0.6)):
        with subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        ) as process:
            _wait_for_main(process.pid)
            time.sleep(delay_s)
            process.send_signal(number)
            assert process.wait(30) in (-number, 128 + number, 0)
            assert process.stderr is not None and b"Traceback" not in process.stderr.read()
            assert list(tmp_path.iterdir()) == []


def _wait_for_main(pid: int) -> None:
    """Until a rank has been started, so that Python itself and this package's first lines are past."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    deadline_s = time.monotonic() + 60
    while not children.read_text().strip():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_ranks_can_start_before_torch_is_imported() -> None:
    """The parent takes a second to import it, and the ranks import it meanwhile."""
    code = "import sys, tightwire.server.cli.start, tightwire.server.ranks.processes; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
