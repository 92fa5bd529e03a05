"""The comparison with accelerate, with a fake peer: every arm in every round, answers kept, failures reported."""

import json
import sys
from pathlib import Path

import pytest
from tiny import make_tiny

from tightwire.bench.peers import offload

_FAKE = """#!{python}
import json, sys
print(json.dumps({{"ready": sys.argv[2:]}}), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    with open({log!r}, "a") as log:
        log.write(line)
    seconds = {{"resident": 1.0, "cpu": 2.0, "disk": 3.0}}[order["arm"]] * order["batch"]
    print(json.dumps({{"seconds": [seconds] * order["steps"], "tokens": [7] * (order["steps"] + 2)}}), flush=True)
"""


def _executable(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_both_sides_take_turns_and_are_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, log = make_tiny(tmp_path / "m", num_hidden_layers=4, max_position_embeddings=1024), tmp_path / "orders"
    peer = _executable(tmp_path / "peer", _FAKE.format(python=sys.executable, log=str(log)))

    status = offload.OffloadBench.main(
        [str(model), "--peer-python", peer, "--batches", "1,2", "--rounds", "3", "--steps", "2", "--threads", "1"]
    )

    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert status == 0
    assert [(cell["weights"], cell["batch"], cell["accelerate_s"]) for cell in result["cells"]] == [
        *(("resident", 1, 1.0), ("resident", 2, 2.0), ("host none", 1, 2.0), ("host none", 2, 4.0)),
        *(("disk none", 1, 3.0), ("disk none", 2, 6.0)),
    ]
    for cell in result["cells"]:
        ratio = cell["ratio"]
        assert ratio["n"] == 3
        assert ratio["ratio"] == pytest.approx(cell["accelerate_s"] / cell["tightwire_s"])
    assert result["tokens"]["accelerate cpu"] == [7, 7]
    assert len({tuple(result["tokens"][f"tightwire {arm}"]) for arm in ("resident", "host none", "disk none")}) == 1
    assert any(line.split()[:2] == ["resident", "1"] for line in table)
    orders = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(orders) == 3 + 3 * 6  # answers, then every arm and batch in every round


@pytest.mark.parametrize(("peer", "words"), [("#!/bin/sh\nexit 3\n", "ended with status 3"), (None, "cannot be run")])
def test_a_peer_that_does_not_start_is_reported(
    peer: str | None, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = make_tiny(tmp_path / "m", num_hidden_layers=4)
    path = str(tmp_path / "none") if peer is None else _executable(tmp_path / "peer", peer)

    assert offload.OffloadBench.main([str(model), "--peer-python", path]) == 1
    assert words in capsys.readouterr().err
