"""Two hosts over loopback with a draft model: schemas, adapters, n and seeds answer as the same hosts do without drafts."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.model.lora import make_adapter
from helpers.server.hosts import free_ports
from helpers.server.server_process import START_S, ServerProcess, get
from tiny import make_tiny

from tightwire.model.open import open_checkpoint

pytest.importorskip("llguidance")

_SCHEMA = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 6}, "flag": {"type": "boolean"}},
    "required": ["word", "flag"],
    "additionalProperties": False,
}


def _bodies(names: list[str]) -> list[dict[str, Any]]:
    """Of each name (the base, and adapters): greedy and seeded, n = 3, JSON by a schema; some stop at a string."""
    form = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}},
        "max_tokens": 80,
    }
    kinds: list[dict[str, Any]] = [
        {"temperature": 0, "ignore_eos": True},
        {"temperature": 1, "seed": 7, "n": 3},
        {"temperature": 0, **form},
        {"temperature": 1, "seed": 5, "n": 2, **form},
        {"temperature": 1, "seed": 9, "frequency_penalty": 0.5, "stop": ["e"], "logprobs": True, "top_logprobs": 2},
    ]
    message = {"role": "user", "content": "Write about Ida, and about Ida again, and about Ida."}
    return [{"model": name, "messages": [message], "max_tokens": 40, **kind} for name in names for kind in kinds]


async def _answers(url: str, bodies: list[dict[str, Any]], at_once: bool) -> list[Any]:
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as client:

        async def ask(body: dict[str, Any]) -> Any:
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            return response.json()["choices"]

        return await asyncio.gather(*map(ask, bodies)) if at_once else [await ask(body) for body in bodies]


def _counter(url: str, name: str) -> float:
    lines = get(f"{url}/metrics").text.splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(f"tightwire_{name} ")))


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("layout", ["tensor", "hybrid", "pipeline"])
def test_two_hosts_answer_as_without_drafts(layout: str, tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "target", num_hidden_layers=4)
    draft = (
        make_tiny(tmp_path / "draft", num_hidden_layers=4)
        if layout == "tensor"
        else make_tiny(tmp_path / "draft", seed=5)
    )
    config, adapters = open_checkpoint(str(model)).config, ("poet", "clerk")
    folders = {name: make_adapter(tmp_path / name, config, seed=seed) for seed, name in enumerate(adapters)}
    loras = ("--lora", f"poet={folders['poet']}", "--lora-dir", str(tmp_path), "--max-loras", "2")
    bodies = _bodies(["base", *adapters])
    options = ("--port", "0", "--tp", "2", "--nnodes", "2", "--layout", layout, "--served-model-name", "base", *loras)
    options += ("--kv-cache-memory", "2MiB", "--max-model-len", "512", "--join-timeout-s", str(START_S / 2))
    told: dict[str, list[Any]] = {}
    for speculation in ("none", "draft"):
        own = ("--speculation", speculation, *(("--draft-model", str(draft)) if speculation == "draft" else ()))
        port = free_ports(8)
        hosts = ("--master-addr", f"127.0.0.1:{port}", "--port-range", f"{port + 1}-{port + 7}")
        with (
            ServerProcess(
                tmp_path / f"{speculation}-1", str(model), *options, *hosts, *own, "--node-rank", "1"
            ) as second,
            ServerProcess(
                tmp_path / f"{speculation}-0", str(model), *options, *hosts, *own, "--node-rank", "0"
            ) as first,
        ):
            url = first.wait_ready(second)
            load = {"lora_name": "clerk", "lora_path": "clerk"}
            assert httpx.post(f"{url}/v1/load_lora_adapter", json=load, timeout=120).status_code == 200
            member = second.wait_ready(first)
            for route, body in (("load", {**load, "lora_name": "more"}), ("unload", {"lora_name": "poet"})):
                refused = httpx.post(f"{member}/v1/{route}_lora_adapter", json=body, timeout=30)
                assert refused.status_code == 503 and "send requests to node 0" in refused.text
            told[speculation] = asyncio.run(_answers(url, bodies, at_once=False))
            assert asyncio.run(_answers(url, bodies, at_once=True)) == told[speculation]
            drafted = _counter(url, "draft_tokens_total")
            assert drafted > 0 if speculation == "draft" else drafted == 0
            if layout == "tensor" and speculation == "draft":
                assert _counter(url, "accepted_draft_tokens_total") > 0, "the draft is the target"
            assert first.end() == 0
    assert told["draft"] == told["none"]
    for body, choices in zip(bodies, told["none"], strict=True):
        for choice in choices if "response_format" in body else ():
            assert (
                choice["finish_reason"] == "length"
                or json.loads(choice["message"]["content"]).keys() == _SCHEMA["properties"].keys()
            )
