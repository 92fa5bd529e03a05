"""`tightwire serve` on an emulated CUDA device: a server's process and its rank's, from start to end, answer over HTTP as on a CPU."""

import os
from pathlib import Path

import httpx
import pytest
from helpers.kernels.interpreted import needs_triton
from helpers.model.lora import make_adapter, merge_adapter
from helpers.server.local_engine import greedy_text
from helpers.server.server_process import SERVE, ServerProcess
from tiny import make_tiny

from tightwire.model.open import open_checkpoint

pytestmark = [needs_triton, pytest.mark.alone, pytest.mark.slow]
_TESTS = Path(__file__).parents[2]
_PATHS = os.pathsep.join(map(str, (_TESTS / "helpers/emulated/site", _TESTS.parent / "src", _TESTS)))
_ALL = "TIGHTWIRE_AOT" in os.environ
_PROMPT, _NUM_TOKENS = "The quick brown fox", 6


@pytest.mark.parametrize("options", [["--tp", "1"], *([["--kv-offload"], ["--tp", "2"]] if _ALL else [])], ids=" ".join)
def test_a_server_answers_with_an_adapter_and_without(options: list[str], tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model", dtype="float32")
    adapter = make_adapter(tmp_path / "poet", open_checkpoint(str(model)).config)
    merged = merge_adapter(model, adapter, tmp_path / "merged")
    arguments = [
        "--port",
        "0",
        "--device",
        "cuda",
        "--dtype",
        "float32",
        "--max-model-len",
        "64",
        "--max-num-seqs",
        "1",
    ]
    arguments += ["--served-model-name", "base", "--lora", f"poet={adapter}", *options]
    command = ("env", f"PYTHONPATH={_PATHS}", "EMULATED_CUDA_DEVICES=2", *SERVE)
    with ServerProcess(tmp_path / "temp", str(model), *arguments, command=command) as server:
        url = server.wait_ready()
        for name, path in (("base", model), ("poet", merged)):
            body = {"model": name, "prompt": _PROMPT, "temperature": 0, "max_tokens": _NUM_TOKENS, "ignore_eos": True}
            response = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
            assert response.status_code == 200, response.text
            assert response.json()["choices"][0]["text"] == greedy_text(path, _PROMPT, _NUM_TOKENS)
