"""What a start shows: the earliest unfinished stage, on one line that counts; what nobody reads is lost."""

import io

import pytest

from tightwire.progress import START_STAGES, Progress


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def progress(stream: io.StringIO, **options: bool) -> Progress:
    """Without its thread: the tests tick."""
    made = Progress(2, START_STAGES, stream=stream, **options)
    made._tick_until_closed = lambda: None  # type: ignore[method-assign]
    return made


def test_a_pipe_gets_a_line_when_a_stage_takes_two_seconds_and_then_every_ten() -> None:
    out = io.StringIO()
    shown = progress(out)
    shown.stage("weights", 0.0, rank=0)
    shown.stage("weights", 0.35, rank=1)
    for now_s in range(100, 114):
        shown.tick(now_s)
    assert out.getvalue().splitlines() == [
        "[#############.......] loading weights, files at disk speed: 2 s",
        "[#############.......] loading weights, files at disk speed: 12 s",
    ]


def test_a_terminal_has_one_line_with_the_slowest_ranks_stage_and_no_hidden_cursor() -> None:
    out = Screen()
    shown = progress(out)
    shown.stage("open", 0.0, rank=0)
    shown.stage("weights", 0.5, rank=1)
    shown.tick(1.0)
    shown.stage("open", 1.0, rank=0)
    shown.tick(1.5)
    shown.say("ready")
    shown.close()
    shown.tick(2.0)
    erase = "\r\x1b[K"
    assert out.getvalue().split(erase)[1:] == [
        "[###.................] reading the model's headers, usually below 1 s: 0 s",
        "[###############.....] loading weights, files at disk speed: 50 %, 0 s",
        "ready\n",
        "",
    ]


def test_another_stage_has_its_own_bar() -> None:
    out = io.StringIO()
    shown = progress(out)
    shown.stage("downloading tiny", 0.25)
    shown.tick(0.0)
    shown.tick(2.0)
    assert out.getvalue() == "[#####...............] downloading tiny: 25 %, 2 s\n"


@pytest.mark.parametrize("verbose", [False, True])
def test_details_and_the_seconds_of_each_stage_are_for_the_debug_level(verbose: bool) -> None:
    out = io.StringIO()
    shown = progress(out, verbose=verbose)
    shown.detail("rank 0: 5 heads")
    shown.stage("weights", 1.0, rank=0)
    shown.stage("weights", 1.0, rank=1)
    assert out.getvalue().split("\n") == (["rank 0: 5 heads", "     weights    0.0 s", ""] if verbose else [""])


def test_lines_that_nobody_reads_are_lost() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(text)

    closed = io.StringIO()
    for made in (progress(Broken()), progress(closed)):
        closed.close()
        made.say("ready")
