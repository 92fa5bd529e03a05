from dataclasses import dataclass
from pathlib import Path

import pytest

from tightwire.bench.options import OutputOptions, parse_sizes
from tightwire.option import REQUIRED, option


@dataclass(frozen=True, kw_only=True, slots=True)
class SwimOptions(OutputOptions):
    pool: Path = option(REQUIRED, "where", flag="pool")
    laps: tuple[int, ...] = option((1, 4), "how many", metavar="N,N", least=1)
    sizes: tuple[int, ...] = option((1 << 20,), "of towels", metavar="BYTES", parse=parse_sizes)
    depth: float | None = option(None, "in metres (any)", metavar="M")
    style: str = option("crawl", "100% style", choices=("crawl", "butterfly"))
    heated: bool | None = option(None, "warm water (as the pool is)")
    timeout_s: float = option(60.0, "longest swim", metavar="S", flag="--timeout", above=0)
    seed: int = option(0, "of waves (a fresh one)", default_factory=lambda: 7)

    def __post_init__(self) -> None:
        if self.style == "butterfly" and self.depth == 0:
            raise ValueError("--style butterfly needs water")


def parse(*argv: str) -> SwimOptions:
    return SwimOptions.from_argv(argv, verb="swim")


def test_a_field_that_is_not_given_has_its_default() -> None:
    assert parse("p") == SwimOptions(pool=Path("p"), seed=7)
    assert parse("p").output is None


def test_flags_are_values_of_the_fields_types() -> None:
    options = parse(
        *("p", "--laps", "2,3", "--sizes", "2KiB,1KiB", "--depth", "1.5", "--style", "butterfly", "--no-heated"),
        *("--timeout", "3", "--output", "o", "--label", "x"),
    )

    assert options == SwimOptions(
        pool=Path("p"), laps=(2, 3), sizes=(1024, 2048), depth=1.5, style="butterfly", heated=False, timeout_s=3.0,
        seed=7, output=Path("o"), label="x",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "the following arguments are required: pool"),
        (["p", "--laps", "2,0"], "argument --laps: must be at least 1, got 0"),
        (["p", "--timeout", "0"], "argument --timeout: must be above 0, got 0"),
        (["p", "--timeout", "inf"], "argument --timeout: must be above 0, got inf"),
        (["p", "--style", "butterfly", "--depth", "0"], "--style butterfly needs water"),
        (["p", "--laps", "1,x"], "argument --laps: must be whole numbers with commas between, got 'x'"),
        (["p", "--style", "dive"], "must be one of crawl, butterfly, got 'dive'"),
        (["p", "--depth", "deep"], "must be a number, got 'deep'"),
        (["p", "--label", "../mine"], "--label begins the names of files"),
        (["p", "--lap", "3"], "unknown argument '--lap'; did you mean '--laps'?"),
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
    for words in (
        "how many (default: 1,4)",
        "of towels (default: 1MiB)",
        "in metres (any)",
        "style (default: crawl)",
        "swim (default: 60)",
    ):
        assert words in text
    assert "of waves (a fresh one) " in text
