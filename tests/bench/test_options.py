from dataclasses import dataclass
from pathlib import Path

import pytest

from tightwire.bench.options import OutputOptions, parse_sizes
from tightwire.option import option


@dataclass(frozen=True, kw_only=True, slots=True)
class SwimOptions(OutputOptions):
    sizes: tuple[int, ...] = option((1 << 20,), "of towels", metavar="BYTES", parse=parse_sizes)
    depth: float | None = option(None, "in metres (any)", metavar="M")
    style: str = option("crawl", "100% style", choices=("crawl", "butterfly"))
    heated: bool | None = option(None, "warm water (as the pool is)")
    timeout_s: float = option(60.0, "longest swim", metavar="S", flag="--timeout", above=0)


def parse(*argv: str) -> SwimOptions:
    return SwimOptions.from_argv(argv, verb="swim")


def test_options_of_a_bench_stand_beside_those_of_all() -> None:
    options = parse(
        *("--sizes", "2KiB,1KiB", "--depth", "1.5", "--style", "butterfly", "--no-heated"),
        *("--timeout", "3", "--output", "o", "--label", "x"),
    )

    wanted = {"sizes": (1024, 2048), "depth": 1.5, "style": "butterfly", "heated": False, "timeout_s": 3.0}
    assert options == SwimOptions(**wanted, output=Path("o"), label="x")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--timeout", "0"], "argument --timeout: must be above 0, got 0"),
        (["--style", "dive"], "must be one of crawl, butterfly, got 'dive'"),
        (["--depth", "deep"], "must be a number, got 'deep'"),
        (["--label", "../mine"], "--label begins the names of files"),
        (["--size", "3"], "unknown argument '--size'; did you mean '--sizes'?"),
    ],
)
def test_wrong_values_end_the_program_with_their_reason(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(*argv)

    assert caught.value.code == 2 and words in capsys.readouterr().err


def test_help_shows_each_default_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")

    text = " ".join(capsys.readouterr().out.split())
    for words in ("towels (default: 1MiB)", "in metres (any)", "100% style (default: crawl)", "swim (default: 60)"):
        assert words in text
