"""Lines for a log: one per stage when all ranks are through, with the slowest rank's seconds."""

import contextlib
import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tightwire.server.ipc.messages import Stage
from tightwire.server.plan import progress

SOURCE = Path(__file__).parents[3] / "src"


def test_a_stage_is_said_once_when_all_ranks_are_through() -> None:
    out = io.StringIO()
    lines = progress.make_progress(2, out)
    lines.stage(Stage(rank=0, name="weights", fraction=1.0, seconds=1.0))
    assert out.getvalue() == ""
    lines.stage(Stage(rank=1, name="weights", fraction=1.0, seconds=2.5))
    assert out.getvalue().split() == ["weights", "2.5", "s"]


def test_a_long_stage_is_said_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    out = io.StringIO()
    lines = progress.make_progress(2, out)
    for now in range(12):
        lines.stage(Stage(rank=now % 2, name="weights", fraction=now / 100))
    assert [line.split(None, 1)[1] for line in out.getvalue().splitlines()] == ["rank 0 6 %, rank 1 5 %"]


def test_a_terminal_gets_a_bar_per_rank(capsys: pytest.CaptureFixture[str]) -> None:
    bars = progress.TerminalProgress(2)
    bars.stage(Stage(rank=1, name="weights", fraction=0.5))
    bars.stage(Stage(rank=0, name="weights", fraction=1.0, seconds=1.5))
    bars.stage(Stage(rank=1, name="weights", fraction=1.0, seconds=1.0))
    bars.close()
    assert "weights    1.5 s" in capsys.readouterr().err


def test_the_cursor_is_hidden_only_while_there_are_bars() -> None:
    """In a terminal: a process that is ended before its first stage leaves the cursor as it was."""
    hidden, shown = b"\x1b[?25l", b"\x1b[?25h"
    waiting, drawing = (
        _on_a_terminal("pass"),
        _on_a_terminal("bars.stage(Stage(rank=0, name='weights', fraction=0.5)); bars.close()"),
    )
    assert hidden not in waiting
    assert hidden in drawing and drawing.rindex(shown) > drawing.rindex(hidden)


def test_a_terminal_wraps_long_lines_itself() -> None:
    assert b"x" * 300 in _on_a_terminal("bars.say('x' * 300)")


def _on_a_terminal(code: str) -> bytes:
    """What a process with a pseudo-terminal for standard error writes there when it runs ``code`` and is ended."""
    theirs, ours = pty.openpty()
    program = (
        "import os; from tightwire.server.ipc.messages import Stage; from tightwire.server.plan.progress import *\n"
    )
    program += f"bars = TerminalProgress(1)\n{code}\nos._exit(0)"
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "PYTHONPATH": str(SOURCE)}
    subprocess.run([sys.executable, "-c", program], stderr=ours, env=environment, timeout=240, check=True)
    os.close(ours)
    written = b""
    with contextlib.suppress(OSError):  # the end of a pseudo-terminal
        while chunk := os.read(theirs, 65536):
            written += chunk
    os.close(theirs)
    return written


def test_lines_that_nobody_reads_are_lost() -> None:
    def broken(text: str) -> None:
        raise BrokenPipeError(text)

    lines = progress.Progress(1, broken)
    lines.say("ready")
    lines.stage(Stage(rank=0, name="weights", fraction=1.0, seconds=1.0))
