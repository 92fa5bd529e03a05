import json
from pathlib import Path
from typing import Any

import pytest

from tightwire.bench.quality import front


def cell(name: str, share: float, db: float | None, kl: float) -> dict[str, Any]:
    layers = {"layers": [db, db]}
    row = {"algorithm": name, "world_size": 2, "bytes_share": share, "kl_mean": kl, "perplexity_delta": kl}
    return row | {"tokens": 100} | {"sqnr_db": {"o_proj": layers, "down_proj": layers}}


def test_points_of_all_results_are_drawn_and_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"world_sizes": [2], "hidden_size": 64, "model": "tiny"}
    first = [
        cell("flash-int4", 0.28, 18.0, 0.015),
        cell("two-shot", 1.0, None, 0.0),
        cell("spec:amd-int6", 0.41, 29, 9),
    ]
    second = [
        cell("flash-int4", 0.28, 1.0, 1.0),
        cell("flash-int4-plain", 0.27, 15, 0.9),
        cell("spec:uniform-int4", 0.25, 9, 7),
    ]
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, cells in zip(paths, (first, second), strict=True):
        path.write_text(json.dumps(facts | {"cells": cells}))
    front.main(tmp_path / "out.svg", paths)
    shown = capsys.readouterr().out
    assert [line.split(" | ")[0] for line in shown.splitlines()[2:]] == [
        f"| {name}" for name in ("flash-int4", "flash-int4-plain", "spec:amd-int6", "spec:uniform-int4")
    ]
    ours = shown.splitlines()[2]  # of the first result
    assert ours.startswith("| flash-int4 | 4.25 | 4.48 | 1") and ours.endswith(" | 18.0 | 18.0 | 0.015 | +1.50 |")
    svg = (tmp_path / "out.svg").read_text()
    assert "tiny, 2 ranks, 100 tokens" in svg and all(family in svg for family in ("Tightwire", "AMD", "uniform"))
