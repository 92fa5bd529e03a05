"""``tightwire explain --hosts``: the table, its JSON, what to change, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny

from tightwire.server.cli.explain import explain

SPEED = ("--host-speed", "50GB/s,900GFLOP/s")
MODEL = "random:llama-3.2-1b"


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert explain([*arguments, *SPEED, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def found(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    return explained(capsys, MODEL, *arguments)


def test_table_names_every_layout_and_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--memory", "16GiB", "--kv-cache-dtype", "int8")
    assert explain([MODEL, *SPEED, "--hosts", "2", "--link", "100mbit,latency=100us", *more]) == 0
    text = capsys.readouterr().out
    for name in ("one host", "tensor, auto", "tensor, flash-int8", "tensor, flash-int4", "hybrid, auto", "pipeline"):
        assert f"\n* {name} " in text or f"\n  {name} " in text
    assert "Memory: weights, int8 KV cache for 8192 tokens, working space." in text
    assert "TTFT(4096) ms" in text and "94.5 Mbit/s of payload, 100 us one way" in text
    assert "best: hybrid: " in text and "1 GbE would bring 1." in text


def test_json_holds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    data = found(capsys, "--hosts", "2", "--link", "100mbit,latency=100us")
    assert data["best"] == "hybrid, auto" and data["hosts"] == 2
    by_name = {row["times"]["layout"]: row for row in data["layouts"]}
    assert by_name["hybrid"]["times"]["ttft_s"]["512"] < by_name["tensor"]["times"]["ttft_s"]["512"]
    assert len(by_name["pipeline"]["host_bytes"]) == 2 and by_name["hybrid"]["stages"] == [[0, 8], [8, 16]]


def test_the_first_host_holds_the_model_that_drafts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, draft = (str(make_tiny(tmp_path / name)) for name in ("m", "d"))
    plain, with_draft = (
        explained(capsys, model, "--hosts", "2", "--link", "1gbit", *options)["layouts"]
        for options in ((), ("--speculation", "draft", "--draft-model", draft))
    )
    for row, other in zip(plain, with_draft, strict=True):
        (first, *rest), (more, *same) = row["host_bytes"], other["host_bytes"]
        assert first < more and rest == same


def test_long_way_takes_a_pipeline_and_asks_for_a_cable(capsys: pytest.CaptureFixture[str]) -> None:
    data = found(capsys, "--hosts", "2", "--link", "1gbit,latency=5ms")
    assert data["best"] == "pipeline"
    assert any(line.startswith("a cable (100 us) would bring") for line in data["changes"])


def test_the_best_sums_as_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    data = found(capsys, "--hosts", "2", "--link", "100mbit,latency=100us", "--allreduce", "flash-int8")
    assert data["best"] == "hybrid, flash-int8" and data["why"].count("tensor ") == 1


def test_a_layout_that_an_option_rules_out_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    link = ("--link", "100mbit,latency=100us")
    assert explain([MODEL, *SPEED, "--hosts", "2", *link, "--prefix-cache", "all"]) == 0
    text = capsys.readouterr().out
    assert "hybrid, auto" not in text and " pipeline " in text
    assert "\nno hybrid: it does not combine with --prefix-cache all, a stage has no keys" in text
    assert explain([MODEL, *SPEED, "--hosts", "20", *link]) == 0
    assert (
        "\nno pipeline: it does not combine with --stages 20, a stage has a layer or more, " in capsys.readouterr().out
    )


def test_a_layout_of_the_yaml_file_is_one_of_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "serve.yaml").write_text("layout: pipeline\ntp: 2\n")
    data = found(capsys, "--hosts", "4", "--link", "1gbit", "--config", f"{tmp_path}/serve.yaml")
    assert {row["times"]["layout"] for row in data["layouts"]} == {"one host", "tensor", "hybrid", "pipeline"}


def test_memory_that_holds_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    data = found(capsys, "--hosts", "2", "--link", "1gbit", "--memory", "100MiB")
    assert data["best"] is None and data["why"] == "no layout fits into the memory of the hosts"
    assert not any(row["fits"] for row in data["layouts"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "2"], "--hosts needs --link 1gbit,latency=100us, or --network"),
        (["--hosts", "1", "--link", "1gbit"], "must be at least 2"),
        (["--hosts", "99", "--link", "1gbit"], "--hosts must be at most 64, got 99"),
        (["--hosts", "2", "--link", "1gbit", "--tp", "4"], "with a rank on each host; leave --tp out"),
        (["--hosts", "2", "--link", "1gbit", "--layout=pipeline"], "with a rank on each host; leave --layout out"),
        (["--hosts", "x", "--link", "1gbit"], "must be a whole number, got 'x'"),
        (["--hosts", "2", "--link", "fast"], "'fast' is not a link; write 200mbit"),
        (["--memory", "1GiB"], "--memory must be one value, or one for each of the hosts of --hosts N"),
        (
            ["--hosts", "3", "--link", "1gbit", "--memory", "1GiB,2GiB"],
            "--memory must be one value, or one for each of the hosts of --hosts N, got '2 values'",
        ),
        (["--hosts", "2", "--link", "1gbit", "--host-speed", "9"], "'9' is not a host's speed; write"),
    ],
)
def test_wrong_flags_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as refused:
        explain([MODEL, *arguments])
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "2", "--link", "latency=1ms"], "--link latency=1ms has no rate; write it as 1gbit,latency=100us"),
        (["--hosts", "64", "--link", "1gbit"], "cannot split 32 query heads over 64 ranks; use --hosts 32 or less"),
    ],
)
def test_what_cannot_be_planned_is_said(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert explain([MODEL, *SPEED, *arguments]) == 2
    assert message in capsys.readouterr().err
