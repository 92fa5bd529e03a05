import csv
import json
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny

from tightwire.bench.cli import main

QUICK = ("--batches", "3", "--repeats", "3", "--context", "20")


def bench(*argv: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any], str]:
    """Run ``bench stream``: exit code, last line, everything before it and stderr."""
    status = main(["stream", *argv])
    captured = capsys.readouterr()
    *text, last = captured.out.splitlines()
    return status, json.loads(last), "\n".join([*text, captured.err])


@pytest.fixture(name="model")
def fixture_model(tmp_path: Path) -> str:
    return str(make_tiny(tmp_path / "m", num_hidden_layers=5, max_position_embeddings=1024))


@pytest.mark.slow
def test_every_cell_is_measured_and_kept(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, result, text = bench(
        *(model, *QUICK, "--sources", "host,disk,files", "--codecs", "none,int4", "--rates", "16MB,32MB"),
        *("--batches", "3,16", "--dtype", "float32", "--stream-layers", "4", "--tp", "2"),
        *("--output", str(tmp_path / "out"), "--label", "x"),
        capsys=capsys,
    )

    assert status == 0 and result["error"] is None
    assert "4 of 5 layers streamed" in text and "of 20 cells" in text
    arms = [(source, codec, rate) for source in ("host", "disk") for rate in (16e6, 32e6) for codec in ("none", "int4")]
    arms += [("files", "none", rate) for rate in (16e6, 32e6)]
    assert [
        (cell["tp"], cell["source"], cell["codec"], cell["rate_bytes_per_s"], cell["rows"]) for cell in result["cells"]
    ] == [(2, *arm, batch) for arm in arms for batch in (3, 16)]
    for cell in result["cells"]:
        assert cell["bytes_per_s"] == pytest.approx(cell["bytes_per_step"] / cell["fetch_s"])
        assert cell["bound_s"] == max(cell["fetch_s"], cell["compute_s"])
        assert cell["over_bound"] == pytest.approx(cell["seconds"]["p50"] / cell["bound_s"])
        assert 0 <= cell["overlap"] <= 1
        assert cell["seconds"]["n"] == 3
        assert (cell["io"] in ("direct", "dropped")) == (cell["source"] == "disk")
        assert cell["same_tokens"] == 1 or cell["codec"] == "int4"
    assert result["cells"][0]["bytes_per_step"] > 3 * result["cells"][2]["bytes_per_step"]  # int4

    kept, table, page = map(Path, result["files"])
    cells = json.loads(kept.read_text())["cells"]
    assert not [folder for folder in kept.parent.iterdir() if folder.is_dir()]  # what was prepared is gone
    assert all(len(cell["samples"]["step"]) == 3 for cell in cells)
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == len(cells)
    assert float(rows[0]["step_s"]) == cells[0]["seconds"]["p50"]
    html = page.read_text()
    assert "All cells" in html and "of 20 cells" in html


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ("random:llama-3.2-1b", "--sources", "host,files"),
            "random weights are not in a file; remove files from --sources",
        ),
        (("--stream-layers", "6"), "--stream-layers must be 3 to 5 layers, got 6"),
        (("--tp", "65"), "--tp: must be 1 to 64, got 65"),
        (("--context", "1025"), "--context 1025 exceeds the model's 1024 positions"),
        (("no-such-model",), "no such model: 'no-such-model'"),
    ],
)
def test_impossible_options_are_refused_and_leave_no_file(
    argv: tuple[str, ...], words: str, model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    given = argv if not argv[0].startswith("--") else (model, *argv)
    try:
        status, result, text = bench(*given, "--output", str(out), capsys=capsys)
    except SystemExit as ended:
        assert ended.code == 2 and words in capsys.readouterr().err
        return

    assert (status, result["cells"], result["files"]) == (2, [], [])
    assert words in result["error"] and result["error"] in text
    assert not out.exists() or list(out.iterdir()) == []
