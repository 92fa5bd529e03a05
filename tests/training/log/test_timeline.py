import json
from pathlib import Path

import pytest
from helpers.training.training_runs import write_config

from tightwire.training.cli import train
from tightwire.training.log.timeline import KINDS, Timeline


def test_a_run_writes_the_trace_of_its_buckets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = "schedule={steps: 2, warmup_steps: 0}"
    assert train([str(write_config(tmp_path)), steps, "parallel.sharding=zero3", "log.trace=true"]) == 0
    (written,) = tmp_path.rglob("trace-rank-*.json")
    assert written.name == "trace-rank-0.json"
    events = json.loads(written.read_text())["traceEvents"]
    bars = {(event["cat"], event["name"]) for event in events if event["ph"] == "X"}
    assert {(kind, f"blocks.{block}") for kind in KINDS for block in range(3)} <= bars
    assert f"{written.parent}/trace-rank-*.json opens in ui.perfetto.dev" in capsys.readouterr().err


def test_a_trace_that_cannot_be_written_does_not_fail_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Timeline, rank: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(Timeline, "chrome", full)
    assert train([str(write_config(tmp_path)), "schedule={steps: 1, warmup_steps: 0}", "log.trace=true"]) == 0
    assert "WARNING: the trace could not be written: No space left on device" in capsys.readouterr().err


def test_a_timeline_has_a_bar_for_each_piece_of_work_and_says_what_ran_beside_computing() -> None:
    timeline = Timeline()
    timeline("gather", True, "block 1", "weights 1")
    timeline("gather", False, "block 1", "weights 1")
    timeline("reduce", False, "block 9", "gradients 1")  # its begin was before the trace
    timeline.work += [("compute", "block 0", "", 10.0, 12.0), ("compute", "block 0", "", 11.0, 13.0)]
    timeline.work += [("reduce", "block 1", "", 12.0, 16.0)]

    *_, gather, first, _, _ = timeline.chrome(3)["traceEvents"]
    assert (gather["name"], gather["cat"], gather["pid"], gather["args"]) == (
        "block 1",
        "gather",
        3,
        {"buffer": "weights 1"},
    )
    assert (first["ts"], first["dur"], first["tid"]) == (10e6, 2e6, 0)
    assert timeline.hidden("reduce") == pytest.approx(0.25)
    assert timeline.hidden("gather") == 0.0 and timeline.hidden("write") is None


def test_the_shares_of_a_long_run_take_no_minutes() -> None:
    timeline = Timeline()
    for number in range(100_000):
        timeline.work += [
            (kind, "block", "", number + at, number + at + 0.4) for kind, at in (("gather", 0.0), ("compute", 0.3))
        ]
    assert timeline.hidden("gather") == pytest.approx(0.25)


def test_a_run_without_a_step_leaves_the_trace_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        str(write_config(tmp_path)),
        "schedule={steps: 1, warmup_steps: 0}",
        "parallel.sharding=zero3",
        "log.trace=true",
    ]
    assert train(given) == 0
    (written,) = tmp_path.rglob("trace-rank-*.json")
    before = written.read_bytes()
    assert train(given) == 0 and written.read_bytes() == before
    assert "no trace is written" in capsys.readouterr().err
