"""One server under mixed load: adapters, schemas, patterns, tools, drafts, cancellations, a cache too small for all.

Each answer is the one that the request gets alone. All tests share the server, because its start takes most of their time.
"""

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import httpx
import pytest
from helpers.model.lora import make_adapter
from helpers.server.made_up_schemas import make_schemas
from helpers.server.server_process import ServerProcess, get, wait_until
from jsonschema_rs import validator_for
from openai import AsyncOpenAI
from tiny import make_tiny

from tightwire.model.open import open_checkpoint

pytest.importorskip("llguidance")

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
_MODELS = ("base", "poet", "clerk")  # without an adapter, and the two adapters
_CONTEXT = 2048
_CACHE = "1152KiB"  # 2,304 tokens of 512 bytes over all ranks, with the draft's; about a tenth of what all requests need at once
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
_GREEDY = {"temperature": 0, "ignore_eos": True}
_SAME = {"prompt": [7] * 40, "max_tokens": 10, **_GREEDY}


class Job(NamedTuple):
    path: str
    body: dict[str, Any]
    leaves: int | None  # number of lines of the stream after which the client leaves

    @property
    def is_too_long(self) -> bool:
        return len(self.body.get("prompt", "")) >= _CONTEXT


def make_jobs() -> list[Job]:
    rng = random.Random(64)
    schemas = iter(make_schemas(64, seed=7))

    def schema() -> dict[str, Any]:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": next(schemas)}}
        return {"response_format": form, "max_tokens": 350}

    def ids() -> dict[str, Any]:
        length = rng.choice([1, 17, 100, 300])
        return {"prompt": [rng.randrange(256) for _ in range(length)], "max_tokens": rng.choice([8, 40]), **_GREEDY}

    kinds = [
        ids,
        lambda: {"temperature": 0, "frequency_penalty": 0.5},
        lambda: {"logprobs": True, "top_logprobs": 2},
        schema,
        ids,
        lambda: {**schema(), "n": 2},
        lambda: {"structured_outputs": {"regex": "[a-f]{5,20}(-[0-9]{3}){2}"}},
        lambda: {"structured_outputs": {"choice": ["yes", "no", "perhaps not"]}, "temperature": 0},
        lambda: {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 300},
        lambda: {"tools": TOOLS, "tool_choice": _NAMED, "max_tokens": 200},
        lambda: {"tools": TOOLS},
        lambda: _SAME,
    ]
    jobs: list[Job] = []
    for index in range(64):
        fields = {"max_tokens": rng.choice([5, 10, 20]), "seed": index, "temperature": 1, **kinds[index % len(kinds)]()}
        fields["model"] = _MODELS[index // len(kinds) % 3]
        if index in (24, 60):  # of the kind `ids`
            fields["prompt"] = [5] * _CONTEXT
        text = f"{'abc ' * rng.randrange(1, 12)}{index}"
        leaves = rng.randrange(1, 4) if index % 10 == 8 else None
        if "prompt" in fields:
            jobs.append(Job(COMPLETION, fields, leaves))
        elif "tools" in fields or "logprobs" in fields or index % 2:
            jobs.append(Job(CHAT, {"messages": [{"role": "user", "content": text}], **fields}, leaves))
        else:
            jobs.append(Job(COMPLETION, {"prompt": text, **fields}, leaves))
    return jobs


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The model drafts for itself, without the adapters: it is right with the base, and mostly wrong with the others."""
    folder = tmp_path_factory.mktemp("mixed")
    model = make_tiny(folder / "tiny", max_position_embeddings=_CONTEXT)
    config = open_checkpoint(str(model)).config
    adapters = [f"{name}={make_adapter(folder / name, config, seed=seed)}" for seed, name in enumerate(_MODELS[1:])]
    arguments = (
        *("--tp", "2", "--port", "0", "--dtype", "bfloat16", "--served-model-name", "base"),
        *("--max-model-len", str(_CONTEXT), "--max-num-batched-tokens", "128", "--kv-cache-memory", _CACHE),
        *("--speculation", "draft", "--draft-model", str(model), "--plan-ahead", "on"),
        *("--lora", adapters[0], "--lora", adapters[1]),
    )
    with ServerProcess(folder / "run", str(model), *arguments) as process:
        yield process.wait_ready()


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


async def test_a_prompt_of_several_steps_tells_its_progress(client: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "base", "prompt": [7] * 200, "max_tokens": 4, "temperature": 0, "stream": True}
    ending = {"ignore_eos": True, "cache_salt": "of one's own"}
    stream = await client.completions.create(**asked, extra_body={**ending, "tightwire": {"progress": True}})
    chunks = [chunk async for chunk in stream]
    told = [chunk.model_extra["tightwire"]["progress"] for chunk in chunks if chunk.model_extra]
    assert [(each["computed"], each["cached"], each["prompt_tokens"]) for each in told] == [
        (128, 0, 200),
        (200, 0, 200),
    ]
    assert 0 < told[0]["seconds"] < told[1]["seconds"]
    plain = [chunk async for chunk in await client.completions.create(**asked, extra_body=ending)]
    assert not any(chunk.model_extra for chunk in plain)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "".join(chunk.choices[0].text for chunk in plain)


async def test_every_answer_is_the_one_it_gets_alone(url: str) -> None:
    jobs, rng = make_jobs(), random.Random(1)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        alone = [None if job.leaves else await _answer(client, job) for job in jobs]

        async def arrive(job: Job) -> list[dict[str, Any]] | None:
            await asyncio.sleep(0.3 * rng.random())
            return await _answer(client, job)

        together = await asyncio.gather(*map(arrive, jobs))
        await asyncio.to_thread(wait_until, lambda: _is_at_rest(url), 10)  # also those whose clients left
        few, accepted = _few_sequences(jobs), _counter(url, "accepted_draft_tokens_total")
        again = await asyncio.gather(*[_answer(client, jobs[index]) for index in few])
        assert _counter(url, "accepted_draft_tokens_total") > accepted, "the first waves may have drafted alone only"
    assert again == [alone[index] for index in few]
    for job, lone, crowded in zip(jobs, alone, together, strict=True):
        assert crowded == lone, job
    # How many tokens are drafted depends on the times of steps.
    assert _counter(url, "forced_tokens_total") > 100 and _counter(url, "accepted_draft_tokens_total") > 10
    _check_forms(jobs, alone)
    texts = {
        job.body["model"]: lone[0]["text"] for job, lone in zip(jobs, alone, strict=True) if lone and _is_same(job)
    }
    assert len(set(texts.values())) == len(_MODELS), "each adapter has its own answer to the same prompt"
    wait_until(lambda: _is_at_rest(url), 10)


def _few_sequences(jobs: list[Job]) -> list[int]:
    """8 jobs of one sequence each, so that steps draft while all run; without adapters, for which the model drafts best."""
    return [
        index
        for index, job in enumerate(jobs)
        if job.body["model"] == "base" and not (job.leaves or job.is_too_long or "n" in job.body)
    ][:8]


def _is_same(job: Job) -> bool:
    return job.body.get("prompt") == _SAME["prompt"]


async def _answer(client: httpx.AsyncClient, job: Job) -> list[dict[str, Any]] | None:
    """The choices; None if the client left, or the prompt is too long."""
    if job.leaves is None:
        response = await client.post(job.path, json=job.body)
        if job.is_too_long:
            assert response.status_code == 400 and f"{_CONTEXT} tokens" in response.text
            return None
        assert response.status_code == 200, response.text
        return [_without_ids(choice) for choice in response.json()["choices"]]
    async with client.stream("POST", job.path, json={**job.body, "stream": True}) as stream:
        num_lines = 0
        async for _ in stream.aiter_lines():
            num_lines += 1
            if num_lines > job.leaves:
                return None
    return None


def _without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    for call in choice.get("message", {}).get("tool_calls") or ():
        del call["id"]
    return choice


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


def _is_at_rest(url: str) -> bool:
    return all(_counter(url, name) == 0 for name in ("requests_running", "requests_waiting", "kv_cache_usage_ratio"))


def _counter(url: str, name: str) -> float:
    lines = get(f"{url}/metrics").text.splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(f"tightwire_{name} ")))


async def test_a_seeded_answer_does_not_depend_on_its_neighbours(url: str, client: AsyncOpenAI) -> None:
    """In a crowd of plain requests, whose steps are planned ahead, and of which some are preempted."""
    # Prompts of 2 or 3 blocks, answers of 4: all are admitted at once, and the cache holds two thirds of them.
    crowd = [(f"neighbour {index:02} " * (1 + index % 2), index) for index in range(40)]
    compared = (0, 19, 38, 39)

    async def ask(prompt: str, seed: int) -> str:
        asked = {"prompt": prompt, "seed": seed, "max_tokens": 60, "temperature": 1}
        answer = await client.completions.create(model="base", **asked, extra_body={"ignore_eos": True})
        return answer.choices[0].text

    names = ("engine_steps_planned_ahead_total", "preemptions_total")
    alone = [await ask(*crowd[index]) for index in compared]
    before = [_counter(url, name) for name in names]
    together = await asyncio.gather(*[ask(*each) for each in crowd])
    assert [together[index] for index in compared] == alone
    for name, count in zip(names, before, strict=True):
        assert _counter(url, name) > count, name
