"""What a bench asks: synthetic prompts of given lengths, or a file of prompts. A prompt is handed out once.

A server with a prefix cache answers a repeated prompt many times faster, so a bench that repeats prompts measures
the cache. Synthetic prompts share no beginning, within a run or between runs with different seeds.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightwire.bench.serve.words import WORDS


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One request's input: text or token ids for /v1/completions, messages for /v1/chat/completions."""

    content: str | list[int] | list[dict[str, Any]]
    max_tokens: int

    @property
    def is_chat(self) -> bool:
        return isinstance(self.content, list) and bool(self.content) and isinstance(self.content[0], dict)

    def body(self) -> dict[str, Any]:
        """The fields of the request that say what is asked."""
        return {"messages" if self.is_chat else "prompt": self.content, "max_tokens": self.max_tokens}


class SyntheticWorkload:
    """Random English words, ``num_words`` to a prompt; the same seed gives the same prompts."""

    name = "random"

    def __init__(self, *, num_words: int, output_len: int, seed: int, chat: bool = False) -> None:
        self.num_words = num_words
        self.output_len = output_len
        self._seed = seed
        self._chat = chat
        self._random = random.Random(f"{seed}/prompts")

    def take(self, count: int) -> list[Prompt]:
        return [self._prompt(self._random, self.output_len) for _ in range(count)]

    def probe(self, attempt: int) -> Prompt:
        """A prompt of the present length that asks for one token, outside the sequence of ``take``."""
        return self._prompt(random.Random(f"{self._seed}/probe {attempt}"), 1)

    def _prompt(self, source: random.Random, output_len: int) -> Prompt:
        text = " ".join(source.choices(WORDS, k=self.num_words))
        content = [{"role": "user", "content": text}] if self._chat else text
        return Prompt(content=content, max_tokens=output_len)


class FileWorkload:
    """Prompts of a JSONL file, in its order.

    A line has ``prompt`` (text or token ids) or ``messages``, and may have ``max_tokens``.
    """

    def __init__(self, path: Path, *, output_len: int, reuse: bool = False) -> None:
        self.name = path.name
        self._prompts = read_prompts(path, output_len)
        self._reuse = reuse
        self._taken = 0

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def has_chat(self) -> bool:
        """Whether the first prompt is for /v1/chat/completions."""
        return self._prompts[0].is_chat

    def take(self, count: int) -> list[Prompt]:
        first, self._taken = self._taken, self._taken + count
        if self._taken > len(self._prompts) and not self._reuse:
            raise ValueError(
                f"{self.name} has {len(self._prompts)} prompts, but warm-ups and measured requests so far need "
                f"{self._taken}; ask for fewer with --num-requests and --warmups, or allow repeats with --reuse-prompts"
            )
        return [self._prompts[i % len(self._prompts)] for i in range(first, self._taken)]


def read_prompts(path: Path, output_len: int) -> list[Prompt]:
    """The prompts of a JSONL file; a bad line is an error that names it."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read prompts from {path}: {error}") from error
    prompts = [_parse(line, f"{path}:{i}", output_len) for i, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ValueError(f'{path} holds no prompts; each line is one JSON object such as {{"prompt": "Hello"}}')
    return prompts


def _parse(line: str, where: str, output_len: int) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not (isinstance(entry, dict) and ("prompt" in entry or "messages" in entry)):
        raise ValueError(f"{where} must be a JSON object with prompt or messages, got {line[:80]}")
    max_tokens = entry.get("max_tokens", output_len)
    if type(max_tokens) is not int or max_tokens < 1:
        raise ValueError(f"{where}: max_tokens must be a whole number of at least 1, got {max_tokens!r}")
    return Prompt(content=_content(entry, where), max_tokens=max_tokens)


def _content(entry: Mapping[str, Any], where: str) -> Any:
    content = entry.get("messages", entry.get("prompt"))
    if "messages" in entry:
        ok = isinstance(content, list) and content and all(isinstance(message, dict) for message in content)
    else:
        ids = isinstance(content, list) and all(type(token) is int for token in content)
        ok = content and (isinstance(content, str) or ids)
    try:
        json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise ValueError(f"{where} cannot be sent as JSON: {error}") from error
    if not ok:
        raise ValueError(f"{where}: prompt must be text or token ids, messages a list of objects, and not empty")
    return content
