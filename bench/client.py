"""Measures one streamed request at the client, and defines the prompt and the sample of every bench that sends requests.

The clock starts when the request is handed to the connection, so time in the load generator (``serve.load``) is not in a
sample. The client takes CPU time from a server on the same cores: an event costs aiohttp a third of httpx's time.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self
from urllib.request import getproxies, proxy_bypass

import aiohttp
import httpx

from tightwire.remote import (
    CONNECT_TIMEOUT_S,
    Remote,
    RemoteError,
    SseDecoder,
    body_text,
    choice_text,
    describe,
    error_text,
    first_choice,
    parse_event,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One request's input: text or token ids for /v1/completions, messages for /v1/chat/completions."""

    content: str | list[int] | list[dict[str, Any]]
    max_tokens: int

    @property
    def is_chat(self) -> bool:
        return isinstance(self.content, list) and bool(self.content) and isinstance(self.content[0], dict)

    def body(self) -> dict[str, Any]:
        return {"messages" if self.is_chat else "prompt": self.content, "max_tokens": self.max_tokens}


@dataclass(kw_only=True, slots=True)
class Sample:
    """The measurements of one request; times in seconds from when it was sent."""

    index: int = 0
    sent_s: float = 0.0  # since the load began
    late_s: float = 0.0  # how much later than planned it was sent (request-rate load only)
    ttft_s: float | None = None  # of the first event with text
    e2e_s: float | None = None
    itl_s: list[float] = field(default_factory=list)  # gaps between events with text, which may hold several tokens
    num_prompt: int = 0
    num_cached: int = 0  # prompt tokens that a prefix cache supplied
    num_generated: int = 0
    usage: bool = False  # the token counts are the server's own; otherwise events with text are counted
    finish_reason: str | None = None
    error: str | None = None

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token after the first."""
        if self.error or self.ttft_s is None or self.e2e_s is None or self.num_generated < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_generated - 1)


_KEEP_ALIVE_S = 4.0  # less than servers keep an idle connection open
_Watch = Callable[[dict[str, Any]], None]


class BenchClient:
    """Sends prompts to one server over connections that stay open. Construct it inside a running event loop."""

    def __init__(self, remote: Remote, *, timeout_s: float, extra_body: Mapping[str, Any]) -> None:
        self._remote = remote
        self._timeout_s = timeout_s
        body = {"stream_options": {"include_usage": True}, **extra_body}
        self._extra_body = {name: value for name, value in body.items() if value is not None}
        self._proxy = environment_proxy(remote.base) if remote.trust_env else None
        self._http = aiohttp.ClientSession(
            headers=dict(remote.headers),
            # The request's deadline is in ``measure``.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            # No limit on connections: waiting for one would count as the server's time.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S, ssl=httpx.create_ssl_context()),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def measure(
        self, prompt: Prompt, *, extra_body: Mapping[str, Any] | None = None, watch: _Watch | None = None
    ) -> Sample:
        """Send one prompt and read its stream to the end; a failure is a sample with ``error``, never an exception.

        ``extra_body``: fields of this request only. ``watch``: called with each event after it was timed.
        """
        url = f"{self._remote.base}/{'chat/completions' if prompt.is_chat else 'completions'}"
        fields = {"model": self._remote.model, "stream": True, **prompt.body(), **self._extra_body}
        body = json.dumps({**fields, **(extra_body or {})}).encode()
        sample = Sample()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._read(url, body, sample, watch)
        except (aiohttp.ClientError, ValueError) as error:  # the latter: a URL or headers that cannot be sent
            sample.error = f"connection: {describe(error)}"
        except TimeoutError:
            sample.error = f"no end of the answer within {self._timeout_s:g} s"
        return sample

    async def _read(self, url: str, body: bytes, sample: Sample, watch: _Watch | None) -> None:
        began = time.perf_counter()
        async with await self._send(url, body) as response:
            if response.status != 200:
                text = body_text(await response.text(errors="replace"), response.reason or "")
                sample.error = f"HTTP {response.status}: {text}"
                return
            decoder, events = SseDecoder(), 0
            text_s: list[float] = []  # the time of each event with text
            async for chunk in response.content.iter_any():
                for data in decoder.feed(chunk):
                    if data == "[DONE]" or sample.error:
                        continue
                    # Events that arrive together get the times at which they are read: a gap of 0 has no ratio.
                    now = time.perf_counter() - began
                    try:
                        event = parse_event(data)
                    except RemoteError as error:
                        sample.error = f"stream: {error}"
                        continue
                    events += 1
                    if _note_event(sample, event, now):
                        text_s.append(now)
                    if watch is not None:
                        watch(event)
            sample.ttft_s = text_s[0] if text_s else None
            sample.itl_s = [after - before for before, after in pairwise(text_s)]
            if not sample.usage:
                sample.num_generated = len(text_s)
            if sample.error is None and sample.finish_reason is None:
                sample.error = f"the stream broke off after {events} events, without a finish_reason"

    async def _send(self, url: str, body: bytes) -> aiohttp.ClientResponse:
        """Send a request; once more if the server closed the kept connection, as llama.cpp's does; the clock runs."""
        options: dict[str, Any] = {"data": body, "proxy": self._proxy, "allow_redirects": False}
        options["headers"] = {"Content-Type": "application/json"}
        try:
            return await self._http.post(url, **options)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            return await self._http.post(url, **options)


def _note_event(sample: Sample, event: dict[str, Any], now: float) -> bool:
    """Note finish, end and usage of an event; True if it has text."""
    if isinstance(usage := event.get("usage"), dict):
        sample.usage = True
        sample.num_prompt = _count(usage, "prompt_tokens")
        sample.num_generated = _count(usage, "completion_tokens")
        sample.num_cached = _count(usage.get("prompt_tokens_details"), "cached_tokens")
    if (choice := first_choice(event)) is None:
        return False
    sample.e2e_s = now
    sample.finish_reason = choice.get("finish_reason") or sample.finish_reason
    return bool(choice_text(choice))


def _count(counts: Any, name: str) -> int:
    """0 if a peer omits the count or sends it in another form."""
    number = counts.get(name) if isinstance(counts, dict) else None
    return number if isinstance(number, int) else 0


def environment_proxy(url: str) -> str | None:
    """The environment's proxy for ``url``, as httpx finds it."""
    parsed = httpx.URL(url)
    proxies = getproxies()
    return None if proxy_bypass(parsed.host) else proxies.get(parsed.scheme, proxies.get("all"))


async def ask(
    http: httpx.AsyncClient, url: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
) -> dict[str, Any]:
    """The JSON response of ``url``: to a POST of ``body``, or to a GET. RemoteError: no answer, or not status 200."""
    limit = http.timeout if timeout_s is None else timeout_s
    route = httpx.URL(url).path
    try:
        request = http.get(url, timeout=limit) if body is None else http.post(url, json=body, timeout=limit)
        response = await request
    except httpx.HTTPError as error:
        raise RemoteError(f"{route}: {describe(error)}") from error
    if response.status_code != 200:
        raise RemoteError(f"{route} answered {response.status_code}: {error_text(response)}")
    return response.json()
