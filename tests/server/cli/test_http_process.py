"""What a started server takes from the model's folder and from flags: sampling defaults, chat template, names."""

import json
import re
from pathlib import Path

import httpx
import pytest
from helpers.server.server_process import ServerProcess
from tiny import make_tiny

from tightwire.__main__ import main

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
        ({}, ["--chat-template", "none.jinja"], "--chat-template none.jinja: cannot be read"),
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
