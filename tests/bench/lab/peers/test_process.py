"""A load counts when its prompts are about as long as was asked; random words have unlike numbers of tokens."""

import json
import subprocess
from typing import Any

import pytest

from tightwire.bench.lab.peers import process
from tightwire.bench.lab.peers.process import Load, bench_serve
from tightwire.bench.server_process import ServerFailedError


def test_prompts_of_bytes_may_be_two_words_off(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load(concurrency=(1,), num_requests=(3,), input_len=128, output_len=64)
    cell: dict[str, Any] = {"name": "one", "failed": 0, "errors": {}, "ttft_s": {"p50": 1.0}, "succeeded": 3}

    def result_of(prompt_tokens: int, generated_tokens: int) -> dict[str, Any]:
        own = {**cell, "prompt_tokens": 3 * prompt_tokens, "generated_tokens": 3 * generated_tokens}
        done = subprocess.CompletedProcess([], 0, stdout=json.dumps({"cells": [own]}))
        monkeypatch.setattr(process.subprocess, "run", lambda *_, **__: done)
        return bench_serve("http://127.0.0.1:1", load, seed=1)

    assert result_of(146, 64)["cells"]
    for prompt, generated in ((147, 64), (109, 64), (128, 62)):
        with pytest.raises(ServerFailedError, match="tokens a request instead of"):
            result_of(prompt, generated)
