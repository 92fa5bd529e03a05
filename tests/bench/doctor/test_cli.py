"""``tightwire doctor``: which probes run, the page or JSON, the exit code. The real ones run once, on this machine."""

import asyncio
import json

import pytest

from tightwire.bench.doctor import cli
from tightwire.bench.doctor.facts import CpuFacts, CudaFacts, Facts, MemoryFacts
from tightwire.bench.doctor.probing import Finding, run_probe

CPU = CpuFacts("EPYC", "x86_64", 8, 8, 8, [], False, [])
MEMORY = MemoryFacts(1 << 36, 1 << 36, 1 << 33, 1 << 33, None, None)
CUDA = CudaFacts("2.13.0", "13.0", None, True, [], [(0, 1), (1, 0)])


class Probes:
    """Stands in for ``run_probe``: gives each probe its facts or its problem."""

    def __init__(self, **by_name: Facts | str) -> None:
        self.by_name, self.limits = by_name, dict[str, float]()

    async def __call__(self, name: str, target: str, limit_s: float) -> Finding:
        self.limits[name] = limit_s
        outcome = self.by_name.get(name)
        return Finding(name, 0.1, None, outcome) if isinstance(outcome, str) else Finding(name, 0.1, outcome)


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> Probes:
    probes = Probes(processor=CPU, memory=MEMORY)
    monkeypatch.setattr(cli, "run_probe", probes)
    return probes


def test_a_sound_machine_exits_with_0(probes: Probes, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert "EPYC" in out and "--device cpu --tp 2 --transport shared-memory" in out
    assert probes.limits == dict.fromkeys(cli.LOOKING, 60.0)


def test_a_failed_probe_exits_with_1_and_is_reported(probes: Probes, capsys: pytest.CaptureFixture[str]) -> None:
    probes.by_name["GPUs"] = "did not end within 3 s and was stopped"
    assert cli.main(["--timeout-s", "3"]) == 1
    assert "the probe of GPUs did not end within 3 s" in " ".join(capsys.readouterr().out.split())
    assert set(probes.limits.values()) == {3.0}


def test_json_is_one_object_with_everything(probes: Probes, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--json", "--tp", "9"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["advice"][0]["text"].startswith("9 ranks for 8 cores")
    assert [finding["probe"] for finding in report["findings"]][:2] == ["processor", "memory"]
    assert report["findings"][0]["facts"]["type"] == "cpu"


def test_only_possible_tests_run(probes: Probes) -> None:
    cli.main([])
    assert "peer access" not in probes.limits
    probes.by_name["torch"] = CUDA
    cli.main([])
    assert "peer access" in probes.limits


@pytest.mark.parametrize(("option", "words"), [("--timeout-s", "at most 3600 seconds"), ("--tp", "whole number")])
def test_wrong_numbers_are_refused_with_the_range(option: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([option, "soon"])
    assert words in (err := capsys.readouterr().err) and "got soon" in err


@pytest.mark.parametrize("arguments", [["--timeout-s", "0"], ["--timeout-s", "nan"], ["--tp", "0"], ["--verbose"]])
def test_wrong_options_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        cli.main(arguments)
    assert refusal.value.code == 2 and "usage: tightwire doctor" in capsys.readouterr().err


async def test_every_reading_probe_works_on_this_machine() -> None:
    findings = await asyncio.gather(*(run_probe(name, target, 120.0) for name, target in cli.LOOKING.items()))
    assert {finding.probe: finding.problem for finding in findings} == dict.fromkeys(cli.LOOKING)
    assert len({type(finding.facts) for finding in findings}) == len(cli.LOOKING)
