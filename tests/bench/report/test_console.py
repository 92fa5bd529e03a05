from io import StringIO

import pytest
from rich.console import Console
from rich.progress import Progress

from tightwire.bench.report import console
from tightwire.bench.report.console import ProgressLines, paused


def test_the_bar_is_hidden_while_something_is_printed() -> None:
    progress = Progress(console=Console(file=StringIO(), force_terminal=True), transient=True)

    with progress:
        progress.add_task("work", total=2)
        with paused(progress):
            assert not progress.live.is_started
        assert progress.live.is_started


def test_a_hidden_bar_stays_hidden() -> None:
    out = StringIO()
    progress = Progress(console=Console(file=out), disable=True)

    with progress, paused(progress):
        pass
    with paused(progress):
        pass

    assert not progress.live.is_started
    assert out.getvalue() == ""


def test_a_file_gets_a_line_of_progress_every_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_LINE_SECONDS", 0.0)
    out = StringIO()
    progress = ProgressLines(console=Console(file=out), disable=True)

    with progress:
        task = progress.add_task("loading", total=None)
        progress.update(task, description="2 ranks: [exact]")
        progress.reset(task, total=5)
        progress.advance(task)

    assert out.getvalue().splitlines() == ["2 ranks: [exact], 0 s", "2 ranks: [exact], 1 of 5 done, 0 s"]


def test_a_file_gets_the_time_left_as_soon_as_it_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    out = StringIO()
    progress = ProgressLines(console=Console(file=out), disable=True, get_time=lambda: now[0])
    with progress:
        task = progress.add_task("warming up", total=100)
        progress.update(task, completed=0)
        for _ in range(20):
            now[0] += 1.0
            progress.advance(task)
    lines = out.getvalue().splitlines()

    assert lines[0] == "warming up, 2 of 100 done, 2 s, about 98 s left"
    assert lines[1] == "warming up, 17 of 100 done, 17 s, about 83 s left" and len(lines) == 2
    assert console.describe_seconds(185) == "3:05 min"
