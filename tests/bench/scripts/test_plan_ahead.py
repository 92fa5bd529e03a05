import os
import re
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[3]


def test_it_says_how_long_a_device_waits_off_and_on() -> None:
    done = subprocess.run(
        [sys.executable, str(_ROOT / "bench" / "scripts" / "plan_ahead.py"), "--sequences", "1,3", "--steps", "25"],
        env={**os.environ, "PYTHONPATH": str(_ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = re.findall(
        r"^(\d) sequences, steps of 8 ms: idle \d+ us a step, planned ahead \d+ us$", done.stdout, re.MULTILINE
    )
    assert lines == ["1", "3"]
