"""Declared options become flags, and texts and values of files become their types."""

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from helpers.server.command import SOURCE

from tightwire.option import REQUIRED, as_utf8, limits_missed, option, options_of
from tightwire.option_flags import add_flags, convert, make_options
from tightwire.sizes import parse_bytes


@dataclass(frozen=True)
class Switches:
    fast: bool = option(True, "100% fast")


@pytest.mark.parametrize(("argv", "values"), [([], {}), (["--fast"], {"fast": True}), (["--no-fast"], {"fast": False})])
def test_a_bool_field_is_a_pair_of_flags(argv: list[str], values: dict[str, Any]) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, options_of(Switches))
    assert vars(parser.parse_args(argv)) == values
    assert "100% fast" in parser.format_help()


@pytest.mark.parametrize(("value", "wanted"), [(True, True), (False, False)])
def test_a_bool_in_a_file(value: object, wanted: bool) -> None:
    assert convert(fields(Switches)[0], value) is wanted


@pytest.mark.parametrize("value", [1, "yes", None])
def test_what_is_no_bool_in_a_file(value: object) -> None:
    with pytest.raises(ValueError, match="must be true or false"):
        convert(fields(Switches)[0], value)


@dataclass(frozen=True, kw_only=True)
class Swim:
    pool: Path = option(REQUIRED, "where", flag="pool")
    lane: str = option("any", "which", flag="lane")
    towel: str = option(REQUIRED, "its color")
    laps: tuple[int, ...] = option((1, 4), "how many", least=1, unique=True)
    depth: float = option(1.0, "in metres", least=0)
    heat: float = option(0.2, "of the water", least=0, most=2)
    pauses: tuple[float, ...] = option((), "between laps", above=0)
    size: int | None = option(1 << 20, "of the towel", metavar="BYTES", parse=parse_bytes)
    shower: str | None = option(None, "before", const="cold")
    song: str = option("", "to hum")
    day: int = option(0, "of the year", default_factory=lambda: 7)

    def __post_init__(self) -> None:
        if self.towel == "none":
            raise ValueError("--towel must be a color")


def swim(*argv: str) -> Swim:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, options_of(Swim))
    return make_options(Swim, parser, parser.parse_args(argv))


def test_options_left_out_have_their_defaults() -> None:
    assert swim("p", "--towel", "red") == Swim(pool=Path("p"), towel="red", day=7)


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--laps", "2, 3,2"], "laps", (2, 3)),
        (["--pauses", "1,0.5,1"], "pauses", (1.0, 0.5, 1.0)),
        (["--size", "2KiB"], "size", 2048),
        (["--shower"], "shower", "cold"),
        (["--shower", "hot"], "shower", "hot"),
    ],
)
def test_a_flag_has_the_type_of_its_field(argv: list[str], name: str, value: object) -> None:
    assert getattr(swim("p", "3", "--towel", "red", *argv), name) == value
    assert swim("p", "3", "--towel", "red", *argv).lane == "3"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["p"], "the following arguments are required: --towel"),
        (["p", "--towel", "none"], "--towel must be a color"),
        ([""], "argument pool: must be a path, got ''"),
        (["p", "--laps", "0,1"], "argument --laps: must be at least 1, got 0"),
        (["p", "--depth", "inf"], "argument --depth: must be at least 0 and finite, got inf"),
        (["p", "--depth", "nan"], "argument --depth: must be at least 0, got nan"),
        (["p", "--heat", "3"], "argument --heat: must be 0 to 2, got 3.0"),
        (["p", "--heat", "nan"], "argument --heat: must be 0 to 2, got nan"),
        (["p", "--laps", "1,,2"], "argument --laps: must be whole numbers with commas between, got ''"),
        (["p", "--pauses", "inf"], "argument --pauses: must be above 0, got inf"),
        (["p", "--size", "big"], "argument --size: 'big' is not a size"),
    ],
)
def test_wrong_options_end_with_exit_code_2(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        swim(*argv)
    assert exit.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("laps", [3, 3], (3,)),
        ("laps", 3, (3,)),
        ("size", 5, 5),
        ("size", "1KiB", 1024),
        ("size", None, None),
        ("pool", "p", Path("p")),
    ],
)
def test_an_option_in_a_file(name: str, value: object, wanted: object) -> None:
    assert convert(options_of(Swim)[name], value) == wanted


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("laps", [0]),
        ("laps", [True]),
        ("laps", [1 << 63]),
        ("depth", 10**400),
        ("size", 1.5),
        ("size", True),
        ("pool", 3),
    ],
)
def test_wrong_options_in_a_file(name: str, value: object) -> None:
    with pytest.raises(ValueError, match="must be"):
        convert(options_of(Swim)[name], value)


def test_help_shows_placeholders_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        swim("--help")
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "pool where",
        "--laps N,N how many (default: 1,4)",
        "--pauses X,X between laps --size BYTES",
        "(default: 1MiB)",
    ):
        assert words in text
    assert "--shower [NAME] before --song NAME to hum --day N of the year" in text


def test_the_limits_of_a_number() -> None:
    own = options_of(Swim)
    assert [limits_missed(own["heat"], number) for number in (0, 2, 2.1)] == ["", "", "0 to 2"]
    assert [limits_missed(own["pauses"], number) for number in (0.1, 0, float("inf"))] == ["", "above 0", "above 0"]


def test_text_of_arguments_is_utf8_whatever_the_locale() -> None:
    assert as_utf8("Ünï") == "Ünï"
    with pytest.raises(ValueError, match=r"'a\\udcff' is not UTF-8; give text in UTF-8"):
        as_utf8("a\udcff")  # as Python reads the byte 0xff of an argument
    code = "import sys; from tightwire.option import as_utf8; sys.stdout.buffer.write(as_utf8(sys.argv[1]).encode())"
    ascii = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", code, "Ünï"], env=os.environ | ascii, capture_output=True, check=True)
    assert done.stdout.decode() == "Ünï"
