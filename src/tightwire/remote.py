"""Client side of any OpenAI-compatible server: its URL, model, errors and event stream. Knows nothing of our own engine."""

import ipaddress
import json
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from tightwire.option import as_utf8

CONNECT_TIMEOUT_S = 10.0
_READ_TIMEOUT_S = 300.0  # longest silence within an answer
_ERROR_CHARS = 500  # of a body that is not an OpenAI error: enough to recognise a proxy's page


class RemoteError(Exception):
    """The server cannot be used as requested; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remote:
    """A server that answered, and the model chosen on it."""

    base: str  # ends with /v1
    model: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def root(self) -> str:
        """The URL of /health and /metrics."""
        return self.base.removesuffix("/v1")

    @property
    def trust_env(self) -> bool:
        """Whether the environment's proxies apply: never for this host."""
        return not is_loopback(self.base)

    def timeout(self, seconds: float) -> httpx.Timeout:
        return httpx.Timeout(seconds, connect=CONNECT_TIMEOUT_S)


class SseDecoder:
    """Decodes a text/event-stream. Splits only at newlines; ``httpx.Response.iter_lines`` also splits at U+2028."""

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[str]:
        """Data of the events that ``chunk`` completes."""
        *lines, self._tail = (self._tail + chunk).split(b"\n")
        events: list[str] = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].decode("utf-8", "replace").removeprefix(" "))
            elif not line and self._data:
                events.append("\n".join(self._data))
                self._data.clear()
        return events


def api_base(url: str, flag: str = "--url") -> str:
    """The URL with /v1: accepts ``http://host:8000``, with or without a slash or /v1."""
    wrong = RemoteError(f"{flag} must look like http://127.0.0.1:8000, got {url!r}")
    try:
        parsed = httpx.URL(url if "://" in url else f"http://{url}")
    except (httpx.InvalidURL, ValueError):
        raise wrong from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise wrong
    if parsed.port is not None and not 1 <= parsed.port <= 65535:
        raise RemoteError(f"{flag} must have a port from 1 to 65535, got {url!r}")
    return str(parsed).rstrip("/").removesuffix("/v1").rstrip("/") + "/v1"


def parse_url(url: str) -> str:
    """``url``, as a flag gives it; ValueError: no server can have it."""
    try:
        api_base(url, "it")
    except RemoteError as error:
        raise ValueError(str(error)) from None
    return url


def parse_key(key: str) -> str:
    """``key``, as a flag gives it; ValueError: a header cannot hold it."""
    if not key.isascii():
        raise ValueError("it must be ASCII; give the key as the server has it")
    return key


def is_loopback(url: str) -> bool:
    host = httpx.URL(url).host
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def connect(url: str, *, model: str | None = None, api_key: str | None = None, flag: str = "--url") -> Remote:
    """Ask the server for its models, and choose one. ``flag``: the option that named it, for errors. RemoteError: no answer, a refused key, not ready, or no such model."""
    base = api_base(url, flag)
    if api_key and not api_key.isascii():
        raise RemoteError("--api-key must be ASCII; give the key as the server has it")
    headers, proxied = {"Authorization": f"Bearer {api_key}"} if api_key else {}, not is_loopback(base)
    try:
        response = httpx.get(f"{base}/models", headers=headers, timeout=CONNECT_TIMEOUT_S, trust_env=proxied)
    except httpx.HTTPError as error:
        raise RemoteError(
            f"no server answers at {base} ({describe(error)}); start one with `tightwire serve`, or name it with {flag}"
        ) from error
    return Remote(base=base, model=_choose_model(response, model, base, flag), headers=headers)


def _choose_model(response: httpx.Response, wanted: str | None, base: str, flag: str) -> str:
    if response.status_code in (401, 403):
        raise RemoteError(f"{base} refuses the API key ({error_text(response)}); give the right one with --api-key")
    if response.status_code == 404 and wanted:
        return wanted  # a server without a model list may still have the model
    if response.status_code != 200:
        raise RemoteError(f"{base}/models answered {response.status_code}: {error_text(response)}")
    try:
        names = [str(entry["id"]) for entry in response.json()["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise RemoteError(f"{base}/models is not an OpenAI model list; is {flag} right?") from error
    if not names:
        # The list says nothing about a named model: `transformers serve` lists its download cache, not what it serves.
        if wanted:
            return wanted
        raise RemoteError(f"{base} lists no models; name one with --model")
    if wanted and wanted not in names:
        raise RemoteError(f"{base} has no model {wanted!r}; it has {', '.join(names)}")
    return wanted or names[0]


def error_text(response: httpx.Response) -> str:
    """The text of an error response; its body must have been read."""
    return body_text(response.text, response.reason_phrase)


def body_text(body: str, reason_phrase: str) -> str:
    """The text of an error response's body, or the reason phrase if the body is empty."""
    try:
        return error_message(json.loads(body))
    except ValueError:
        return body.strip()[:_ERROR_CHARS] or reason_phrase


def error_message(body: Any) -> str:
    """The message of an OpenAI error object, or of other common formats."""
    if isinstance(body, dict):
        error = body.get("error", body)
        if isinstance(error, dict):
            return str(error.get("message") or error.get("detail") or json.dumps(error)[:_ERROR_CHARS])
        return str(error)
    return json.dumps(body)[:_ERROR_CHARS]


def describe(error: BaseException) -> str:
    """The text of an exception; some of httpx's are empty."""
    return str(error) or type(error).__name__


def parse_event(data: str) -> dict[str, Any]:
    """The JSON object of one stream event. RemoteError: it is not an object, or is an error of the server."""
    try:
        event = json.loads(data)
    except ValueError as error:
        raise RemoteError(f"an event is not JSON: {data[:80]}") from error
    if not isinstance(event, dict) or event.get("error"):
        raise RemoteError(error_message(event))
    return event


def first_choice(event: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The event's choice; None for an event without one (usage, keep-alive)."""
    choices = event.get("choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None


def choice_text(choice: Mapping[str, Any]) -> str:
    """The text a choice adds, for either endpoint; may be empty."""
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
    return choice.get("text") or ""


@dataclass(kw_only=True, slots=True)
class Conversation:
    """The turns so far; asks the server for the next one."""

    remote: Remote
    system: str | None = None  # a message that heads the conversation
    fields: Mapping[str, Any] = field(default_factory=dict)  # more of a request's; those that are None are left out
    turns: list[dict[str, str]] = field(default_factory=list)
    num_tokens: int | None = None  # of the last answer, if the server says it

    def answer(self, text: str) -> Generator[str, None, None]:
        """Send ``text``; yields the answer. Keeps a partial one; removes a question without any. RemoteError: no answer, or ``text`` is not UTF-8."""
        try:
            self.turns.append({"role": "user", "content": as_utf8(text)})
        except ValueError as error:
            raise RemoteError(str(error)) from None
        parts: list[str] = []
        self.num_tokens = None
        try:
            for part in self._stream():
                parts.append(part)
                yield part
        finally:
            if parts:
                self.turns.append({"role": "assistant", "content": "".join(parts)})
            else:
                self.turns.pop()

    def _body(self) -> dict[str, Any]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {
            "model": self.remote.model,
            "messages": [*system, *self.turns],
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in self.fields.items() if value is not None},
        }

    def _stream(self) -> Iterator[str]:
        at, url = self.remote, f"{self.remote.base}/chat/completions"
        client = httpx.Client(headers=at.headers, timeout=at.timeout(_READ_TIMEOUT_S), trust_env=at.trust_env)
        try:
            with client, client.stream("POST", url, json=self._body()) as response:
                if response.status_code != 200:
                    response.read()
                    raise RemoteError(f"the server answered {response.status_code}: {error_text(response)}")
                yield from self._texts(response)
        except httpx.ReadTimeout as error:
            raise RemoteError(f"no more of the answer within {_READ_TIMEOUT_S:g} s") from error
        except httpx.HTTPError as error:
            raise RemoteError(f"lost the server at {self.remote.base} ({describe(error)})") from error

    def _texts(self, response: httpx.Response) -> Iterator[str]:
        decoder, finished = SseDecoder(), False
        for chunk in response.iter_bytes():
            for data in decoder.feed(chunk):
                if data == "[DONE]":
                    return
                event = parse_event(data)
                self.num_tokens = (event.get("usage") or {}).get("completion_tokens", self.num_tokens)
                choice = first_choice(event) or {}
                finished = finished or bool(choice.get("finish_reason"))
                if text := choice_text(choice):
                    yield text
        if not finished:
            raise RemoteError("the server closed the connection before the answer was complete")
