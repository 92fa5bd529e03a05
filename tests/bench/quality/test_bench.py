"""The whole bench on a tiny model: results that agree with themselves, files, policy files that `serve` obeys, refusals."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny

from tightwire.bench.cli import main
from tightwire.bench.quality import bench as quality_bench
from tightwire.comm.policy.rules import read_policy_file


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("model") / "tiny"))


def bench(*argv: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any], str]:
    """Exit code, last line, everything before it and stderr."""
    status = main(["quality", *argv])
    captured = capsys.readouterr()
    *text, last = captured.out.splitlines()
    return status, json.loads(last), "\n".join([*text, captured.err])


SMALL = ["--tokens", "120", "--window", "40"]


def test_encoded_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(make_tiny(tmp_path / "tiny", num_hidden_layers=3))
    names = "one-shot,weights:int8,weights:int4"
    argv = [model, *SMALL, "--world-sizes", "2", "--dtype", "float32", "--algorithms", names, "--budget", "kl=10"]

    status, result, _ = bench(*argv, capsys=capsys)

    assert status == 0 and result["error"] is None
    exact, int8, int4 = result["cells"]
    assert (exact["algorithm"], exact["kl_max"]) == ("one-shot", 0)
    assert (int8["algorithm"], int4["algorithm"]) == ("weights:int8", "weights:int4")
    assert 0 < 10 * int8["kl_mean"] < int4["kl_mean"]
    # Their sums are the exact ones, of as many bytes and without noise; a budget chooses among sums.
    assert int4["bytes_share"] == 1 and int4["sqnr_db"]["o_proj"]["total"] is None
    assert result["choice"]["algorithm"] == "one-shot"


def test_activations_in_eight_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(make_tiny(tmp_path / "tiny", head_dim=32))
    options = ["--world-sizes", "2", "--dtype", "float32", "--quantization", "int8"]

    argv = [*options, "--algorithms", "one-shot,activations:int8", "--budget", "kl=10"]
    status, result, _ = bench(model, *SMALL, *argv, capsys=capsys)

    assert status == 0 and result["error"] is None
    exact, int8 = result["cells"]
    assert (int8["algorithm"], exact["kl_max"]) == ("activations:int8", 0)
    assert 0 < int8["kl_mean"] < 0.01 and result["choice"]["algorithm"] == "one-shot"


def test_caches_in_eight_bits(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--world-sizes", "2", "--dtype", "float32", "--algorithms", "kv:float32,kv:int8", "--budget", "kl=10"]
    status, result, _ = bench(model, *SMALL, *argv, capsys=capsys)

    assert status == 0 and result["error"] is None
    exact, int8 = result["cells"]
    assert (int8["algorithm"], exact["kl_max"]) == ("kv:int8", 0)
    assert 0 < int8["kl_mean"] < 0.01 and result["choice"] is None  # no AllReduce was measured


def test_generated_tokens_and_single_sites(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = "flash:int4,int4,flash:int4,int4@o_proj,flash:int4,none,spec:affine-int4"
    argv = ["--dtype", "float32", "--decode", "5", "--algorithms", names, "--budget", "kl=10"]
    status, result, text = bench(model, *SMALL, *argv, capsys=capsys)

    assert (
        status == 0 and result["error"] is None and result["tokens"] == 3 * 4
    )  # windows, generated tokens with a next one
    both, at_one, leg, _ = result["cells"]
    assert all(cell["kl_mean"] > 0 for cell in result["cells"])
    assert at_one["sqnr_db"]["down_proj"]["total"] is None and both["sqnr_db"]["o_proj"] == at_one["sqnr_db"]["o_proj"]
    assert both["bytes_per_token"] < leg["bytes_per_token"] < at_one["bytes_per_token"] + leg["bytes_per_token"]
    assert "the cheapest is --allreduce-decode flash:int4,int4" in text


def test_a_run_with_a_mix(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "mix.json"
    names = "one-shot,flash-int8-plain,flash-int6-plain,flash:int4-had,int4-had"
    argv = [model, *SMALL, "--world-sizes", "2,3", "--algorithms", names, "--budget", "kl=0.001"]
    argv += ["--search", "--search-tokens", "200"]

    status, result, text = bench(*argv, "--write-policy", str(policy), "--output", str(tmp_path), capsys=capsys)

    assert status == 0 and result["error"] is None
    arms = ["one-shot", "flash-int8-plain", "flash-int6-plain", "flash:int4-had,int4-had", "mix"]
    assert [(row["world_size"], row["algorithm"]) for row in result["cells"]] == [
        (w, name) for w in (2, 3) for name in arms
    ]
    for row in result["cells"]:
        if row["algorithm"] == "one-shot":
            assert (row["kl_max"], row["perplexity_delta"], row["top1_agreement"]) == (0, 0, 1)
            assert row["sqnr_db"]["o_proj"]["layers"] == [None, None]
        else:
            assert 0 < row["kl_mean"] <= row["kl_max"] and row["kl_p99"] <= row["kl_max"]
            assert len(row["sqnr_db"]["down_proj"]["layers"]) == 2
    by_name = {row["algorithm"]: row for row in result["cells"] if row["world_size"] == 2}
    assert by_name["flash-int8-plain"]["kl_mean"] < by_name["flash-int6-plain"]["kl_mean"] / 10
    assert by_name["mix"]["bytes_per_token"] <= by_name["flash-int6-plain"]["bytes_per_token"]
    assert by_name["mix"]["kl_mean"] < by_name["flash-int6-plain"]["kl_mean"] / 3
    # The sum over places foretells what all of them do together, but for the feedback between them.
    assert 1 / 4 < result["search"]["predicted_kl"] / by_name["mix"]["kl_mean"] < 4
    assert result["choice"]["algorithm"] == "mix" and "the cheapest is the mix" in text

    kept, table, page = map(Path, result["files"])
    means = [cell["samples"] for cell in json.loads(kept.read_text())["cells"]]
    assert len(means) == 2 * 5 and all(len(own["nll"]) == 3 for own in means)
    assert [row["algorithm"] for row in csv.DictReader(table.read_text().splitlines())] == 2 * arms
    assert page.read_text().count("<img") == 2
    file = read_policy_file(policy)
    assert file.made_for["num_layers"] == 2 and "world_size" not in file.made_for
    assert all(rule.phase == "prefill" for rule in file.rules)

    # The file is an arm like the mix that it came from, to the bit.
    argv = [model, *SMALL, "--world-sizes", "2", "--algorithms", f"policy:{policy}"]
    _, again, _ = bench(*argv, "--search", "--search-tokens", "200", capsys=capsys)
    assert [row["kl_mean"] for row in again["cells"]] == [by_name["mix"]["kl_mean"]] * 2


def test_the_cheapest_within_the_budget_is_written(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "policy.json"
    argv = [model, *SMALL, "--world-sizes", "2", "--algorithms", "flash-int8-plain,flash-int4-plain,flash-int6-plain"]

    status, result, text = bench(*argv, "--budget", "kl=0.001", "--write-policy", str(policy), capsys=capsys)

    assert status == 0 and result["choice"]["algorithm"] == "flash-int8-plain"
    assert "within kl=0.001 at 2 ranks, the cheapest is --allreduce flash-int8-plain" in text
    assert f"{policy} is written: tightwire serve --allreduce policy:{policy}" in text
    file = read_policy_file(policy)
    assert [(rule.site, rule.algorithm, rule.layers) for rule in file.rules] == [
        ("o_proj", "flash-int8-plain", None),
        ("down_proj", "flash-int8-plain", None),
    ]
    assert file.made_for["world_size"] == 2

    status, result, _ = bench(*argv, "--budget", "kl=1e-9", "--write-policy", str(tmp_path / "none"), capsys=capsys)
    assert status == 1 and "nothing is within" in result["error"] and result["choice"]["algorithm"] is None
    assert not (tmp_path / "none").exists()


def test_items_are_answered_by_every_arm(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [model, "--tokens", "96", "--window", "48", "--world-sizes", "2", "--algorithms", "one-shot,flash-int3"]
    status, result, text = bench(*argv, "--dtype", "float32", "--items", "6", capsys=capsys)
    exact, lossy = result["cells"]
    assert status == 0 and result["items"] == 6 and "exact sums answer" in text
    assert exact["items_as_exact"] == 1.0 and exact["items_right"] == exact["items_right_exact"]
    assert 0 <= lossy["items_right"] <= 1 and 0 < lossy["items_reach"] < 1
    status, result, text = bench(*argv, "--window", "40", "--items", "6", capsys=capsys)
    assert status == 2 and "--items needs --window 48 or more, got 40" in result["error"]


def test_an_interrupted_run_keeps_its_measurements(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    kept = quality_bench.QualityBench.keep
    monkeypatch.setattr(quality_bench.QualityBench, "keep", lambda self: (kept(self), interrupted()))

    status, result, text = bench(
        *(model, *SMALL, "--world-sizes", "2", "--algorithms", "flash-int8", "--output", str(tmp_path)), capsys=capsys
    )

    assert (status, result["error"]) == (130, "interrupted") and "interrupted" in text
    assert len(result["cells"]) == 1
    assert json.loads(Path(result["files"][0]).read_text())["cells"][0]["kl_mean"] == result["cells"][0]["kl_mean"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--algorithms", "flash-int9"], "unknown all-reduce 'flash-int9'"),
        (["--algorithms", "hierarchical:int8"], "ranks are on one"),
        (["--algorithms", "weights:int3"], "use weights:int8 or weights:int4"),
        (["--algorithms", "ring,foo"], "argument --algorithms: unknown all-reduce 'foo'; choose one of auto, native"),
        (["--search", "foo"], "argument --search: unknown all-reduce 'foo'; choose one of auto, native"),
        (["--search", "kl=x"], "argument --search: 'kl=x' is not a budget; write kl=0.01"),
        (["nosuchmodel"], "argument model: no such model: 'nosuchmodel' is neither a file nor a folder"),
        (["--search", "weights:int8"], "a mix consists of AllReduces"),
        (["--search", "activations:int8"], "a mix consists of AllReduces"),
        (["--algorithms", "flash-int8,flash-int8"], "takes different values"),
        (["--world-sizes", "1,2"], "2 to 64, got 1,2"),
        (["--world-sizes", "two"], "got 'two'"),
        (["--budget", "kl=1%"], "is not a budget; write kl=0.01"),
        (["--budget", "ppl=-1%"], "is not a budget"),
        (["--write-policy", "x.json"], "give one of them"),
        (["--budget", "kl=1", "--write-policy", "no/where/x.json"], "cannot be written"),
        (["--tokens", "0"], "--tokens: must be at least 1"),
        (["--algorithms", "flash-int4@up_proj"], "write flash-int4@o_proj or flash-int4@down_proj"),
        (["--decode", "100", "--items", "3"], "leave --search, --items and --write-policy out"),
        (["--decode", "505"], "must leave 8 of --window 512 tokens, got 505"),
    ],
)
def test_wrong_options_are_refused(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["quality", *argv])
    assert caught.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_options_that_model_or_text_forbid_are_refused_before_weights_are_read(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality_bench, "ThreadRanks", None)
    (tmp_path / "short").write_text("too short a text")
    (tmp_path / "file").touch()
    for argv, message in (
        (["--text", str(tmp_path / "short")], "the text has 16 tokens"),
        (["--text", str(tmp_path / "missing")], "cannot be read"),
        (["--world-sizes", "5"], "at most 4, the number of the model's query heads"),
        (["--window", "1024"], "exceeds the model's 512 positions"),
        (["--algorithms", "weights:int8", "--quantization", "int8"], "encodes plain matrices only"),
        (["--algorithms", "activations:int8"], "is for packed weights"),
        (["--output", str(tmp_path / "file")], "cannot be written"),
    ):
        status, result, text = bench(model, "--world-sizes", "2", *argv, capsys=capsys)
        assert status == 2 and message in result["error"] and message in text, argv
        assert result["cells"] == []
