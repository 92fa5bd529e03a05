import csv
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tightwire.bench.cli import main

ENVIRONMENT = {
    "time": "2026-01-01", "cpu": "a cpu", "usable_cores": 2, "os": "an os", "python": "3.11", "packages": {"torch": "2"},
    "tightwire": "0.1", "git_revision": "abc", "command": ["tightwire"],
}  # fmt: skip


def noise(name: str, count: int, sigma: float = 0.02) -> list[float]:
    source = random.Random(name)
    return [source.lognormvariate(0.0, sigma) for _ in range(count)]


def metric(name: str, unit: str = "ms", scale: float = 1e3, decides: bool = True, **words: str) -> dict[str, Any]:
    return {"name": name, "unit": unit, "scale": scale, "decides": decides, **words}


def serve(name: str, *, ttft: float = 1.0, tpot: float = 1.0, seed: int = 1, **facts: Any) -> dict[str, Any]:
    """A result of 30 requests that succeeded and one that failed."""
    x, y = noise(name, 30), noise(f"{name} tpot", 30)
    samples = {
        "ttft_s": [*(0.2 * ttft * each for each in x), None],
        "tpot_s": [*(0.03 * tpot * each for each in y), None],
        "e2e_s": [*(0.5 * each for each in x), None],
        "itl_s": [*[0.03] * 30, None],
    }
    result = {
        "schema": "tightwire.bench.serve/2", "label": name, "environment": ENVIRONMENT, "server": {"model": "m"},
        "workload": {"name": "random", "seed": seed}, "request": {}, "error": None,
        "metrics": [*map(metric, ("ttft_s", "tpot_s", "e2e_s")), metric("itl_s", decides=False)],
        "pairing_keys": ["workload", "request"],
        "cells": [{"name": "concurrency 1", "samples": samples, "batch": 1, "requested": 31, "failed": 1}],
    }  # fmt: skip
    return {**result, **facts}


def ttft(name: str, *, flash: float, drift: float = 1.0, baseline: str = "native") -> dict[str, Any]:
    """Ten rounds; ``drift``: how slow the machine was."""
    base = [drift * x for x in noise(f"{name} native", 10)]
    cells = []
    for arm, speed in {"native": 1.0, "native#2": 1.0, "flash-int8": flash}.items():
        times = base if arm == "native" else [speed * drift * x for x in noise(f"{name} {arm}", 10)]
        ratios = [None if arm == "native" else own / of_base for own, of_base in zip(times, base, strict=True)]
        cells.append({"name": f"{arm}, 512 tokens, 2 at a time", "samples": {"ttft_ratio": ratios, "ttft_s": times}})
    return {
        "schema": "tightwire.bench.ttft/2", "label": name, "environment": ENVIRONMENT, "model": "m", "error": None,
        "metrics": [metric("ttft_ratio", "", 1.0), metric("ttft_s", decides=False)], "pairing_keys": None,
        "options": {"baseline": baseline}, "cells": cells,
    }  # fmt: skip


def compare(
    tmp_path: Path, a: Any, b: Any, *argv: str, capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, Any], str]:
    """Exit code, last line, everything before it and stderr. Results are written to files; text as it is."""
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, content in zip(paths, (a, b), strict=True):
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    status = main(["compare", *map(str, paths), *argv])
    captured = capsys.readouterr()
    *text, last = captured.out.splitlines()
    return status, json.loads(last), "\n".join([*text, captured.err])


def verdicts(result: dict[str, Any], metric: str) -> dict[str, str]:
    return {cell["cell"]: cell["verdict"] for cell in result["cells"] if cell["metric"] == metric}


@pytest.mark.parametrize("result", [serve("x"), ttft("x", flash=0.7)])
def test_a_result_against_itself_shows_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], result: dict[str, Any]
) -> None:
    status, compared, text = compare(tmp_path, result, result, capsys=capsys)

    assert status == 0
    assert compared["cells"] and compared["differences"] == []
    assert {cell["verdict"] for cell in compared["cells"]} == {"no difference"}
    assert {cell["ratio"] for cell in compared["cells"]} == {1.0}
    assert "no regression" in text


def test_a_slowdown_beyond_the_tolerance_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, result, text = compare(tmp_path, serve("a"), serve("b", ttft=1.2, tpot=0.8, seed=2), capsys=capsys)

    assert status == 1
    (cell,) = (cell for cell in result["cells"] if cell["regression"])
    assert (cell["metric"], cell["verdict"], cell["n"], cell["paired"]) == ("ttft_s", "slower", 30, False)
    assert 1.05 < cell["low"] < cell["ratio"] < cell["high"]
    assert cell["a"] == pytest.approx(200, rel=0.03) and cell["unit"] == "ms"
    assert verdicts(result, "tpot_s") == {"concurrency 1": "faster"}
    assert "1 regression: by ttft_s, tpot_s, e2e_s, B is worse by more than 5 % with its whole interval" in text


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        (["--tolerance", "30%"], 0),
        (["--tolerance", "0.1"], 1),
        (["--metric", "tpot_s"], 0),
        (["--metric", "ttft_s,tpot_s"], 1),
    ],
)
def test_the_user_sets_tolerance_and_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], status: int
) -> None:
    assert compare(tmp_path, serve("a"), serve("b", ttft=1.2), *argv, capsys=capsys)[0] == status


def test_the_same_prompts_are_compared_in_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slower = serve("a", ttft=1.03)  # of the same requests, whose lengths vary far more than that

    _, paired, _ = compare(tmp_path, serve("a"), slower, capsys=capsys)
    _, apart, _ = compare(tmp_path, serve("a"), {**slower, "workload": {"name": "random", "seed": 9}}, capsys=capsys)

    assert [cell["paired"] for cell in paired["cells"]] == [True] * 4
    assert paired["cells"][0]["low"] == pytest.approx(1.03) == paired["cells"][0]["high"]
    assert apart["cells"][0]["high"] - apart["cells"][0]["low"] > 0.01
    assert apart["differences"] == []  # another seed is another draw of the same workload


def test_ttft_is_decided_by_the_ratio_to_the_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast = ttft("a", flash=0.7)

    slow_day = compare(tmp_path, fast, ttft("b", flash=0.7, drift=1.5), capsys=capsys)
    slow_code = compare(tmp_path, fast, ttft("c", flash=0.9, drift=0.5), capsys=capsys)

    flash = "flash-int8, 512 tokens, 2 at a time"
    assert slow_day[0] == 0
    assert verdicts(slow_day[1], "ttft_ratio")[flash] == "no difference"
    assert verdicts(slow_day[1], "ttft_s")[flash] == "slower"
    assert slow_code[0] == 1
    assert verdicts(slow_code[1], "ttft_ratio") == {
        flash: "slower", "native#2, 512 tokens, 2 at a time": "no difference"
    }  # fmt: skip
    assert verdicts(slow_code[1], "ttft_s")[flash] == "faster"
    assert slow_code[1]["deciding"] == ["ttft_ratio"]
    (row,) = (cell for cell in slow_code[1]["cells"] if cell["cell"] == flash and cell["metric"] == "ttft_ratio")
    assert (row["a"], row["b"]) == (pytest.approx(0.7, rel=0.03), pytest.approx(0.9, rel=0.03))


def test_different_environments_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = serve("b", environment={**ENVIRONMENT, "cpu": "another", "git_revision": "def"}, error="interrupted")
    other["cells"].append({"name": "concurrency 2", "samples": {}})

    status, result, text = compare(tmp_path, serve("a"), other, capsys=capsys)

    assert status == 1
    assert result["regressions"] == 0 and result["faults"] == ["B is not complete, but A is: interrupted"]
    for words in (
        "environment.cpu differs: a cpu in A, another in B",
        "environment.git_revision differs: abc in A, def in B",
        "b.json is not complete: interrupted",
        "b.json has concurrency 2",
    ):
        assert any(words in found for found in result["differences"]) and words.split(" differs")[0] in text


def test_requests_of_one_batch_count_as_one_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight batches, each of four requests with one luck: as 32 samples they would seem to be certainly slower."""

    def batches(name: str, batch: int) -> dict[str, Any]:
        luck = noise(f"{name}30", 8, 0.2)
        times = {"ttft_s": 1.0, "tpot_s": 0.1, "e2e_s": 2.0}
        samples = {key: [value * luck[i // 4] for i in range(32)] for key, value in times.items()}
        return serve(name, cells=[{"name": "concurrency 4", "samples": samples, "batch": batch}])

    assert compare(tmp_path, batches("a", 1), batches("b", 1), capsys=capsys)[0] == 1
    status, result, _ = compare(tmp_path, batches("a", 4), batches("b", 4), capsys=capsys)

    assert status == 0
    assert {(cell["verdict"], cell["n"]) for cell in result["cells"]} == {("too few rounds", 8)}


def test_repeated_loads_are_compared_separately(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twice = serve("a")
    twice["cells"] = [serve("a")["cells"][0], serve("x", ttft=1.5)["cells"][0]]

    status, result, _ = compare(tmp_path, twice, twice, capsys=capsys)

    assert status == 0
    assert verdicts(result, "ttft_s") == {"concurrency 1": "no difference", "concurrency 1 (2)": "no difference"}


def test_failed_requests_are_a_fault_of_b(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failing = serve("a")
    for samples in failing["cells"][0]["samples"].values():
        samples[:20] = [None] * 20
    failing["cells"][0]["failed"] = 21
    output = ("--output", str(tmp_path / "out"), "--metric", "ttft_s")

    status, result, text = compare(tmp_path, serve("a"), failing, *output, capsys=capsys)
    better, _, _ = compare(tmp_path, failing, serve("a"), capsys=capsys)

    assert (status, better) == (1, 0)
    assert result["regressions"] == 0
    assert "concurrency 1: 21 of 31 requests failed in B, but 1 of 31 in A" in result["faults"][0]
    assert result["faults"][0] in text.replace("\n", "") and result["faults"][0] in Path(result["files"][2]).read_text()


def test_samples_without_a_ratio_are_left_out_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at_once = serve("b")
    at_once["cells"][0]["samples"]["tpot_s"][:3] = [0.0] * 3  # all tokens of these came in one piece

    status, result, _ = compare(tmp_path, serve("a"), at_once, capsys=capsys)

    assert status == 0
    assert {cell["metric"] for cell in result["cells"]} == {"ttft_s", "e2e_s", "itl_s"}
    assert any("concurrency 1 has tpot_s of 0" in words for words in result["differences"])


def test_too_few_samples_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = serve("a")
    few["cells"][0]["samples"] = {name: values[:2] for name, values in few["cells"][0]["samples"].items()}

    _, result, text = compare(tmp_path, few, few, capsys=capsys)

    assert set(verdicts(result, "ttft_s").values()) == {"too few rounds"}
    assert "3 with too few rounds to tell" in text


def test_brackets_in_names_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = serve("a", label="[/b]")
    named["cells"][0]["name"] = "flash[int8]"

    status, _, text = compare(tmp_path, named, named, capsys=capsys)

    assert status == 0
    assert "flash[int8]" in text and "[/b]" in text


def test_files_and_a_page_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, result, _ = compare(tmp_path, serve("a"), serve("b", ttft=1.2), "--output", str(tmp_path / "out"), capsys=capsys)

    kept, table, page = map(Path, result["files"])
    assert json.loads(kept.read_text())["cells"] == result["cells"]
    assert [row["metric"] for row in csv.DictReader(table.read_text().splitlines())] == [
        cell["metric"] for cell in result["cells"]
    ]
    text = page.read_text()
    assert text.count('<tr class="wrong">') == 1
    assert "1 regression: by" in text


@pytest.mark.parametrize(
    ("b", "argv", "says"),
    [
        ("{", [], "b.json cannot be read as JSON"),
        ("[]", [], "b.json is no result of a bench"),
        ({"schema": "tightwire.comm-policy/1"}, [], "b.json is no result of a bench"),
        ({"schema": "tightwire.bench.swim/1"}, [], "b.json has no samples to compare"),
        (ttft("b", flash=1.0), [], "is a result of bench serve and"),
        (serve("b", cells=[]), [], "b.json has no cells: nothing was measured"),
        (
            {**serve("b"), "schema": "tightwire.bench.serve/1", "cells": [{"load": "concurrency 1"}]},
            [],
            "has no samples to compare",
        ),
        (serve("b", cells=[{"name": "concurrency 1", "samples": {}, "batch": 0}]), [], "`int` >= 1 - at `$[0].batch`"),
        (serve("b", cells=[{"name": None, "samples": {}}]), [], "Expected `str`, got `null` - at `$[0].name`"),
        (serve("b", metrics=[metric("ttft_s", scale="1e3")]), [], "Expected `float`, got `str`"),  # pyright: ignore
        (serve("b", pairing_keys=3), [], "Expected `array`, got `int`"),
        (serve("b", cells=[{"name": "rate 9/s", "samples": {}}]), [], "no cell in common"),
        (serve("b", cells=[{"name": "concurrency 1", "samples": {}}]), [], "no cell has ttft_s or tpot_s or e2e_s"),
        (serve("b"), ["--metric", "speed"], "no metric 'speed' to compare; it has ttft_s, tpot_s, e2e_s, itl_s"),
    ],
)
def test_incomparable_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], b: Any, argv: list[str], says: str
) -> None:
    status, result, text = compare(tmp_path, serve("a"), b, *argv, capsys=capsys)

    assert status == 2
    assert says in result["error"] and says in text


def test_ratios_to_different_baselines_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = ttft("b", flash=1.0, baseline="native#2")

    status, result, _ = compare(tmp_path, ttft("a", flash=1.0), other, capsys=capsys)

    assert status == 2 and "the baseline, which is native in" in result["error"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["a.json"], "the following arguments are required"),
        (["a.json", "b.json", "--tolerance", "much"], "expected a share such as 5% or 0.05"),
        (["a.json", "b.json", "--tolerance", "-1"], "--tolerance: must be at least 0"),
    ],
)
def test_bad_options_are_refused(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["compare", *argv])

    assert exit_.value.code == 2
    assert says in capsys.readouterr().err
