"""What a started server takes from the model's folder and from flags: sampling defaults, chat template, names."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from helpers.server.server_process import ServerProcess
from tiny import make_tiny

from tightwire.__main__ import main
from tightwire.model.checkpoint.tensors import expected_tensors
from tightwire.model.open import open_checkpoint
from tightwire.model.weights.formats import WeightFormats
from tightwire.server.cli.http_process import describe_ranks
from tightwire.server.config.flags import make_config
from tightwire.server.ipc.messages import Ready
from tightwire.server.plan.run_plan import decide
from tightwire.sizes import format_bytes

_SMALL = ("--port", "0", "--max-num-seqs", "4", "--max-num-batched-tokens", "64")
_CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}


def _text(url: str, **fields: object) -> str:
    answer = httpx.post(f"{url}/v1/chat/completions", json={**_CHAT, **fields}, timeout=60).json()
    assert answer["model"] == "first", answer
    return answer["choices"][0]["message"]["content"]


def test_sampling_defaults_template_and_names(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "tiny")
    (model / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_k": 1, "top_p": None}))
    (tmp_path / "a.jinja").write_text("{{ greeting | default('none') }} {{ messages[0].content }}")
    flags = (*_SMALL, "--served-model-name", "first", "second", "--chat-template", str(tmp_path / "a.jinja"))
    with ServerProcess(tmp_path / "run", str(model), *flags) as server:
        url = server.wait_ready()
        assert "sampling   temperature 0.5, top_k 1, where a request has no value of its own" in server.log
        greedy = _text(url, temperature=0, model="second")
        assert _text(url) == _text(url, model="first") == greedy  # top_k 1 draws the most likely token
        assert _text(url, top_k=0, temperature=2) != greedy
        assert [card["id"] for card in httpx.get(f"{url}/v1/models").json()["data"]] == ["first", "second"]
        asked = {"messages": _CHAT["messages"], "chat_template_kwargs": {"greeting": "ciao"}}
        ids = httpx.post(f"{url}/tokenize", json=asked).json()["tokens"]
        assert httpx.post(f"{url}/detokenize", json={"tokens": ids}).json()["prompt"] == "ciao Hi"
        assert server.end() == 0


@pytest.mark.parametrize(
    ("generation", "flags", "reason"),
    [
        ({"temperature": 3}, [], "generation_config.json: temperature: .* got 3; --generation-config none"),
        (
            {"max_new_tokens": 0.5},
            [],
            "generation_config.json: max_new_tokens is 0.5, and should .* --generation-config none",
        ),
        ({}, ["--chat-template", "~no-such-user/a"], "--chat-template ~no-such-user/a: cannot be read: .*No such file"),
        (
            {"temperature": 3},
            ["--generation-config", "none", "--chat-template", "bad"],
            "--chat-template .*bad: line 2 of the chat template cannot be compiled: Expected an expression",
        ),
        ({}, ["own"], "chat_template.jinja: line 2 of the chat template cannot be compiled: Expected .* Mend it"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, generation: dict[str, float], flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has imported what takes long; the rank that was started ends with the refusal."""
    model = make_tiny(tmp_path / "tiny")
    if flags == ["own"]:  # the model's template is wrong, and no flag replaces it
        (model / "chat_template.jinja").write_text("\n{% if %}")
        flags = []
    (model / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "bad").write_text("\n{% if %}")
    flags = [str(tmp_path / flag) if flag == "bad" else flag for flag in flags]
    assert main(["serve", str(model), *_SMALL, *flags]) == 2
    errors = capsys.readouterr().err
    assert re.search(reason, errors), errors


def test_the_weights_of_a_rank_include_those_of_its_stage() -> None:
    model, shown = replace(open_checkpoint("random:llama-3.2-1b").config, num_layers=4), []
    for layout in ("tensor", "hybrid"):
        config = make_config({"device": "cpu", "tp": 2, "layout": layout, "model": "random:llama-3.2-1b"})
        decision = decide(config, model, WeightFormats())
        ready = {rank: Ready(rank=rank, peak_host_bytes=1) for rank in (0, 1)}
        weights = [rank.weights for rank in decision.budget.ranks]
        lines = describe_ranks(decision, ready).splitlines()
        assert [f"; {format_bytes(n)} of weights" in line for n, line in zip(weights, lines, strict=True)] == [True] * 2
        shown.append(sum(weights))
    layer_bytes = sum(math.prod(shape) for name, shape in expected_tensors(model) if ".layers.0." in name) * 2
    assert shown[1] - shown[0] > 4 * layer_bytes / 2 * 0.9  # each rank has the other half of its stage's two layers
