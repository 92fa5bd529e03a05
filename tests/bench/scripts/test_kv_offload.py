import os
import re
import subprocess
import sys
from pathlib import Path

from tiny import make_tiny

_ROOT = Path(__file__).resolve().parents[3]


def test_it_says_what_steps_cost_and_move(tmp_path: Path) -> None:
    sizes = ("--sequences", "3", "--contexts", "20,32", "--repeats", "1")
    done = subprocess.run(
        [sys.executable, str(_ROOT / "bench" / "scripts" / "kv_offload.py"), str(make_tiny(tmp_path)), *sizes],
        env={**os.environ, "PYTHONPATH": str(_ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = re.findall(
        r"^context (\d+): .* ms a step, offloaded .* ms; ([1-9]\S*) a step, .* waited", done.stdout, re.MULTILINE
    )
    assert [context for context, _ in lines] == ["20", "32"]
