"""The plot of the AllReduce's share has the lines and points of the results it is drawn from."""

import json
from pathlib import Path

import pytest
import ttft_plot

pytest.importorskip("matplotlib")


def _write(path: Path, tp: int, error: str | None = None) -> str:
    def cell(arm: str, tokens: int, concurrency: int) -> dict[str, object]:
        parts = {"compute_s": tokens / 1e4, "codec_s": None, "allreduce_s": 3 * tokens / 1e4}
        times = {"parts_s": parts, "rest_s": 5.0, "ttft_s": {"p50": tokens / 2e3}}
        return {"arm": arm, "prompt_len": tokens, "concurrency": concurrency, **times}

    cells = [cell(arm, tokens, many) for arm in ("auto", "two-shot") for tokens in (128, 4096) for many in (1, 8)]
    path.write_text(json.dumps({"schema": "tightwire.bench.ttft/2", "tp": tp, "error": error, "cells": cells}))
    return str(path)


def test_the_share_is_drawn_and_printed_by_ranks_length_and_concurrency(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [_write(tmp_path / f"tp{tp}.json", tp) for tp in (2, 4)]
    assert ttft_plot.main([str(tmp_path / "share.svg"), *files]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == "| TTFT, ms (share) | 128 | 4096 |"
    assert "| TP 4, two-shot, 8 at a time | 64 (75%) | 2,048 (75%) |" in printed and "auto" not in printed
    text = (tmp_path / "share.svg").read_text()
    assert all(f"TP {tp}, two-shot, 1 at a time" in text for tp in (2, 4)) and "8 at a time" not in text


def test_one_that_failed_is_refused_and_one_that_was_interrupted_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = _write(tmp_path / "failed.json", 2, error="a rank was lost")
    assert ttft_plot.main([str(tmp_path / "share.svg"), failed]) == 1
    assert "failed.json is no result of a `tightwire bench ttft" in capsys.readouterr().err
    assert ttft_plot.main([failed]) == 2
    stopped = _write(tmp_path / "stopped.json", 2, error="interrupted")
    assert ttft_plot.main([str(tmp_path / "share.svg"), stopped]) == 0
