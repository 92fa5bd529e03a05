"""Lines for a log: one per stage when all ranks are through, with the slowest rank's seconds."""

import io

import pytest

from tightwire.server import progress
from tightwire.server.messages import Stage


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


def test_lines_that_nobody_reads_are_lost() -> None:
    def broken(text: str) -> None:
        raise BrokenPipeError(text)

    lines = progress.Progress(1, broken)
    lines.say("ready")
    lines.stage(Stage(rank=0, name="weights", fraction=1.0, seconds=1.0))
