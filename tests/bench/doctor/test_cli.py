"""``tightwire doctor``: the page or JSON, the exit code. The real probes run once, on this machine."""

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tightwire.bench.doctor import cli
from tightwire.bench.doctor.advice import Facts, Speed
from tightwire.bench.doctor.gpus import Driver, Gpu, PeerTest, Torch
from tightwire.bench.doctor.host import Host, read_host
from tightwire.bench.doctor.probing import Output
from tightwire.model.checkpoint import catalog

GPU = Gpu(0, "RTX 3090", "0000:01:00.0", 24 << 30, "580.65", 1, 4, None, 16, None)
HOST = read_host()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The doctor without GPUs and without measuring; the first entry is the driver's problem."""
    problem: list[str | None] = [None]
    monkeypatch.setattr(
        cli, "read_driver", lambda limit_s: (Driver(absent_reason="nvidia-smi is not installed"), problem[0])
    )
    monkeypatch.setattr(cli, "read_host", lambda: HOST)
    monkeypatch.setattr(cli, "measure_speed", lambda options, limit_s: Speed("smollm2-135m", 45.0))
    return problem


def test_the_verdict_is_first_and_what_is_missing_is_left_out(
    driver: list[str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["--tp", "1"])
    out = capsys.readouterr().out
    assert "expect about 45 tokens/s" in " ".join(out.split("\n\n")[0].split())
    assert HOST.cpu in out and "use  --tp 1" in out
    assert "nvidia-smi" not in out and "PCIe" not in out
    cli.main(["--tp", "1", "--verbose"])
    verbose = capsys.readouterr().out
    assert "nvidia-smi is not installed" in verbose and "host.numa_nodes" in verbose


def test_a_failed_probe_exits_with_1_and_is_reported(
    driver: list[str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    driver[0] = "did not end within 3 s and was stopped"
    assert cli.main(["--timeout-s", "3", "--tp", "1"]) == 1
    assert "the probe of GPUs did not end within 3 s" in " ".join(capsys.readouterr().out.split())


def test_json_is_one_object_with_everything(driver: list[str | None], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--json", "--tp", "999"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False and report["advice"][0]["text"].startswith("999 ranks for")
    assert report["facts"]["host"]["cpu"] == HOST.cpu and report["speed"]["tokens_per_s"] == 45.0


def test_every_fact_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    torch = Torch("13.0", "2.29.1", ["RTX 3090"] * 2, [(0, 1)], [PeerTest(0, 1, False, "7 values arrived wrong", None)])
    facts = Facts(host=HOST, driver=Driver([GPU]), torch=torch)
    report = cli.Report(True, "2 GPUs (RTX [3090])", facts, Speed("m"), [])
    cli.show(report, Console(width=80, highlight=False), verbose=True)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    assert "RTX [3090]" in words and "torch.tests.0.detail 7 values arrived wrong" in words
    assert "driver.gpus.0.memory_bytes 24GiB" in words and "driver.gpus.0.width None" in words


def test_the_speed_is_measured_with_the_advised_options(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], limit_s: float) -> Output:
        commands.append(command)
        return Output(data=b"5, 6", times_s=[10.0, 11.0, 12.0])

    monkeypatch.setattr(cli, "is_cached", lambda name: True)
    monkeypatch.setattr(cli, "run_probe", run)
    assert cli.measure_speed("--tp 2", 60.0).tokens_per_s == 47 / 2
    assert commands[0][:4] == [sys.executable, "-m", "tightwire", "generate"] and "--tp" in commands[0]


def test_a_model_that_is_not_there_is_not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(catalog, "cache_folder", lambda: tmp_path)
    speed = cli.measure_speed("--tp 2", 60.0)
    assert speed.tokens_per_s is None and "tightwire pull" in speed.reason


@pytest.mark.parametrize("arguments", [["--timeout-s", "0"], ["--timeout-s", "nan"], ["--tp", "0"], ["--tp", "soon"]])
def test_wrong_options_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        cli.main(arguments)
    assert refusal.value.code == 2 and "usage: tightwire doctor" in capsys.readouterr().err


def test_this_machine_has_facts() -> None:
    assert isinstance(HOST, Host) and HOST.cpu and HOST.total_bytes > HOST.available_bytes > 0
