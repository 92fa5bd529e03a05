import pytest

from tightwire.bench.stream.options import Arm, StreamOptions


def parse_options(argv: list[str]) -> StreamOptions:
    return StreamOptions.from_argv(argv, verb="stream")


def test_arms_have_the_codecs_of_their_source(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse_options(
        ["random:llama-3.2-1b", "--codecs", "none,int4", "--rates", "none,100MB"] + ["--sources", "host,files"]
    )

    assert [arm.name for arm in options.arms] == [
        *("host none", "host int4", "host none 100MB/s", "host int4 100MB/s"),
        *("files none", "files none 100MB/s"),
    ]


def test_an_arm_spreads_the_layers_that_it_streams() -> None:
    plan = Arm("host", "int4", 5_000_000).plan(num_layers=6, num_streamed=3)

    assert (plan.streamed, plan.origin, plan.codec, plan.bytes_per_s) == ((1, 3, 5), "host", "int4", 5_000_000)
    assert Arm("disk", "none", 0).plan(6, 6).bytes_per_s is None


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--sources", "tape"], "--sources takes host, disk, files, got tape"),
        (["--codecs", "int5"], "--codecs takes none, int8, int4, got int5"),
        (["--sources", "files", "--codecs", "int4"], "--sources files has no codec; add none"),
        (["--rates", "0MB"], "a rate must be above 0"),
        (["--rates", "fast"], "'fast' is not a size"),
        (["--tp", "0"], "--tp: must be 1 to 64"),
        (["--tp", "65"], "--tp: must be 1 to 64, got 65"),
        (["--tp", "1,x"], "argument --tp: must be whole numbers with commas between, got 'x'"),
        (["--batches", "few"], "argument --batches: must be whole numbers with commas between"),
        (["--batches", "0,8"], "--batches: must be at least 1, got 0"),
        (["--threads", "99999"], "--threads: must be 1 to 1024, got 99999"),
        (["--repeats", "2"], "--repeats: must be at least 3"),
        (["--stream-layers", "2"], "--stream-layers: must be at least 3"),
        (["--timeout", "0"], "--timeout: must be above 0"),
        (["--allreduce", "loud"], "--allreduce: unknown all-reduce 'loud'"),
        (["--label", "a/b"], "--label"),
    ],
)
def test_wrong_options_are_refused(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_options(argv)

    assert words in capsys.readouterr().err


def test_defaults_are_the_whole_table() -> None:
    options = StreamOptions()

    assert {arm.source for arm in options.arms} == {"host", "disk"} and options.tp == (1, 2)
