"""`tightwire serve` on emulated CUDA devices: a server's process and its ranks', from start to end, answer over HTTP as on a CPU."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from helpers.kernels.interpreted import needs_triton
from helpers.model.lora import make_adapter, merge_adapter
from helpers.server.local_engine import continue_prompts, local_engine
from helpers.server.server_process import SERVE, ServerProcess, get
from tiny import make_tiny

from tightwire.model.open import open_checkpoint

pytestmark = [needs_triton, pytest.mark.alone, pytest.mark.slow]
_TESTS = Path(__file__).parents[2]
_PATHS = os.pathsep.join(map(str, (_TESTS / "helpers/emulated/site", _TESTS.parent / "src", _TESTS)))
_PROMPTS, _NUM_TOKENS = ("The quick brown fox", "zebra"), 4
_FIXED = "--port 0 --device cuda --dtype float32 --max-model-len 32 --max-num-seqs 1 --served-model-name base"
_CASES = {"--tp 1": 2, "--dp 2": 1}  # options, and the layers of their model
if "TIGHTWIRE_AOT" in os.environ:
    _CASES |= {
        "--tp 2": 2,
        "--kv-offload": 2,
        "--weights stream --stream-from disk": 3,
        "--tp 2 --weights stream": 3,
        "--tp 2 --layout pipeline": 2,
        "--dp 2 --tp 2": 1,
        "--dp 2 --weights partition --kv-offload": 3,
    }


@pytest.mark.parametrize("options", _CASES)
def test_a_server_answers_with_an_adapter_and_without(options: str, tmp_path: Path) -> None:
    """Several requests at a time; of several replicas each generates some of the tokens."""
    base = make_tiny(tmp_path / "model", dtype="float32", num_hidden_layers=_CASES[options])
    adapter = make_adapter(tmp_path / "poet", open_checkpoint(str(base)).config)
    models = {"base": base, "poet": merge_adapter(base, adapter, tmp_path / "merged")}
    arguments = [*_FIXED.split(), "--lora", f"poet={adapter}", *options.split()]
    command = ("env", f"PYTHONPATH={_PATHS}", "EMULATED_CUDA_DEVICES=4", *SERVE)
    with ServerProcess(tmp_path / "temp", str(base), *arguments, command=command) as server:
        url = server.wait_ready()

        def ask(name: str, prompt: str) -> str:
            body = {"model": name, "prompt": prompt, "temperature": 0, "max_tokens": _NUM_TOKENS, "ignore_eos": True}
            response = httpx.post(f"{url}/v1/completions", json=body, timeout=120, trust_env=False)
            assert response.status_code == 200, response.text
            return response.json()["choices"][0]["text"]

        asked = [(name, prompt) for prompt in _PROMPTS for name in models]
        with ThreadPoolExecutor(len(asked)) as pool:
            texts = dict(zip(asked, pool.map(ask, *zip(*asked, strict=True)), strict=True))
        comm = get(f"{url}/comm").json()
        assert server.end() == 0 and server.log.endswith("shutting down\n"), server.log

    assert texts == {(name, prompt): text for name, path in models.items() for prompt, text in _continued(path).items()}
    if comm["dp"] > 1:  # a gather for each token of the second replica, which has one sequence at a time
        num_tokens = sum(counter["calls"] for counter in comm["counters"] if counter["op"] == "gather_to_root")
        assert 0 < num_tokens < len(asked) * _NUM_TOKENS


def _continued(model: Path) -> dict[str, str]:
    """What one rank on a CPU continues each prompt with."""
    checkpoint = open_checkpoint(str(model))
    tokenizer = checkpoint.tokenizer()
    with local_engine(checkpoint, max_model_len=32) as local:
        encoded = [tokenizer.encode(prompt) for prompt in _PROMPTS]
        answers = continue_prompts(local.engine, encoded, max_tokens=_NUM_TOKENS)
    return {prompt: tokenizer.decode(token_ids) for prompt, token_ids in zip(_PROMPTS, answers, strict=True)}
