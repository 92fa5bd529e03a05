"""Workloads: generated prompts of given lengths, or a file of prompts. Each prompt is handed out once.

A server with a prefix cache answers a repeated prompt many times faster, so a bench that repeats prompts measures
the cache. Random prompts share no beginning, within a run or between runs with different seeds.
"""

import json
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightwire.bench.client import Prompt
from tightwire.bench.text import english_words

# Means of ShareGPT's conversations in tokens: Kwon et al., "Efficient Memory Management for Large Language Model Serving
# with PagedAttention", arXiv 2309.06180, section 6.1. The paper shows only a histogram; these sigmas are our choice for
# its long tails.
SHAREGPT_INPUT_LEN, SHAREGPT_OUTPUT_LEN = 161, 338
_INPUT_SIGMA, _OUTPUT_SIGMA = 1.1, 0.9
_LEAST_TOKENS, _MOST_TOKENS = 4, 1024  # what load generators keep of ShareGPT


@dataclass(frozen=True, kw_only=True, slots=True)
class WordScale:
    """The server's token count: ``tokens_per_word`` for each word plus ``overhead`` for the prompt template."""

    tokens_per_word: float = 1.0
    overhead: float = 0.0

    def words(self, num_tokens: int) -> int:
        """At least one."""
        return max(1, round((num_tokens - self.overhead) / self.tokens_per_word))


class GeneratedWorkload(ABC):
    """Prompts of random English words; the same seed gives the same prompts.

    ``scale`` is set by the server's token count (``fit_scale``). Until then a word counts as one token.
    """

    name: str

    def __init__(self, *, input_len: int, output_len: int, seed: int, chat: bool = False) -> None:
        self.input_len, self.output_len = input_len, output_len  # of sharegpt the means, of shared-prefix the end alone
        self.scale = WordScale()
        self._seed, self._chat = seed, chat
        self._random = random.Random(f"{seed}/prompts")

    def take(self, count: int) -> list[Prompt]:
        return [self._next() for _ in range(count)]

    def probe(self, num_words: int, attempt: int = 0) -> Prompt:
        """A prompt of ``num_words`` words that asks for one token, outside the sequence of ``take``."""
        source = random.Random(f"{self._seed}/probe {attempt}")
        return Prompt(content=self._content("", _text(source, num_words)), max_tokens=1)

    def facts(self) -> dict[str, Any]:
        """Facts about the workload for the result."""
        return {"input_len": self.input_len, "output_len": self.output_len}

    @abstractmethod
    def _next(self) -> Prompt: ...

    def _content(self, prefix: str, text: str) -> Any:
        if not self._chat:
            return f"{prefix} {text}" if prefix else text
        system = [{"role": "system", "content": prefix}] if prefix else []
        return [*system, {"role": "user", "content": text}]


class RandomWorkload(GeneratedWorkload):
    """All prompts have ``input_len`` tokens and share no words."""

    name = "random"

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "num_words": self.scale.words(self.input_len)}

    def _next(self) -> Prompt:
        text = _text(self._random, self.scale.words(self.input_len))
        return Prompt(content=self._content("", text), max_tokens=self.output_len)


class ShareGptWorkload(GeneratedWorkload):
    """Lengths of prompts and answers as in ShareGPT: log-normal, independent, 4 to 1024 tokens; no words shared."""

    name = "sharegpt"

    def facts(self) -> dict[str, Any]:
        lengths = (
            f"log-normal of these means before cutting to {_LEAST_TOKENS} to {_MOST_TOKENS} tokens, sigma {_INPUT_SIGMA} and "
            f"{_OUTPUT_SIGMA}"
        )
        return {**super().facts(), "lengths": lengths}

    def _next(self) -> Prompt:
        num_words = self.scale.words(_log_normal(self._random, self.input_len, _INPUT_SIGMA))
        max_tokens = _log_normal(self._random, self.output_len, _OUTPUT_SIGMA)
        return Prompt(content=self._content("", _text(self._random, num_words)), max_tokens=max_tokens)


class SharedPrefixWorkload(GeneratedWorkload):
    """``num_groups`` groups of prompts; a group shares a long prefix, each prompt has its own end. Groups alternate randomly.

    This load suits a prefix cache: the prefix is a system prompt (chat) or the beginning of the text.
    """

    name = "shared-prefix"

    def __init__(self, *, prefix_len: int, num_groups: int, **common: Any) -> None:
        super().__init__(**common)
        self.prefix_len, self.num_groups = prefix_len, num_groups

    def facts(self) -> dict[str, Any]:
        input_len = self.prefix_len + self.input_len
        prefixes = {"prefix_len": self.prefix_len, "prefix_groups": self.num_groups}
        return {**super().facts(), "input_len": input_len, **prefixes}

    def _next(self) -> Prompt:
        group = self._random.randrange(self.num_groups)
        num_prefix = max(1, round(self.prefix_len / self.scale.tokens_per_word))
        prefix = _text(random.Random(f"{self._seed}/group {group}"), num_prefix)
        text = _text(self._random, self.scale.words(self.input_len))
        return Prompt(content=self._content(prefix, text), max_tokens=self.output_len)


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


def _text(source: random.Random, num_words: int) -> str:
    return " ".join(source.choices(english_words(), k=num_words))


def _log_normal(source: random.Random, mean: float, sigma: float) -> int:
    drawn = source.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
    return min(_MOST_TOKENS, max(_LEAST_TOKENS, round(drawn)))


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
