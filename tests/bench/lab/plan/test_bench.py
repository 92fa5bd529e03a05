"""The bench of predictions on scripted servers: ratios, the chosen row, refusals."""

import json
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Self

import pytest

from tightwire.bench.cli import main
from tightwire.bench.lab.plan import bench

_TIMES = {
    "ttft_s": {"128": 0.1, "512": 0.4, "4096": 4.0},
    "token_s": 0.01,
    "handed_s": 0.0,
    "crowd_tokens_per_s": 300.0,
}


class _Hosts:
    def __init__(self, link: str, num: int) -> None:
        self.asked = link, num

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    @contextmanager
    def visiting(self) -> Any:
        yield

    def serve(self, argv: list[str]) -> tuple[list[str], list[list[str]]]:
        return ["serve", *argv], []

    def on(self, host: int, command: list[str]) -> list[str]:
        return command


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    started: list[list[str]] = []

    @contextmanager
    def server(command: list[str], *_: object, **__: object) -> Any:
        started.append(command)
        yield SimpleNamespace(url="", wait_ready=lambda *_: None)

    def load(url: str, load: Any, *, seed: int) -> dict[str, Any]:
        cell = {"ttft_s": {"p50": load.input_len / 1000}, "tpot_s": {"p50": 0.02}, "output_tokens_per_s": 200.0}
        return {"cells": [cell]}

    rows = [{"layout": "tensor", "all_reduce": "auto"}, {"layout": "pipeline", "all_reduce": ""}]
    rows.append({"layout": "hybrid", "all_reduce": "auto", "handed_s": 0.23})  # pyright: ignore[reportArgumentType]
    rows[1]["token_s"] = 0.02  # pyright: ignore[reportArgumentType]
    plan = {"link": {}, "rates": [], "layouts": [{"times": _TIMES | row} for row in rows]}
    done = SimpleNamespace(stdout=json.dumps(plan).encode())
    monkeypatch.setattr(bench, "EmulatedHosts", _Hosts)
    monkeypatch.setattr(bench, "ServerProcess", server)
    monkeypatch.setattr(bench, "bench_serve", load)
    monkeypatch.setattr(bench, "subprocess", SimpleNamespace(run=lambda *_, **__: done, PIPE=subprocess.PIPE))
    return started


def _cells(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, float]:
    assert main(["lab", "plan", *arguments]) == 0
    return {cell["name"]: cell["ratio"] for cell in json.loads(capsys.readouterr().out.splitlines()[-1])["cells"]}


def test_predictions_stand_beside_what_the_servers_did(capsys: pytest.CaptureFixture[str]) -> None:
    ratios = {"TTFT(128) ms": 0.1 / 0.128, "TTFT(512) ms": 0.4 / 0.512, "ms a token": 0.5, "tokens/s of 16": 1.5}
    assert _cells(capsys) == pytest.approx(ratios)


def test_wait_for_keys_and_values_is_in_the_mean_of_the_later_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert _cells(capsys, "--row", "hybrid, auto")["ms a token"] == pytest.approx((0.01 + 0.23 / 23) / 0.02)


def test_flags_of_the_server_and_the_row_are_chosen(
    capsys: pytest.CaptureFixture[str], scripted: list[list[str]]
) -> None:
    assert _cells(capsys, "--serve=--max-num-seqs=32", "--row", "pipeline")["ms a token"] == pytest.approx(1.0)
    assert "--max-num-seqs=32" in scripted[0] and scripted[0][2:4] == ["--layout", "pipeline"]


def test_a_prompt_without_a_prediction_is_refused_before_servers_start(
    capsys: pytest.CaptureFixture[str], scripted: list[list[str]]
) -> None:
    _refused(capsys, "--prompt-lens takes 128, 512, 4096, got 5", "--prompt-lens", "128,5")
    assert not scripted


def test_why_explain_failed_is_shown(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    failing = [sys.executable, "-c", "import sys; sys.exit('no probe' + ' was kept')"]
    monkeypatch.setattr(bench, "subprocess", subprocess)
    monkeypatch.setattr(_Hosts, "on", lambda self, host, command: failing)
    assert main(["lab", "plan"]) == 1
    assert "no probe was kept" in capfd.readouterr().err


def _refused(capsys: pytest.CaptureFixture[str], words: str, *arguments: str) -> None:
    with pytest.raises(SystemExit) as left:
        main(["lab", "plan", *arguments])
    assert left.value.code == 2 and words in " ".join(capsys.readouterr().err.split())


def test_a_row_that_no_table_has_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    _refused(
        capsys,
        "--row: must begin with one of tensor, hybrid, pipeline, as in 'tensor, auto', got 'foo'",
        "--row",
        "foo",
    )
    _refused(capsys, "--row: unknown all-reduce 'foo'; choose one of auto", "--row", "hybrid, foo")
