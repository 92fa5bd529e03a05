import json
from pathlib import Path

import pytest
from helpers.training.training_runs import write_config
from training_timeline import KINDS, Timeline, main

from tightwire.training.run import setup


def test_a_run_writes_the_trace_of_its_buckets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "Engine", setup.Engine)  # which the tool replaces
    out = f"{tmp_path}/trace"
    assert (
        main(out, [str(write_config(tmp_path)), "schedule={steps: 2, warmup_steps: 0}", "parallel.sharding=zero3"]) == 0
    )
    events = json.loads(Path(f"{out}-rank-0.json").read_text())["traceEvents"]
    bars = {(event["cat"], event["name"]) for event in events if event["ph"] == "X"}
    assert {(kind, f"blocks.{block}") for kind in KINDS for block in range(3)} <= bars
    assert "beside computing: gather " in capsys.readouterr().out


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
    assert timeline.hidden("gather") == 0.0
