"""Thirty-two mixed requests on a KV cache a third of what they need: each answer is the one it gets alone."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers.server.server_process import ServerProcess, get, wait_until
from openai import AsyncOpenAI, BadRequestError
from tiny import make_tiny

_CONTEXT = 256
_BLOCK_TOKENS = 16
# float32 keys and values of 2 layers with 2 KV heads of 16: what one cached token takes over all ranks.
_TOKEN_BYTES = 4 * 2 * 2 * 2 * 16


@dataclass(frozen=True)
class Job:
    prompt: list[int]
    max_tokens: int
    delay_s: float
    cancelled_after: int | None = None  # text events seen before the client leaves

    @property
    def is_too_long(self) -> bool:
        return len(self.prompt) + self.max_tokens > _CONTEXT


def _make_jobs(seed: int) -> list[Job]:
    rng = random.Random(seed)
    jobs = []
    for index in range(32):
        length = rng.choice([1, 3, 17, 40, 100])
        max_tokens = rng.choice([8, 60, 150])
        if index % 16 == 15:
            length = _CONTEXT
        jobs.append(
            Job(
                prompt=[rng.randrange(256) for _ in range(length)],
                max_tokens=max_tokens,
                delay_s=rng.random() * 0.2,
                cancelled_after=rng.randrange(1, 5) if index % 8 == 7 and max_tokens > 8 else None,
            )
        )
    return jobs


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    return _make_jobs(seed=2)


@pytest.fixture(scope="module")
def server(jobs: list[Job], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("mixed")
    model = make_tiny(folder / "tiny")
    needed = sum(len(job.prompt) + job.max_tokens for job in jobs if not job.is_too_long)
    blocks = max(needed // 3, _CONTEXT) // _BLOCK_TOKENS
    arguments = (
        *("--tp", "2", "--port", "0", "--dtype", "float32", "--max-model-len", str(_CONTEXT)),
        *("--kv-cache-memory", str(blocks * _BLOCK_TOKENS * _TOKEN_BYTES), "--max-num-batched-tokens", "128"),
    )
    with ServerProcess(folder / "run", str(model), *arguments) as process:
        yield process.wait_ready()


@pytest.fixture
async def client(server: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


async def _answer(client: AsyncOpenAI, job: Job) -> str | None:
    """The text of one job; None for one whose client left."""
    stream = await client.completions.create(
        model="tiny",
        prompt=job.prompt,
        max_tokens=job.max_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    text, num_events, finishes = "", 0, []
    async with stream:
        async for chunk in stream:
            text += chunk.choices[0].text
            num_events += 1
            if chunk.choices[0].finish_reason:
                finishes.append(chunk.choices[0].finish_reason)
            if num_events == job.cancelled_after:
                return None
    assert finishes == ["length"]
    return text


async def test_a_prompt_of_several_steps_tells_its_progress(client: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": [7] * 200, "max_tokens": 4, "temperature": 0, "stream": True}
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


async def test_every_surviving_answer_is_the_one_it_gets_alone(
    server: str, client: AsyncOpenAI, jobs: list[Job]
) -> None:
    alone = [None if job.is_too_long or job.cancelled_after else await _answer(client, job) for job in jobs]

    async def arrive(job: Job) -> str | None:
        await asyncio.sleep(job.delay_s)
        if not job.is_too_long:
            return await _answer(client, job)
        with pytest.raises(BadRequestError, match=rf"{len(job.prompt)} tokens.*{_CONTEXT}"):
            await _answer(client, job)
        return None

    together = await asyncio.gather(*map(arrive, jobs))

    assert together == alone
    assert sum(text is not None for text in together) >= 24
    assert _gauge(server, "preemptions_total") > 0, "the cache was meant to be too small"
    wait_until(lambda: _at_rest(server), 10)


def _at_rest(server: str) -> bool:
    return all(_gauge(server, name) == 0 for name in ("requests_running", "requests_waiting", "kv_cache_usage_ratio"))


def _gauge(server: str, name: str) -> float:
    lines = get(f"{server}/metrics").text.splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(f"tightwire_{name} ")))


def test_a_seeded_answer_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    """In the default number format too (bfloat16 here), with steps planned ahead: alone, then in a crowd."""

    async def run(url: str) -> tuple[str, list[str]]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:

            async def ask(prompt: str, seed: int) -> str:
                answer = await client.completions.create(
                    model="tiny", prompt=prompt, max_tokens=60, temperature=1, seed=seed
                )
                return answer.choices[0].text

            alone = await ask("seeded", 11)
            crowd = [ask(f"neighbour {index} " * (index + 1), index) for index in range(20)]
            together = await asyncio.gather(*crowd, ask("seeded", 11), *[ask("more", index) for index in range(20)])
            return alone, together[20:21]

    model = make_tiny(tmp_path / "tiny", seed=1)
    arguments = ("--tp", "2", "--port", "0", "--dtype", "bfloat16", "--kv-cache-memory", "64MiB")
    with ServerProcess(tmp_path / "run", str(model), *arguments, "--plan-ahead", "on") as process:
        url = process.wait_ready()
        alone, together = asyncio.run(run(url))
        assert _gauge(url, "engine_steps_planned_ahead_total") > 0

    assert together == [alone]
