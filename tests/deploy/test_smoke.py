"""The smoke test passes at a server that works, and names the check that fails at one that does not."""

import subprocess
from pathlib import Path

from helpers.server.fake_engine import FakeEngine, app_for, serve

SCRIPT = Path(__file__).parents[2] / "deploy" / "smoke.sh"


def _run(engine: FakeEngine) -> subprocess.CompletedProcess[str]:
    with serve(app_for(engine)) as url:
        return subprocess.run(["bash", SCRIPT, url], check=False, capture_output=True, text=True, timeout=60)


def test_every_check_passes_at_a_server_that_works() -> None:
    done = _run(FakeEngine())
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == 8 and all(line.startswith("ok ") for line in lines)
    assert "chat with tiny" in done.stdout


def test_a_broken_answer_is_named() -> None:
    done = _run(FakeEngine(dies_after=2))
    assert done.returncode == 1 and done.stderr.startswith("FAIL  /v1/chat/completions: status 5")
