"""The systemd unit, checked by systemd's own reader."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "tightwire@.service"
PROGRAM = "/opt/tightwire/bin/tightwire"


def complaints_about(text: str, folder: Path) -> str:
    """The messages of `systemd-analyze verify`, which exits with 0 after unknown keys too."""
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("needs systemd-analyze (Debian: the package systemd)")
    path = folder / "tightwire@.service"
    path.write_text(text)
    done = subprocess.run([verify, "verify", "--man=no", path], check=False, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr + (f"exit code {done.returncode}" if done.returncode else "")


def test_systemd_reads_every_line(tmp_path: Path) -> None:
    text = UNIT.read_text()
    assert f"ExecStart={PROGRAM} serve --config ${{CREDENTIALS_DIRECTORY}}/serve.yaml\n" in text
    installed = text.replace(PROGRAM, sys.executable)
    assert complaints_about(installed, tmp_path) == ""
    assert "Unknown key 'Restarts'" in complaints_about(installed.replace("Restart=", "Restarts="), tmp_path)


def test_a_server_that_another_host_has_ended_starts_again() -> None:
    lines = UNIT.read_text().splitlines()
    assert "Restart=always" in lines, "its exit code is 0"
    assert "RestartPreventExitStatus=2" in lines


def test_a_server_has_more_time_to_stop_than_its_requests() -> None:
    from tightwire.server.config.serve import HttpOptions

    seconds = next(
        line.partition("=")[2] for line in UNIT.read_text().splitlines() if line.startswith("TimeoutStopSec=")
    )
    assert float(seconds) > HttpOptions().shutdown_grace_s
