import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from helpers.server.fake_openai import FakeServer, running

from tightwire.bench.client import BenchClient, Prompt, Sample, environment_proxy
from tightwire.remote import Remote

PROMPT = Prompt(content="four words of prompt", max_tokens=6)


async def measure(fake: FakeServer, prompt: Prompt = PROMPT, *, timeout_s: float = 10.0, **body: Any) -> Sample:
    with running(fake):
        remote = Remote(base=f"{fake.url}/v1", model=fake.model)
        async with BenchClient(remote, timeout_s=timeout_s, extra_body=body) as client:
            return await client.measure(prompt)


async def test_times_are_those_of_the_stream() -> None:
    sample = await measure(FakeServer(first_token_s=0.1, token_s=0.03, cached_tokens=2))

    assert sample.error is None
    assert sample.ttft_s is not None
    assert 0.1 <= sample.ttft_s < 1.0
    assert len(sample.itl_s) == 5
    assert sum(sample.itl_s) > 4 * 0.03  # the first may be read later than it was sent, the last not
    assert sample.e2e_s == pytest.approx(sample.ttft_s + sum(sample.itl_s))
    assert sample.tpot_s == pytest.approx(sum(sample.itl_s) / 5)
    assert (sample.num_prompt, sample.num_generated, sample.num_cached) == (4, 6, 2)
    assert sample.finish_reason == "length"


async def test_the_clock_stops_at_the_first_text_not_at_an_empty_event() -> None:
    sample = await measure(FakeServer(answer=["", "", "", "a while later"], token_s=0.05))

    assert sample.ttft_s is not None
    assert sample.ttft_s >= 0.15
    assert sample.itl_s == []


async def test_separators_of_unicode_do_not_cut_an_event() -> None:
    sample = await measure(FakeServer(answer=["a\u2028b\u0085c\x0b", "d"]))

    assert sample.error is None
    assert len(sample.itl_s) == 1


async def test_the_request_has_the_given_fields() -> None:
    fake = FakeServer()

    await measure(fake, ignore_eos=True, temperature=0)
    await measure(fake, Prompt(content=[{"role": "user", "content": "Hi"}], max_tokens=2))

    assert fake.bodies[0] == {
        "model": "fake-model",
        "prompt": "four words of prompt",
        "max_tokens": 6,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0,
    }
    assert fake.bodies[1]["messages"] == [{"role": "user", "content": "Hi"}]


async def test_malformed_usage_counts_nothing() -> None:
    odd = {"prompt_tokens": "12", "completion_tokens": None, "prompt_tokens_details": [3]}

    sample = await measure(FakeServer(odd_usage=odd), stream_options={"include_usage": True})

    assert sample.error is None
    assert (sample.num_prompt, sample.num_generated, sample.num_cached) == (0, 0, 0)


async def test_without_usage_events_with_text_are_counted() -> None:
    sample = await measure(FakeServer(usage=False))

    assert (sample.usage, sample.num_generated, sample.num_prompt) == (False, 6, 0)


@pytest.mark.parametrize(
    ("behaviour", "says"),
    [
        ({"refuses": (429, "queue full")}, "HTTP 429: queue full"),
        ({"error_after": 2}, "stream: the engine died"),
        ({"breaks_after": 2}, "the stream broke off after 2 events"),
        ({"first_token_s": 5.0}, "no end of the answer within 0.2 s"),
    ],
)
async def test_a_failure_is_the_samples_error(behaviour: dict[str, Any], says: str) -> None:
    sample = await measure(FakeServer(**behaviour), timeout_s=0.2 if "first_token_s" in behaviour else 10.0)

    assert says in (sample.error or "")
    assert sample.tpot_s is None


async def test_a_missing_server_is_the_samples_error() -> None:
    async with BenchClient(Remote(base="http://127.0.0.1:9/v1", model="m"), timeout_s=5.0, extra_body={}) as client:
        sample = await client.measure(PROMPT)

    assert (sample.error or "").startswith("connection: ")


async def test_an_invalid_url_is_the_samples_error() -> None:
    remote = Remote(base="http://user:word@127.0.0.1:9/v1", model="m", headers={"Authorization": "Bearer key"})
    async with BenchClient(remote, timeout_s=5.0, extra_body={}) as client:
        sample = await client.measure(PROMPT)

    assert "credentials" in (sample.error or "")


@pytest.mark.parametrize(
    ("environment", "url", "proxy"),
    [
        ({}, "http://far.example/v1", None),
        ({"http_proxy": "http://p:1"}, "http://far.example/v1", "http://p:1"),
        ({"http_proxy": "http://p:1"}, "https://far.example/v1", None),
        ({"all_proxy": "http://p:2"}, "https://far.example/v1", "http://p:2"),
        ({"http_proxy": "http://p:1", "no_proxy": "far.example"}, "http://far.example/v1", None),
    ],
)
def test_the_proxy_of_the_environment_is_used(
    environment: dict[str, str], url: str, proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert environment_proxy(url) == proxy


async def test_a_redirect_is_not_followed() -> None:
    sample = await measure(FakeServer(refuses=(307, "elsewhere")))

    assert sample.error == "HTTP 307: elsewhere"


@asynccontextmanager
async def _close_after(num_answers: int) -> AsyncIterator[tuple[str, list[int]]]:
    """A server that keeps each connection for ``num_answers``, then closes it on the next request; and how many it took."""
    event = {"choices": [{"index": 0, "text": "word", "finish_reason": "length"}]}
    stream = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: {len(stream)}\r\n\r\n".encode()
    requests: list[int] = []
    closed = asyncio.Semaphore(0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in range(num_answers + 1):
            try:
                asked = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break  # the client is done
            await reader.readexactly(int(asked.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
            requests.append(number)
            if number < num_answers:
                writer.write(head + stream)
                await writer.drain()
        writer.close()
        await writer.wait_closed()
        closed.release()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", requests
        for _ in range(requests.count(0)):
            await closed.acquire()


async def test_a_closed_kept_connection_is_no_failure() -> None:
    async with _close_after(1) as (base, requests):
        async with BenchClient(Remote(base=base, model="m"), timeout_s=10.0, extra_body={}) as client:
            errors = [(await client.measure(PROMPT)).error for _ in range(3)]
        assert errors == [None, None, None]
        assert requests == [0, 1, 0, 1, 0]  # the second and the third were sent again


async def test_a_new_connection_without_an_answer_is_a_failure() -> None:
    async with _close_after(0) as (base, requests):
        async with BenchClient(Remote(base=base, model="m"), timeout_s=10.0, extra_body={}) as client:
            sample = await client.measure(PROMPT)
        assert sample.error is not None and "connection" in sample.error
        assert requests == [0, 0]
