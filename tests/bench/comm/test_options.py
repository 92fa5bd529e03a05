import pytest

from tightwire.bench import options as bench_options
from tightwire.bench.comm.options import CommBenchOptions


def parse_options(argv: list[str]) -> CommBenchOptions:
    return bench_options.parse_options(CommBenchOptions, argv, verb="comm", description="")


def test_defaults() -> None:
    options = parse_options([])

    assert options == CommBenchOptions()
    assert options.sizes == (8 << 10, 32 << 10, 128 << 10, 512 << 10, 2 << 20, 8 << 20)
    assert options.names[0] == "native"
    assert "hierarchical" not in options.names and "flash-int4" in options.names


def test_names_sizes_and_nodes() -> None:
    options = parse_options(
        ["--algorithms", "ring,flash:int4,int8,flash:int5-g64,none,native", "--sizes", "1MiB,8KiB", "--ranks", "4"]
        + ["--link", "1gbit"]
    )

    assert options.algorithms == ("ring", "flash:int4,int8", "flash:int5-g64,none", "native")
    assert options.names == ("native", "ring", "flash:int4,int8", "flash:int5-g64,none")
    assert options.sizes == (8 << 10, 1 << 20)
    assert options.num_nodes == 4
    links = parse_options(["--link", "1gbit,200mbit,latency=50us,pcie3x4"]).links
    assert [link.name for link in links] == ["1gbit", "200mbit,latency=50us", "pcie3x4"]
    assert "hierarchical" in parse_options(["--ranks", "4", "--nodes", "2"]).names


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--label", "../mine"], "--label begins the names of files"),
        (["--label", ""], "--label begins the names of files"),
        (["--algorithms", "two-shots"], "unknown all-reduce 'two-shots'"),
        (["--algorithms", "flash:int4"], "needs two codecs"),
        (["--algorithms", "ring,ring"], "names ring twice"),
        (["--sizes", "6"], "multiples of 4 bytes, got 6"),
        (["--sizes", "1TiB"], "up to 1GiB, got 1099511627776"),
        (["--sizes", "8 apples"], "is not a size"),
        (["--ranks", "1"], "--ranks must be 2 to 64, got 1"),
        (["--ranks", "3", "--nodes", "2"], "--nodes must divide the 3 ranks evenly, got 2"),
        (["--link", "1gbit", "--nodes", "1"], "--nodes must be at least 2"),
        (["--link", "1gbit", "--transport", "shared-memory"], "joins CPU processes by sockets"),
        (["--transport", "peer-memory"], "--transport peer-memory is not for --device cpu"),
        (["--transport", "shared-memory", "--device", "cuda"], "is not for --device cuda"),
        (["--link", "slow"], "is not a link"),
        (["--repeats", "2"], "--repeats must be at least 3, got 2"),
        (["--timeout", "0"], "--timeout must be above 0"),
        (["--dtype", "int8"], "must be one of bfloat16, float16, float32"),
    ],
)
def test_bad_options_are_refused(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(argv)

    assert caught.value.code == 2
    assert words in capsys.readouterr().err
