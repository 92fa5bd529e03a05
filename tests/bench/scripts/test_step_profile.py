import os
import subprocess
import sys
from pathlib import Path

from tiny import make_tiny

_ROOT = Path(__file__).resolve().parents[3]


def test_it_names_what_a_prompt_and_generated_tokens_take(tmp_path: Path) -> None:
    sizes = ("--prompt-len", "40", "--context", "20", "--rows", "1,3", "--repeats", "1")
    done = subprocess.run(
        [sys.executable, str(_ROOT / "bench" / "scripts" / "step_profile.py"), str(make_tiny(tmp_path)), *sizes],
        env={**os.environ, "PYTHONPATH": str(_ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    for words in (
        "A prompt of 40 tokens: ",
        "matrix products",
        "attention",
        "3 generated tokens behind 19 each, as served",
    ):
        assert words in done.stdout
