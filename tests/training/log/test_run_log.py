"""The log of a run: a line per record, the same in TensorBoard, lines after a checkpoint dropped; and the terminal."""

import io
import json
from pathlib import Path

import pytest

from tightwire.run_page import read_log
from tightwire.training.log.run_log import (
    LOG,
    EvaluationRecord,
    RunLog,
    StepRecord,
    Terminal,
    describe,
)


def _step(step: int) -> StepRecord:
    return StepRecord(
        step=step,
        loss=4.0 / step,
        lr=1e-3,
        grad_norm=0.5,
        tokens=4096,
        seconds=0.5,
        mfu=0.25,
        memory_bytes=3 << 30,
        wire_bytes=1 << 20,
        exposed_ms=12.0,
    )


_EVALUATION = EvaluationRecord(step=2, held_out_loss=3.5, tokens=64, samples=(("The", " end"),))


def test_records_are_lines_of_json(tmp_path: Path) -> None:
    log = RunLog(tmp_path, after_step=0, tensorboard=False)
    log.add(_step(1))
    log.add(_EVALUATION)
    log.close()

    step, evaluation = read_log(tmp_path / LOG)
    assert (step["loss"], step["tokens_per_s"]) == (4.0, 8192.0)
    assert (evaluation["held_out_loss"], evaluation["samples"]) == (3.5, [["The", " end"]])


def test_a_resumed_run_drops_lines_after_its_checkpoint(tmp_path: Path) -> None:
    log = RunLog(tmp_path, after_step=0, tensorboard=False)
    for step in range(1, 6):
        log.add(_step(step))
    log.close()
    with (tmp_path / LOG).open("a") as file:
        file.write('{"step": 6, "lo')  # cut off by a kill

    log = RunLog(tmp_path, after_step=3, tensorboard=False)
    log.add(_step(4))
    log.close()
    assert [line["step"] for line in read_log(tmp_path / LOG)] == [1, 2, 3, 4]


def test_a_full_disk_fails_a_line_but_not_closing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RunLog(tmp_path, after_step=0, tensorboard=False)
    log.close()
    full = open("/dev/full", "a")  # noqa: SIM115, it is `close` below that is looked at
    monkeypatch.setattr(log, "_file", full)

    with pytest.raises(OSError, match="No space left"):
        log.add(_step(1))
    log.close()  # or its error would stand for what the run ended with


def test_tensorboard_has_the_same_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = RunLog(tmp_path, after_step=0, tensorboard=True)
    log.add(_step(1))
    log.add(_step(2))
    log.add(_EVALUATION)
    log.close()

    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 4.0), (2, 2.0)]
    assert [event.step for event in events.Scalars("mfu")] == [1, 2]
    assert [event.value for event in events.Scalars("held_out_loss")] == [3.5]


def test_a_terminal_line_shows_all_values() -> None:
    assert describe(_step(2)) == (
        "loss 2.0000  lr 0.001  grad 0.5  8.19k tok/s  MFU 25.0 %  memory 3GiB  wire 1MiB  waited 12 ms of 500"
    )


def test_lines_are_printed_at_the_configured_interval() -> None:
    stream = io.StringIO()
    terminal = Terminal(30, 10, stream=stream)
    for step in range(1, 31):
        terminal.step(_step(step))
    terminal.evaluation(_EVALUATION)
    lines = stream.getvalue().splitlines()
    assert [line.split("/")[0] for line in lines[:4]] == ["step  1", "step 10", "step 20", "step 30"]
    assert lines[4:] == ["held-out loss 3.5000 after step 2 (64 tokens)", "    'The' -> ' end'"]


def test_a_terminal_prints_the_same_lines_above_its_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    terminal = Terminal(2, 1, stream=stream)
    terminal.step(_step(1))
    terminal.close()
    assert f"step 1/2  {describe(_step(1))}" in stream.getvalue()


def test_other_ranks_print_nothing() -> None:
    stream = io.StringIO()
    Terminal(1, 1, rank=1, stream=stream).step(_step(1))
    assert stream.getvalue() == ""


def test_records_have_plain_numbers() -> None:
    assert json.loads(json.dumps(_step(1).values())) == _step(1).values()
