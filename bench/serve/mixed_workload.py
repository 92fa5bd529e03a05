"""Workloads whose prompts are unlike in length, or share their beginnings. Plain words, as in ``SyntheticWorkload``."""

import math
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from tightwire.bench.serve.words import WORDS
from tightwire.bench.serve.workload import Prompt

# Means of ShareGPT's conversations in tokens: Kwon et al., "Efficient Memory Management for Large Language Model Serving
# with PagedAttention", arXiv 2309.06180, section 6.1. The paper shows the spread as a histogram only; these sigmas are our
# choice for its long tails.
SHAREGPT_INPUT_LEN, SHAREGPT_OUTPUT_LEN = 161, 338
_INPUT_SIGMA, _OUTPUT_SIGMA = 1.1, 0.9
_LEAST_TOKENS, _MOST_TOKENS = 4, 1024  # what load generators keep of ShareGPT


@dataclass(frozen=True, kw_only=True, slots=True)
class WordScale:
    """How the server counts: ``tokens_per_word`` for each word, and ``overhead`` for the template of a prompt."""

    tokens_per_word: float = 1.0
    overhead: float = 0.0

    def words(self, num_tokens: int) -> int:
        """At least one."""
        return max(1, round((num_tokens - self.overhead) / self.tokens_per_word))


class MixedWorkload(ABC):
    """What both share: a seed, a scale that is set when the server has been asked, prompts for asking it."""

    name: str
    input_len: int  # mean prompt tokens
    output_len: int  # mean tokens to generate

    def __init__(self, *, seed: int, chat: bool) -> None:
        self.scale = WordScale()
        self._seed, self._chat = seed, chat
        self._random = random.Random(f"{seed}/prompts")

    def take(self, count: int) -> list[Prompt]:
        return [self._next() for _ in range(count)]

    def probe(self, num_words: int) -> Prompt:
        """A prompt of so many words that asks for one token, outside the sequence of ``take``."""
        source = random.Random(f"{self._seed}/probe {num_words}")
        return Prompt(content=self._content("", _text(source, num_words)), max_tokens=1)

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What the result says of it."""

    @abstractmethod
    def _next(self) -> Prompt: ...

    def _content(self, prefix: str, text: str) -> Any:
        if not self._chat:
            return f"{prefix} {text}" if prefix else text
        system = [{"role": "system", "content": prefix}] if prefix else []
        return [*system, {"role": "user", "content": text}]


class ShareGptWorkload(MixedWorkload):
    """Lengths of prompts and answers as in ShareGPT: log-normal, independent, 4 to 1024 tokens; no words shared."""

    name = "sharegpt"

    def __init__(self, *, input_len: int, output_len: int, seed: int, chat: bool = False) -> None:
        super().__init__(seed=seed, chat=chat)
        self.input_len, self.output_len = input_len, output_len

    def facts(self) -> dict[str, Any]:
        return {
            "input_len": self.input_len,
            "output_len": self.output_len,
            "lengths": f"log-normal of these means before cutting to {_LEAST_TOKENS} to {_MOST_TOKENS} tokens, "
            f"sigma {_INPUT_SIGMA} and {_OUTPUT_SIGMA}",
        }

    def _next(self) -> Prompt:
        num_words = self.scale.words(_log_normal(self._random, self.input_len, _INPUT_SIGMA))
        max_tokens = _log_normal(self._random, self.output_len, _OUTPUT_SIGMA)
        return Prompt(content=self._content("", _text(self._random, num_words)), max_tokens=max_tokens)


class SharedPrefixWorkload(MixedWorkload):
    """``num_groups`` groups of prompts, each with a long beginning in common and an end of its own; groups in random order.

    What a server with a prefix cache is for: the common part is a system prompt (chat) or a text's beginning.
    """

    name = "shared-prefix"

    def __init__(
        self, *, prefix_len: int, num_groups: int, input_len: int, output_len: int, seed: int, chat: bool = False
    ) -> None:
        super().__init__(seed=seed, chat=chat)
        self.prefix_len, self.num_groups = prefix_len, num_groups
        self.input_len, self.output_len = input_len, output_len  # of the end alone

    def facts(self) -> dict[str, Any]:
        return {
            "input_len": self.prefix_len + self.input_len,
            "output_len": self.output_len,
            "prefix_len": self.prefix_len,
            "prefix_groups": self.num_groups,
        }

    def _next(self) -> Prompt:
        group = self._random.randrange(self.num_groups)
        num_prefix = max(1, round(self.prefix_len / self.scale.tokens_per_word))
        prefix = _text(random.Random(f"{self._seed}/group {group}"), num_prefix)
        text = _text(self._random, self.scale.words(self.input_len))
        return Prompt(content=self._content(prefix, text), max_tokens=self.output_len)


def _text(source: random.Random, num_words: int) -> str:
    return " ".join(source.choices(WORDS, k=num_words))


def _log_normal(source: random.Random, mean: float, sigma: float) -> int:
    drawn = source.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
    return min(_MOST_TOKENS, max(_LEAST_TOKENS, round(drawn)))
