from io import StringIO

from rich.console import Console
from rich.progress import Progress

from tightwire.bench.report.console import paused


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
