"""Generated prompts of a given length by the server's own count.

A prefix cache answers a repeated prompt many times faster, so each is used once, and first words are drawn anew in each run.
"""

import random
import secrets
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tightwire.bench.client import BenchClient, Prompt
from tightwire.remote import RemoteError
from tightwire.training.data.documents import ENGLISH_FOLDER

_FRESH_WORDS = 4  # of some 500, so that no two of many prompts begin alike
_TRIAL_WORDS = (4, 24)  # short: a word may be many tokens, and the context small


@dataclass(kw_only=True, slots=True)
class Workload:
    """Prompts of random English words with ``input_len`` tokens; the same seed gives the same prompts but for their first words.

    With ``prefix_groups`` each prompt also begins with one of so many prefixes of ``prefix_len`` tokens, a system prompt in
    a chat. A prompt has ``tokens_per_word`` tokens for each word plus ``overhead`` for the template; ``fit`` sets both.
    """

    input_len: int
    output_len: int
    seed: int
    chat: bool = False
    prefix_len: int = 0
    prefix_groups: int = 0
    tokens_per_word: float = 1.0
    overhead: float = 0.0
    salt: int = field(default_factory=lambda: secrets.randbits(64))  # of the first words
    _random: random.Random = field(init=False)
    _fresh: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random, self._fresh = random.Random(f"{self.seed}/prompts"), random.Random(self.salt)

    def take(self, count: int) -> list[Prompt]:
        return [self._next() for _ in range(count)]

    def words(self, num_tokens: int) -> int:
        """The words of a prompt of ``num_tokens`` tokens, at least one."""
        return max(1, round((num_tokens - self.overhead) / self.tokens_per_word))

    def facts(self) -> dict[str, Any]:
        facts = {"output_len": self.output_len, "tokens_per_word": self.tokens_per_word}
        if self.prefix_groups:
            lengths = {"prefix_len": self.prefix_len, "prefix_groups": self.prefix_groups}
            return {"name": "shared-prefix", "input_len": self.prefix_len + self.input_len, **lengths, **facts}
        return {"name": "random", "input_len": self.input_len, "num_words": self.words(self.input_len), **facts}

    async def fit(self, client: BenchClient) -> None:
        """Set the scale so that the server counts ``input_len`` tokens in a prompt; unchanged if it sends no count.

        Two short prompts give the slope, which excludes the template's tokens, and one of the wanted length the rest.
        Raises RemoteError if the server refuses a prompt, or a template is longer than ``input_len``.
        """
        counts: list[int] = []
        for words in _TRIAL_WORDS:
            if (counted := await self._count(client, words)) is None:
                return
            counts.append(counted)
        per_word = (counts[1] - counts[0]) / (_TRIAL_WORDS[1] - _TRIAL_WORDS[0])
        if per_word <= 0:
            raise RemoteError(f"the server counts {counts[0]} prompt tokens whatever the prompt")
        overhead = counts[0] - per_word * _TRIAL_WORDS[0]
        if per_word + overhead > self.input_len + 1:
            shortest = f"one word is already {per_word + overhead:.0f} prompt tokens here"
            raise RemoteError(f"{shortest}, more than --input-len {self.input_len}")
        self.tokens_per_word, self.overhead = per_word, overhead
        words = self.words(self.input_len)
        counted = await self._count(client, words)
        # Random words differ in length where a word is many tokens; the third count corrects what that does to the slope.
        self.tokens_per_word = ((counted or self.input_len) - overhead) / words

    async def _count(self, client: BenchClient, num_words: int) -> int | None:
        """The server's count of a prompt outside the sequence of ``take``."""
        text = _text(random.Random(f"{self.seed}/trial {num_words}"), num_words)
        sample = await client.measure(Prompt(content=self._content("", text), max_tokens=1))
        if sample.error:
            raise RemoteError(f"a trial request failed: {sample.error}")
        return sample.num_prompt if sample.usage else None

    def _next(self) -> Prompt:
        prefix = ""
        if self.prefix_groups:
            group = self._random.randrange(self.prefix_groups)
            num_words = max(1, round(self.prefix_len / self.tokens_per_word))
            prefix = _text(random.Random(f"{self.salt}/group {group}"), num_words)
        text = _text(self._random, self.words(self.input_len), self._fresh)
        return Prompt(content=self._content(prefix, text), max_tokens=self.output_len)

    def _content(self, prefix: str, text: str) -> Any:
        if not self.chat:
            return f"{prefix} {text}" if prefix else text
        system = [{"role": "system", "content": prefix}] if prefix else []
        return [*system, {"role": "user", "content": text}]


def _text(source: random.Random, num_words: int, fresh: random.Random | None = None) -> str:
    """Random words; the first ones are from ``fresh``."""
    words = source.choices(english_words(), k=num_words)
    if fresh is not None:
        words[:_FRESH_WORDS] = fresh.choices(english_words(), k=len(words[:_FRESH_WORDS]))
    return " ".join(words)


@cache
def english_words() -> tuple[str, ...]:
    """More than 500 plain words, each one token of SmolLM2, at the start of a text and after a space."""
    return tuple((ENGLISH_FOLDER / "words.txt").read_text(encoding="utf-8").split())
