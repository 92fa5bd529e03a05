import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.server.fake_openai import FakeServer, running

from tightwire.server.cli.chat import main

ROOT = Path(__file__).resolve().parents[3]


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_piped_lines_are_the_turns_of_one_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe(monkeypatch, "first\n\nsecond\n/reset\nthird\n/exit\nfourth\n")
    with running(FakeServer(answer=["Well", ", ", "yes"])) as fake:
        status = main(["--url", fake.url, "--system", "Be brief", "--temperature", "0", "--max-tokens", "9"])

    assert status == 0
    assert capsys.readouterr().out == "Well, yes\n" * 3
    system = {"role": "system", "content": "Be brief"}
    first, answer = {"role": "user", "content": "first"}, {"role": "assistant", "content": "Well, yes"}
    assert [body["messages"] for body in fake.bodies] == [
        [system, first],
        [system, first, answer, {"role": "user", "content": "second"}],
        [system, {"role": "user", "content": "third"}],
    ]
    assert {(body["model"], body["stream"], body["temperature"], body["max_tokens"]) for body in fake.bodies} == {
        ("fake-model", True, 0.0, 9)
    }


def test_only_given_options_and_a_low_temperature_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, "hello\n")
    with running(FakeServer()) as fake:
        assert main(["--url", fake.url + "/v1/"]) == 0

    assert fake.bodies[0].keys() == {"model", "messages", "stream", "temperature", "stream_options"}


def test_escape_sequences_of_a_model_do_not_reach_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe(monkeypatch, "hello\n")
    with running(FakeServer(answer=["a\x1b[2Jb", "\n\tc\u2028你好\x9b"])) as fake:
        main(["--url", fake.url])

    assert capsys.readouterr().out == "a[2Jb\n\tc\u2028你好\n"


@pytest.mark.parametrize(
    ("fake", "argv", "says"),
    [
        (FakeServer(refuses=(400, "no chat template")), [], "answered 400: no chat template"),
        (FakeServer(error_after=2), [], "the engine died"),
        (FakeServer(breaks_after=2), [], "closed the connection before the answer was complete"),
        (FakeServer(), ["--model", "other"], "has no model 'other'; it has fake-model"),
        (FakeServer(api_key="k"), [], "give the right one with --api-key"),
    ],
)
def test_a_piped_chat_ends_at_an_error(
    fake: FakeServer,
    argv: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pipe(monkeypatch, "hello\nagain\n")
    with running(fake):
        assert main(["--url", fake.url, *argv]) == 1

    assert says in capsys.readouterr().err
    assert len(fake.bodies) <= 1


def test_an_unreachable_server_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:9"]) == 1
    assert "no server answers at http://127.0.0.1:9/v1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--temperature", "nan"], "--temperature: must be 0 to 2, got nan"),
        (["--temperature", "inf"], "--temperature: must be 0 to 2, got inf"),
        (["--system", "a\udcff"], "--system: 'a\\udcff' is not UTF-8"),
        (["--url", ""], "--url: it must look like http://127.0.0.1:8000, got ''"),
        (["--url", "http://[::1"], "--url: it must look like http://127.0.0.1:8000, got 'http://[::1'"),
        (["--url", "http://exämple..test"], "--url: it must look like http://127.0.0.1:8000, got"),
        (["--url", "http://a:999999"], "--url: it must have a port from 1 to 65535, got 'http://a:999999'"),
        (["--api-key", "schlüssel"], "--api-key: it must be ASCII; give the key as the server has it"),
    ],
)
def test_wrong_flags_end_with_exit_code_2(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(argv)
    assert exit.value.code == 2 and says in capsys.readouterr().err


def test_a_piped_line_that_is_not_utf8_ends_the_chat() -> None:
    with running(FakeServer()) as fake:
        done = subprocess.run(
            [sys.executable, "-m", "tightwire", "chat", "--url", fake.url],
            input=b"first\nhi \xff\nthird\n",
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1 and len(fake.bodies) == 1
    assert done.stderr == rb"tightwire chat: 'hi \udcff' is not UTF-8; give text in UTF-8" + b"\n"


class Terminal:
    """The chat in a process of its own, on a real pseudo-terminal."""

    def __init__(self, url: str, home: Path) -> None:
        self._master, slave = pty.openpty()
        code = "import sys; from tightwire.__main__ import main; sys.exit(main(['chat', *sys.argv[1:]]))"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "--url", url],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "XDG_STATE_HOME": str(home), "TERM": "dumb"},
            start_new_session=True,
        )
        os.close(slave)
        self.seen = ""

    def expect(self, text: str, timeout_s: float = 60.0) -> None:
        """Read until ``text`` has come after what was expected before."""
        deadline = time.monotonic() + timeout_s
        while text not in self.seen:
            assert time.monotonic() < deadline, f"{text!r} did not come; seen: {self.seen!r}"
            if select.select([self._master], [], [], 0.1)[0]:
                self.seen += os.read(self._master, 4096).decode("utf-8", "replace")
        self.seen = self.seen.partition(text)[2]

    def press_ctrl_c(self, until: str) -> None:
        """As a person does: again, if nothing happened. (Python's input() can sleep through a signal that comes just
        between its prompt and its wait, and acts on it at the next key.)"""
        for _ in range(5):
            self.process.send_signal(signal.SIGINT)
            with suppress(AssertionError):
                return self.expect(until, timeout_s=2.0)
        raise AssertionError(f"{until!r} did not come after Ctrl-C; seen: {self.seen!r}")

    def type(self, text: str) -> None:
        os.write(self._master, os.fsencode(text))

    def close(self) -> int:
        try:
            return self.process.wait(30.0)
        finally:
            self.process.kill()
            self.process.wait(10.0)
            os.close(self._master)


def test_ctrl_c_stops_the_answer_and_not_the_program(tmp_path: Path) -> None:
    with running(FakeServer(answer=["word "] * 1000, token_s=0.02)) as fake:
        terminal = Terminal(fake.url, tmp_path)
        try:
            terminal.expect("> ")
            terminal.type("go on\n")
            terminal.expect("word word")
            terminal.press_ctrl_c(until="(stopped)")
            assert fake.closed_early.wait(20.0), "the server still generates for nobody"
            terminal.expect("> ")
            fake.answer, fake.token_s = ["fine"], 0.0
            terminal.type("and now?\n")
            terminal.expect("fine")
            terminal.expect("> ")
            terminal.press_ctrl_c(until="> ")  # at the prompt it drops the line
            terminal.type("/exit\n")
        finally:
            status = terminal.close()

    assert status == 0
    roles = [(turn["role"], turn["content"][:9]) for turn in fake.bodies[1]["messages"]]
    assert roles == [("user", "go on"), ("assistant", "word word"), ("user", "and now?")]
    assert "go on" in (tmp_path / "tightwire" / "chat-history").read_text()


def test_an_error_does_not_end_a_talk_at_the_terminal(tmp_path: Path) -> None:
    with running(FakeServer(refuses=(429, "queue full"))) as fake:
        terminal = Terminal(fake.url, tmp_path)
        try:
            terminal.expect("> ")
            terminal.type("hello\n")
            terminal.expect("429: queue full")
            terminal.expect("> ")
            terminal.type("h\udcff\n")  # a byte that is not UTF-8
            terminal.expect("is not UTF-8")
            terminal.expect("> ")
            fake.refuses = None
            terminal.type("hello again\n")
            terminal.expect("w0 w1")
            terminal.expect("> ")
            terminal.type("\x04")
        finally:
            status = terminal.close()

    assert status == 0
    assert [turn["content"] for turn in fake.bodies[1]["messages"]] == ["hello again"]


def test_closed_input_is_an_empty_one() -> None:
    with running(FakeServer()) as fake:
        command = f"{sys.executable} -m tightwire chat --url {fake.url} <&- >&-"
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(["bash", "-c", command], env=environment, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stderr, fake.bodies) == (0, b"", [])
