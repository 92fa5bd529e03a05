"""`tightwire serve` over two ranks and `generate` with --lora: answers of the merged models, loading at run time."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from helpers.model.lora import make_adapter, merge_adapter
from helpers.server.local_engine import greedy_text
from helpers.server.server_process import ServerProcess
from tiny import make_tiny

from tightwire.__main__ import main
from tightwire.model.open import open_checkpoint

_PROMPT, _NUM_TOKENS = "The quick brown fox", 12


def _answer(url: str, model: str) -> str:
    body = {"model": model, "prompt": _PROMPT, "temperature": 0, "max_tokens": _NUM_TOKENS, "ignore_eos": True}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


@pytest.mark.parametrize("ranks", [["--tp", "2"], ["--tp", "2", "--layout", "hybrid"]], ids=" ".join)
def test_adapters_at_start_and_at_run_time(ranks: list[str], tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model", dtype="float32")
    config, root = open_checkpoint(str(model)).config, tmp_path / "adapters"
    folders = {name: make_adapter(root / name, config, seed=seed) for seed, name in enumerate(("poet", "clerk"))}
    wanted = {
        name: greedy_text(merge_adapter(model, folder, tmp_path / f"merged-{name}"), _PROMPT, _NUM_TOKENS)
        for name, folder in folders.items()
    }
    wanted["base"] = greedy_text(model, _PROMPT, _NUM_TOKENS)
    arguments = [*ranks, "--port", "0", "--served-model-name", "base", "--dtype", "float32"]
    arguments += ["--max-model-len", "128", "--max-num-seqs", "4"]
    arguments += ["--lora", f"poet={folders['poet']}", "--lora-dir", str(root), "--max-loras", "2"]
    with ServerProcess(tmp_path / "temp", str(model), *arguments) as server:
        url = server.wait_ready()
        assert "adapters: 2 slots for rank 16, " in server.log and "a rank, loaded: poet" in server.log
        assert _answer(url, "poet") == wanted["poet"] != wanted["base"] == _answer(url, "base")
        load = {"lora_name": "clerk", "lora_path": "clerk"}
        assert httpx.post(f"{url}/v1/load_lora_adapter", json=load, timeout=120).status_code == 200
        assert _answer(url, "clerk") == wanted["clerk"]
        full = httpx.post(f"{url}/v1/load_lora_adapter", json={**load, "lora_name": "third"}, timeout=120)
        assert full.status_code == 400 and "all 2 adapter slots are in use" in full.json()["error"]["message"]
        (root / "clerk" / "adapter_config.json").write_text('{"peft_type": "LORA", "use_dora": true}')
        replace = {**load, "load_inplace": True}
        httpx.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": "poet"}, timeout=120).raise_for_status()
        refused = httpx.post(f"{url}/v1/load_lora_adapter", json=replace, timeout=120)
        assert refused.status_code == 400 and "use_dora=True is not supported" in refused.json()["error"]["message"]
        assert _answer(url, "clerk") == wanted["clerk"]  # a refused replacement leaves the adapter as it was
        assert [card["id"] for card in httpx.get(f"{url}/v1/models").json()["data"]] == ["base", "clerk"]


def test_generate_answers_with_an_adapter(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model", dtype="float32")
    adapter = make_adapter(tmp_path / "poet", open_checkpoint(str(model)).config)
    merged = merge_adapter(model, adapter, tmp_path / "merged")
    wanted, base = (greedy_text(folder, _PROMPT, _NUM_TOKENS) for folder in (merged, model))
    arguments = ["--model", str(model), "--tp", "1", "--dtype", "float32", "--max-tokens", str(_NUM_TOKENS)]
    command = [sys.executable, "-m", "tightwire", "generate", _PROMPT, *arguments, "--lora", str(adapter)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    text = done.stdout.removesuffix("\n")
    assert text and wanted.startswith(text) and not base.startswith(text)


def test_an_adapter_that_cannot_be_served_is_refused_at_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny(tmp_path / "model")
    folder = make_adapter(tmp_path / "bad", open_checkpoint(str(model)).config, modules_to_save=["lm_head"])
    assert main(["serve", str(model), "--port", "0", "--lora", f"bad={folder}"]) == 2
    assert "modules_to_save=['lm_head'] is not supported: whole modules replace" in capsys.readouterr().err
