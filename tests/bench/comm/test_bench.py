import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from helpers.comm.faulty_all_reduce import make_faulty, make_raising

from tightwire.bench import ranks as bench_ranks
from tightwire.bench.cli import main
from tightwire.bench.comm import bench as comm_bench
from tightwire.bench.comm.bench import CommBench
from tightwire.bench.comm.options import CommOptions
from tightwire.comm.link import wire
from tightwire.comm.link.emulated_network import EmulatedNetwork, NoEmulatedNetworkError
from tightwire.comm.link.link import parse_link

SMALL = ["--algorithms", "native,one-shot,two-shot,flash-int8", "--sizes", "4KiB,1000B", "--repeats", "3"]


def bench(*argv: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any], str]:
    """Run ``bench comm``: exit code, last line, everything before it and stderr."""
    status = main(["comm", *argv])
    captured = capsys.readouterr()
    *text, last = captured.out.splitlines()
    return status, json.loads(last), "\n".join([*text, captured.err])


def test_every_cell_is_measured_and_kept(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, result, text = bench(*SMALL, "--output", str(tmp_path), "--label", "x", capsys=capsys)

    assert status == 0 and result["error"] is None
    assert [(cell["size"], cell["algorithm"]) for cell in result["cells"]] == [
        (size, name) for size in (1000, 4096) for name in ("native", "one-shot", "two-shot", "flash-int8")
    ]
    for cell in result["cells"]:
        assert cell["seconds"]["n"] == 3
        assert 0 < cell["seconds"]["p50"] <= cell["seconds"]["p99"]
        assert cell["algbw_bytes_per_s"] == pytest.approx(cell["size"] / cell["seconds"]["p50"])
        assert cell["busbw_bytes_per_s"] == pytest.approx(cell["algbw_bytes_per_s"])  # 2 (N-1)/N with two ranks
        assert 0 < cell["share_of_bound"] <= 1 and cell["relative_error"] > 0
        native = next(c for c in result["cells"] if (c["size"], c["algorithm"]) == (cell["size"], "native"))
        assert cell["speed_up_over_native"] == pytest.approx(native["seconds"]["p50"] / cell["seconds"]["p50"])
    # 2048 bf16 numbers: a slice of 1024 each, 8 groups of 128 codes with scale and zero, in both legs.
    assert result["cells"][-1]["wire_bytes"] == 2 * 8 * (128 + 4)
    assert "4KiB" in text and "flash-int8" in text

    kept, table, page = map(Path, result["files"])
    cells = json.loads(kept.read_text())["cells"]
    assert all(
        len(cell["samples"]["seconds"]) == 3 and min(cell["samples"]["seconds"]) == cell["seconds"]["min"]
        for cell in cells
    )
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [row["algorithm"] for row in rows] == [cell["algorithm"] for cell in cells]
    assert float(rows[0]["seconds.p50"]) == cells[0]["seconds"]["p50"]
    _check_page(page.read_text())


def _check_page(text: str) -> None:
    """One document that asks no network for anything, with every cell."""
    tags: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.append(tag)

    Reader().feed(text)
    assert tags.count("tr") == 1 + 8
    assert "script" not in tags and "link" not in tags
    assert not re.findall(r'(?:src|href)="(?!data:)', text)


def test_ranks_with_several_threads_are_cells_of_their_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(comm_bench, "num_cores", lambda: 3)
    argv = [
        "--algorithms",
        "two-shot",
        "--sizes",
        "4KiB",
        "--repeats",
        "3",
        "--workers",
        "1,2",
        "--output",
        str(tmp_path),
    ]
    status, result, text = bench(*argv, capsys=capsys)

    assert status == 0 and "note: 4 threads share 3 cores" in text
    assert [cell["workers"] for cell in result["cells"]] == [1, 2]
    assert [cell["name"] for cell in result["cells"]] == [f"two-shot, 4KiB, {count} workers" for count in (1, 2)]
    assert "4KiB by threads of a rank" in Path(result["files"][2]).read_text()


def test_every_kind_of_wrong_answer_fails_the_run_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("auto", "ring", "two-shot", "one-shot", "native")
    options = CommOptions(
        algorithms=names, sizes=(1024,), dtype="float32", transport="process-group", repeats=3, seed=3
    )

    status = CommBench(options, make_faulty).run()

    captured = capsys.readouterr()
    result = json.loads(captured.out.splitlines()[-1])
    assert status == 1
    for name, words in {
        "ring": r"the largest error of an element is [\d.e+]+ times the algorithm's bound",
        "two-shot": r"ranks got different bits: rank 0 \w{8}, rank 1 \w{8}",
        "one-shot": r"a later call gave other bits, on ranks \[0, 1\]",
        "native": r"rank 0 sent 1024 bytes, but its formula gives 1025",
    }.items():
        assert re.search(f"wrong answer: {name} at 1024 bytes: .*{words}", captured.err), name
        assert re.search(words, result["error"])
    assert {cell["algorithm"]: bool(cell["faults"]) for cell in result["cells"]} == {
        name: name != "auto" for name in names
    }


def test_a_failing_rank_ends_the_run_with_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    options = CommOptions(algorithms=("one-shot",), sizes=(1024,), transport="process-group", repeats=3, timeout_s=5)

    assert CommBench(options, make_raising).run() == 1

    error = json.loads(capsys.readouterr().out.splitlines()[-1])["error"]
    assert re.search("ZeroDivisionError: on purpose|lost rank 1", error)


def test_an_unavailable_transport_is_refused_and_leaves_no_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_ranks, "why_unusable", lambda: "this system has none")

    status, result, text = bench(*SMALL, "--transport", "shared-memory", "--output", str(tmp_path), capsys=capsys)

    assert (status, result["cells"], result["files"]) == (1, [], [])
    assert "--transport shared-memory does not work here: this system has none" in result["error"]
    assert result["error"] in text
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()

    status, result, text = bench(*SMALL, "--output", str(tmp_path / "file"), capsys=capsys)

    assert status == 1 and result["cells"] == []
    assert "cannot be written" in text and "KiB" not in text


def test_a_kernel_link_between_two_nodes_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        EmulatedNetwork(parse_link("1gbit")).close()
    except NoEmulatedNetworkError as error:
        pytest.skip(f"no emulated network here: {error}")

    status, result, text = bench(
        *("--algorithms", "two-shot,hierarchical:int8", "--sizes", "64KiB", "--repeats", "3"),
        *("--ranks", "4", "--nodes", "2", "--link", "40mbit,latency=100us"),
        capsys=capsys,
    )

    assert (status, result["error"], result["nodes"]) == (0, None, 2)
    (link,) = result["link_facts"]
    assert link["how"] == "tc tbf between network namespaces, latency in user space"
    assert link["measured_bytes_per_s"] > 0
    assert "4 ranks on 2 nodes, bfloat16, sockets over 40mbit,latency=100us (tc tbf" in text
    for cell in result["cells"]:
        assert cell["seconds"]["min"] >= 2 * 100e-6  # two rounds at least pass the wire


@pytest.fixture
def no_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> EmulatedNetwork:
        raise NoEmulatedNetworkError("only root makes network namespaces")

    monkeypatch.setattr(wire, "EmulatedNetwork", refuse)


@pytest.mark.usefixtures("no_namespaces")
def test_without_namespaces_the_link_is_throttled_and_the_result_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    status, result, text = bench(
        *("--algorithms", "two-shot,flash-int8", "--sizes", "64KiB", "--repeats", "3", "--link", "80mbit"),
        capsys=capsys,
    )

    assert status == 0
    assert result["link_facts"][0]["how"] == "throttled in user space"
    assert result["link_facts"][0]["why"] == "only root makes network namespaces"
    assert "throttled in user space" in text
    for cell in result["cells"]:
        assert cell["seconds"]["min"] >= cell["wire_bytes"] / 10e6


@pytest.mark.usefixtures("no_namespaces")
def test_several_links_give_predictions(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, result, _ = bench(
        *("--algorithms", "two-shot,flash-int4", "--sizes", "64KiB", "--repeats", "3"),
        *("--link", "80mbit,40mbit,latency=5ms", "--output", str(tmp_path)),
        capsys=capsys,
    )

    assert (status, list(result["links"])) == (0, ["80mbit", "40mbit,latency=5ms"])
    assert [cell["name"] for cell in result["cells"]] == [
        f"{name}, 64KiB, {link}" for link in result["links"] for name in ("two-shot", "flash-int4")
    ]
    for cell in result["cells"]:
        waiting_s = 2 * 5e-3 * (cell["link"] != "80mbit")  # both algorithms have two rounds
        predicted_s = cell["wire_bytes"] / cell["link_bytes_per_s"] + waiting_s + cell["computing_s"]
        assert cell["predicted_s"] == pytest.approx(predicted_s)
        assert cell["over_predicted"] > 0.9
    page = Path(result["files"][2]).read_text()
    assert "Prediction" in page


def parse_options(argv: list[str]) -> CommOptions:
    return CommOptions.from_argv(argv, verb="comm")


def test_defaults() -> None:
    options = parse_options([])

    assert options == CommOptions()
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
        (["--algorithms", "two-shots"], "--algorithms: unknown all-reduce 'two-shots'"),
        (["--algorithms", "flash:int4"], "needs two codecs"),
        (["--algorithms", "ring,ring"], "names ring twice"),
        (["--sizes", "6"], "multiples of 4 bytes up to 1GiB, got 6"),
        (["--sizes", "1TiB"], "up to 1GiB, got 1099511627776"),
        (["--sizes", "8 apples"], "is not a size"),
        (["--ranks", "1"], "--ranks: must be 2 to 64, got 1"),
        (["--ranks", "3", "--nodes", "2"], "--nodes must divide the 3 ranks evenly, got 2"),
        (["--link", "1gbit", "--nodes", "1"], "--nodes must be at least 2"),
        (["--link", "1gbit", "--transport", "shared-memory"], "connects CPU processes by sockets"),
        (["--transport", "peer-memory"], "--transport peer-memory is not for --device cpu"),
        (["--transport", "shared-memory", "--device", "cuda"], "is not for --device cuda"),
        (["--link", "slow"], "is not a link"),
        (["--repeats", "2"], "--repeats: must be at least 3, got 2"),
        (["--timeout", "0"], "--timeout: must be above 0"),
        (["--dtype", "int8"], "must be one of bfloat16, float16, float32"),
    ],
)
def test_bad_options_are_refused(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(argv)

    assert caught.value.code == 2
    assert words in capsys.readouterr().err
