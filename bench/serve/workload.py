"""Workloads: generated prompts of given lengths, or a file of prompts. Each prompt is used once.

A server with a prefix cache answers a repeated prompt many times faster, so a bench that repeats prompts measures
the cache. Random prompts share no beginning, within a run or between runs with different seeds.
"""

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from tightwire.bench.client import Prompt
from tightwire.bench.text import english_words

# Means of ShareGPT's conversations in tokens: Kwon et al., "Efficient Memory Management for Large Language Model Serving
# with PagedAttention", arXiv 2309.06180, section 6.1. The paper shows only a histogram; these sigmas are our choice for
# its long tails.
SHAREGPT_INPUT_LEN, SHAREGPT_OUTPUT_LEN = 161, 338
_INPUT_SIGMA, _OUTPUT_SIGMA = 1.1, 0.9
_LEAST_TOKENS, _MOST_TOKENS = 4, 1024  # the range that load generators keep of ShareGPT


@dataclass(frozen=True, kw_only=True, slots=True)
class WordScale:
    """The server's token count: ``tokens_per_word`` for each word plus ``overhead`` for the prompt template."""

    tokens_per_word: float = 1.0
    overhead: float = 0.0

    def words(self, num_tokens: int) -> int:
        """At least one."""
        return max(1, round((num_tokens - self.overhead) / self.tokens_per_word))


class GeneratedWorkload:
    """Prompts of random English words; the same seed gives the same prompts.

    ``scale`` is set by the server's token count (``fit_scale``). Until then a word counts as one token.

    Args:
        name: ``random``: all prompts have ``input_len`` tokens and share no words. ``sharegpt``: lengths of prompts and
            answers are log-normal with the given means, 4 to 1024 tokens. ``shared-prefix``: ``num_groups`` groups of
            prompts in random order; a group shares ``prefix_len`` tokens, a system prompt in a chat, before ``input_len``
            tokens of each prompt's own.
    """

    def __init__(
        self,
        name: str,
        *,
        input_len: int,
        output_len: int,
        seed: int,
        chat: bool = False,
        prefix_len: int = 0,
        num_groups: int = 0,
    ) -> None:
        self.name, self.input_len, self.output_len = name, input_len, output_len
        self.scale = WordScale()
        self._seed, self._chat, self._prefix_len, self._num_groups = seed, chat, prefix_len, num_groups
        self._random = random.Random(f"{seed}/prompts")

    def take(self, count: int) -> list[Prompt]:
        return [self._next() for _ in range(count)]

    def probe(self, num_words: int, attempt: int = 0) -> Prompt:
        """A prompt of ``num_words`` words that asks for one token, outside the sequence of ``take``."""
        source = random.Random(f"{self._seed}/probe {attempt}")
        return Prompt(content=self._content("", _text(source, num_words)), max_tokens=1)

    def facts(self) -> dict[str, Any]:
        """Facts about the workload for the result."""
        facts: dict[str, Any] = {"input_len": self.input_len, "output_len": self.output_len}
        if self.name == "shared-prefix":
            return {
                **facts,
                "input_len": self._prefix_len + self.input_len,
                "prefix_len": self._prefix_len,
                "prefix_groups": self._num_groups,
            }
        if self.name == "sharegpt":
            cut = f"cut to {_LEAST_TOKENS} to {_MOST_TOKENS} tokens"
            return {**facts, "lengths": f"log-normal with these means, {cut}, sigma {_INPUT_SIGMA} and {_OUTPUT_SIGMA}"}
        return {**facts, "num_words": self.scale.words(self.input_len)}

    def _next(self) -> Prompt:
        source, input_len, output_len, prefix = self._random, self.input_len, self.output_len, ""
        if self.name == "sharegpt":
            input_len = _log_normal(source, input_len, _INPUT_SIGMA)
            output_len = _log_normal(source, output_len, _OUTPUT_SIGMA)
        elif self.name == "shared-prefix":
            group = source.randrange(self._num_groups)
            num_words = max(1, round(self._prefix_len / self.scale.tokens_per_word))
            prefix = _text(random.Random(f"{self._seed}/group {group}"), num_words)
        text = _text(source, self.scale.words(input_len))
        return Prompt(content=self._content(prefix, text), max_tokens=output_len)

    def _content(self, prefix: str, text: str) -> Any:
        if not self._chat:
            return f"{prefix} {text}" if prefix else text
        system = [{"role": "system", "content": prefix}] if prefix else []
        return [*system, {"role": "user", "content": text}]


class FileWorkload:
    """Prompts of a JSONL file, in its order.

    A line has ``prompt`` (text or token ids) or ``messages``, and may have ``max_tokens``.
    """

    def __init__(self, path: Path, *, output_len: int) -> None:
        self.name = path.name
        self._prompts = read_prompts(path, output_len)
        self._taken = 0

    def facts(self) -> dict[str, Any]:
        return {"prompts": len(self._prompts)}

    @property
    def has_chat(self) -> bool:
        """True if the first prompt is for /v1/chat/completions."""
        return self._prompts[0].is_chat

    def take(self, count: int) -> list[Prompt]:
        first, self._taken = self._taken, self._taken + count
        if self._taken > len(self._prompts):
            raise ValueError(
                f"{self.name} has {len(self._prompts)} prompts, but warm-ups and measured requests so far need "
                f"{self._taken}; ask for fewer with --num-requests and --warmups"
            )
        return self._prompts[first : self._taken]


def _text(source: random.Random, num_words: int) -> str:
    return " ".join(source.choices(english_words(), k=num_words))


def _log_normal(source: random.Random, mean: float, sigma: float) -> int:
    drawn = source.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
    return min(_MOST_TOKENS, max(_LEAST_TOKENS, round(drawn)))


class _Line(msgspec.Struct):
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None


def read_prompts(path: Path, output_len: int) -> list[Prompt]:
    """The prompts of a JSONL file.

    Raises:
        ValueError: the file cannot be read or is empty, or a line is invalid; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read prompts from {path}: {error}") from error
    prompts = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = msgspec.json.decode(text, type=_Line)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
        if not (content := line.messages or line.prompt):
            raise ValueError(f"{path}:{number} must be a JSON object with a prompt or messages that is not empty")
        prompts.append(Prompt(content=content, max_tokens=line.max_tokens or output_len))
    if not prompts:
        raise ValueError(f'{path} holds no prompts; each line is one JSON object such as {{"prompt": "Hello"}}')
    return prompts
