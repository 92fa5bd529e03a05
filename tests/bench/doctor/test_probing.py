"""A failing probe becomes a finding and never stops the doctor."""

import asyncio
from pathlib import Path

import pytest
from helpers.comm import probe_bodies
from helpers.server.server_process import is_alive, wait_until

from tightwire.bench.doctor.probing import Finding, run_probe

pytestmark = pytest.mark.alone

SLOW_S = 60.0  # of a probe that is to end by itself, on a busy machine


@pytest.fixture(autouse=True)
def _bodies_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(probe_bodies.__file__).parents[2]))


async def probe(body: str, limit_s: float = SLOW_S) -> Finding:
    return await run_probe("the network", f"helpers.comm.probe_bodies:{body}", limit_s)


async def test_facts_are_returned_without_the_output_of_libraries() -> None:
    finding = await probe("well")
    assert (finding.probe, finding.facts, finding.problem) == ("the network", probe_bodies.facts("eth0"), None)


async def test_a_hanging_probe_is_stopped() -> None:
    finding = await probe("hang", 1.0)
    assert finding.facts is None and finding.problem == "did not end within 1 s and was stopped"
    assert finding.seconds < SLOW_S


async def test_facts_from_before_a_hang_are_kept() -> None:
    finding = await probe("hang_later", 3.0)
    assert finding.facts == probe_bodies.facts("eth0", "eth1")
    assert finding.problem is not None and "did not end" in finding.problem


async def test_a_cancelled_probe_ends_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid_file = tmp_path / "pid"
    monkeypatch.setenv("PROBE_PID", str(pid_file))
    task = asyncio.create_task(probe("hang_in_a_tool"))
    async with asyncio.timeout(SLOW_S):
        while not pid_file.exists() or not pid_file.read_text():
            await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    wait_until(lambda: not is_alive(int(pid_file.read_text())), 5)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("crash", "failed: OSError: the device is on fire"),
        ("die", "was killed by SIGSEGV"),
        ("say_nothing", "ended without output"),
        ("babble", "printed unreadable output: '\"no facts at all\"\\n'"),
        ("leave", "exited with code 3"),
        ("no_such_body", "failed: AttributeError: module 'helpers.comm.probe_bodies' has no attribute 'no_such_body'"),
    ],
)
async def test_a_probe_that_fails_is_a_finding(body: str, problem: str) -> None:
    finding = await probe(body)
    assert (finding.facts, finding.problem) == (None, problem)
