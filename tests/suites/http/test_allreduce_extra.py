"""A server with several AllReduces: each request uses the one it names, to the byte, and /comm lists all."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from helpers.server.server_process import ServerProcess, get
from tiny import make_tiny

from tightwire.comm.all_reduce.make import make_all_reduce
from tightwire.comm.group.group import in_process_groups

_LOSSY, _INT8 = "flash:int4-g64,int8-g64", "flash:int8-g64,int8-g64"
_ROW_ELEMS, _ELEM_BYTES, _NUM_GENERATED = 64, 4, 4  # float32 sums
_POLICY = {
    "schema": "tightwire.comm-policy/1",
    "made_for": {"num_layers": 2, "hidden_size": 64, "world_size": 2},
    "rules": [
        {"site": "o_proj", "phase": "prefill", "algorithm": _LOSSY, "layers": [1], "reason": "it bears it"},
        {"site": "down_proj", "phase": "decode", "algorithm": _INT8},
    ],
}


def _ask(url: str, allreduce: str | None, endpoint: str = "completions") -> dict[str, Any]:
    what = {"prompt": "hello"} if endpoint == "completions" else {"messages": [{"role": "user", "content": "hello"}]}
    wanted = {"comm": True} | ({"allreduce": allreduce} if allreduce else {})
    body = {**what, "max_tokens": _NUM_GENERATED, "temperature": 0, "ignore_eos": True, "tightwire": wanted}
    return httpx.post(f"{url}/v1/{endpoint}", json=body, timeout=240, trust_env=False).json()


def _sums(answer: dict[str, Any]) -> dict[tuple[str, str], tuple[int, int]]:
    """Calls and bytes of an answer's AllReduces."""
    counters = answer["tightwire"]["comm"]["counters"]
    return {(c["algorithm"], c["phase"]): (c["calls"], c["bytes_sent"]) for c in counters if c["op"] == "all_reduce"}


def _expected(*messages: tuple[str, str, int, int]) -> dict[tuple[str, str], tuple[int, int]]:
    """The same by formula; ``messages``: algorithm, phase, how many, and of how many rows."""
    group = in_process_groups(2)[0]
    return {
        (name, phase): (calls, calls * make_all_reduce(name, group).wire_bytes(rows * _ROW_ELEMS, _ELEM_BYTES))
        for name, phase, calls, rows in messages
    }


@pytest.fixture(scope="module")
def by_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("policy") / "mix.json"
    path.write_text(json.dumps(_POLICY))
    return f"policy:{path}"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, by_file: str) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("extra")
    flags = ["--tp", "2", "--device", "cpu", "--allreduce", "two-shot", "--port", "0"]
    extra = ["--allreduce-extra", f"ring,{_LOSSY},{by_file}"]
    with ServerProcess(folder / "temp", str(make_tiny(folder / "tiny")), *flags, *extra) as server:
        yield server.wait_ready()
        assert server.end() == 0


def test_each_request_uses_the_allreduce_that_it_names(url: str, by_file: str) -> None:
    answers = {name: _ask(url, name) for name in (None, "two-shot", "ring", _LOSSY, by_file)}
    chat = _ask(url, "ring", "chat/completions")
    refused = _ask(url, "one-shot")
    comm: dict[str, Any] = get(f"{url}/comm").json()

    rows, steps = answers[None]["usage"]["prompt_tokens"], _NUM_GENERATED - 1
    for own in (None, "two-shot"):
        expected = _expected(("two-shot", "prefill", 5, rows), ("two-shot", "decode", 5 * steps, 1))
        assert _sums(answers[own]) == expected
        assert answers[own]["system_fingerprint"].startswith("tightwire-tp2-two-shot-bfloat16-")
    assert _sums(answers["ring"]) == _expected(("ring", "prefill", 5, rows), ("ring", "decode", 5 * steps, 1))
    assert {name for name, _ in _sums(chat)} == {"ring"}
    assert chat["system_fingerprint"].startswith("tightwire-tp2-ring-bfloat16-")

    exact = comm["extra"][_LOSSY][0]["algorithm"]  # what auto comes to for embeddings, and for generated rows
    assert _sums(answers[_LOSSY]) == _expected(
        (exact, "prefill", 1, rows), (_LOSSY, "prefill", 4, rows), (exact, "decode", 5 * steps, 1)
    )
    assert _sums(answers[by_file]) == _expected(
        (exact, "prefill", 4, rows),
        (_LOSSY, "prefill", 1, rows),
        (exact, "decode", 3 * steps, 1),
        (_INT8, "decode", 2 * steps, 1),
    )

    assert refused["error"]["param"] == "tightwire.allreduce" and "'one-shot'" in refused["error"]["message"]
    assert list(comm["extra"]) == ["ring", _LOSSY, by_file]
    assert {choice["algorithm"] for choice in comm["choices"]} == {"two-shot"}
    first = comm["extra"][by_file][0]
    assert (first["algorithm"], first["layers"]) == (_LOSSY, [1])
    assert first["reason"] == "policy file mix.json: it bears it"
    assert all(verdict["ok"] for verdict in comm["self_test"]) and len(comm["self_test"]) >= 5


def test_the_parts_of_the_time_to_first_token_add_up(url: str) -> None:
    wanted = {"timing": True, "comm": True, "allreduce": _LOSSY}
    body = {"prompt": "hello " * 20, "max_tokens": 4, "ignore_eos": True, "tightwire": wanted}
    start_s = time.monotonic()
    extra = httpx.post(f"{url}/v1/completions", json=body, timeout=240, trust_env=False).json()["tightwire"]
    seconds = time.monotonic() - start_s

    parts = {name: part for name, part in extra["timing"].items() if name != "ttft_s"}
    assert sum(parts.values()) == pytest.approx(extra["timing"]["ttft_s"]) and extra["timing"]["ttft_s"] < seconds
    assert len(parts) == 9 and all(part > 0 for part in parts.values())
    counters = {(c["algorithm"], c["phase"]): c for c in extra["comm"]["counters"]}
    lossy = counters.pop((_LOSSY, "prefill"))
    assert parts["codec_s"] == pytest.approx(lossy["codec_seconds"]) and lossy["codec_seconds"] < lossy["seconds"]
    assert {counter["codec_seconds"] for counter in counters.values()} == {0.0}
