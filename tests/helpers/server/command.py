"""``tightwire`` as a command that ends by itself."""

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src"


def tightwire(*arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tightwire", *arguments],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
