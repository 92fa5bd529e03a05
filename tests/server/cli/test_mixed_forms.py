"""Sixty-four requests at once with schemas, patterns, tools, several answers, drafts and cancellations: each answer is the one it gets alone."""

import asyncio
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from helpers.server.server_process import ServerProcess
from jsonschema_rs import validator_for
from tiny import make_tiny

from tightwire.bench.structured.schemas import make_schemas

pytest.importorskip("llguidance")

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in {
        "add": {
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}, "b": {"enum": [1, 2]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        "stop": {"type": "object", "properties": {}, "additionalProperties": False},
    }.items()
]
_NAMED = {"type": "function", "function": {"name": "add"}}
Job = tuple[str, dict[str, Any], int | None]  # route, body, number of events after which the client leaves


def make_jobs() -> list[Job]:
    rng = random.Random(64)
    schemas = iter(make_schemas(64, seed=7))

    def schema() -> dict[str, Any]:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": next(schemas)}}
        return {"response_format": form, "max_tokens": 350}

    kinds = [
        dict,
        lambda: {"temperature": 0, "frequency_penalty": 0.5},
        lambda: {"logprobs": True, "top_logprobs": 2},
        schema,
        schema,
        lambda: {**schema(), "n": 2},
        lambda: {"structured_outputs": {"regex": "[a-f]{5,20}(-[0-9]{3}){2}"}},
        lambda: {"structured_outputs": {"choice": ["yes", "no", "perhaps not"]}, "temperature": 0},
        lambda: {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 300},
        lambda: {"tools": TOOLS, "tool_choice": _NAMED, "max_tokens": 200},
        lambda: {"tools": TOOLS},
    ]
    jobs: list[Job] = []
    for index in range(64):
        fields = {"max_tokens": rng.choice([5, 30, 60]), "seed": index, "temperature": 1, **kinds[index % len(kinds)]()}
        text = f"{'abc ' * rng.randrange(1, 12)}{index}"
        leaves = rng.randrange(1, 4) if index % 9 == 8 else None
        if "tools" in fields or "logprobs" in fields or index % 2:
            jobs.append((CHAT, {"messages": [{"role": "user", "content": text}], **fields}, leaves))
        else:
            jobs.append((COMPLETION, {"prompt": text, **fields}, leaves))
    return jobs


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("forms")
    arguments = ("--tp", "2", "--port", "0", "--dtype", "float32", "--max-model-len", "2048", "--speculation", "ngram")
    # A fifth of what all need at once.
    with ServerProcess(
        folder / "run",
        str(make_tiny(folder / "tiny", max_position_embeddings=2048)),
        *arguments,
        "--kv-cache-memory",
        "4MiB",
    ) as process:
        yield process.wait_ready()


async def answer(client: httpx.AsyncClient, job: Job) -> list[dict[str, Any]] | None:
    """The choices; None if the client left."""
    path, body, leaves = job
    if leaves is None:
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        return [_without_ids(choice) for choice in response.json()["choices"]]
    async with client.stream("POST", path, json={**body, "stream": True}) as stream:
        num_events = 0
        async for _ in stream.aiter_lines():
            num_events += 1
            if num_events > leaves:
                return None
    return None


def _without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    for call in choice.get("message", {}).get("tool_calls") or ():
        del call["id"]
    return choice


async def test_every_answer_is_the_one_it_gets_alone(url: str) -> None:
    jobs, rng = make_jobs(), random.Random(1)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        alone = [None if job[2] else await answer(client, job) for job in jobs]

        async def arrive(job: Job) -> list[dict[str, Any]] | None:
            await asyncio.sleep(0.3 * rng.random())
            return await answer(client, job)

        together = await asyncio.gather(*map(arrive, jobs))
        metrics = (await client.get("/metrics")).text
    for job, lone, crowded in zip(jobs, alone, together, strict=True):
        assert crowded == lone, job
    forced = re.search(r"^tightwire_forced_tokens_total (\S+)", metrics, re.MULTILINE)
    assert forced is not None and float(forced[1]) > 100
    _check_forms(jobs, alone)


def _check_forms(jobs: list[Job], answers: list[list[dict[str, Any]] | None]) -> None:
    num_checked = 0
    for (_, body, _), choices in zip(jobs, answers, strict=True):
        for choice in choices or ():
            if choice["finish_reason"] == "length":
                continue
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            if "response_format" in body:
                validator_for(body["response_format"]["json_schema"]["schema"]).validate(json.loads(text))
            elif "structured_outputs" in body:
                form = body["structured_outputs"]
                assert text in form["choice"] if "choice" in form else re.fullmatch(form["regex"], text)
            elif body.get("tool_choice", "auto") != "auto":
                assert choice["finish_reason"] == "tool_calls" and not text
                [call] = choice["message"]["tool_calls"]
                (tool,) = [tool for tool in TOOLS if tool["function"]["name"] == call["function"]["name"]]
                validator_for(tool["function"]["parameters"]).validate(json.loads(call["function"]["arguments"]))
            else:
                continue
            num_checked += 1
    assert num_checked > 20
