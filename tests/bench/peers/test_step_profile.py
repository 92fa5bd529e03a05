from pathlib import Path

import pytest
from tiny import make_tiny

from tightwire.bench.peers import step_profile


def test_prompts_and_generated_tokens_are_profiled_by_kernel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--prompt-len", "40", "--context", "20", "--rows", "1,3", "--repeats", "1", "--threads", "1"]
    assert step_profile.main([str(make_tiny(tmp_path)), *sizes]) == 0
    printed = capsys.readouterr().out
    for words in (
        "A prompt of 40 tokens: ",
        "matrix products",
        "attention",
        "3 generated tokens behind 19 each, as served",
    ):
        assert words in printed
