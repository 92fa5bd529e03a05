"""Generated prompts of a given length by the server's own count.

A prefix cache answers a repeated prompt many times faster, so each prompt is used once, and random prompts share no
beginning, within a run or between runs with different seeds.
"""

import math
import random
from dataclasses import dataclass, field
from typing import Any

from tightwire.bench.client import BenchClient, Prompt
from tightwire.bench.text import english_words
from tightwire.server.cli.remote import RemoteError

_REFUSED = ("HTTP 400", "HTTP 422")
_FIT_ATTEMPTS = 8
_SHRINK = 4


@dataclass(kw_only=True, slots=True)
class Workload:
    """Prompts of random English words with ``input_len`` tokens; the same seed gives the same prompts.

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
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(f"{self.seed}/prompts")

    def take(self, count: int) -> list[Prompt]:
        return [self._next() for _ in range(count)]

    def words(self, num_tokens: int) -> int:
        """The words of a prompt of ``num_tokens`` tokens, at least one."""
        return max(1, round((num_tokens - self.overhead) / self.tokens_per_word))

    def facts(self) -> dict[str, Any]:
        """Facts about the workload for the result."""
        facts = {"output_len": self.output_len, "tokens_per_word": self.tokens_per_word}
        if self.prefix_groups:
            lengths = {"prefix_len": self.prefix_len, "prefix_groups": self.prefix_groups}
            return {"name": "shared-prefix", "input_len": self.prefix_len + self.input_len, **lengths, **facts}
        return {"name": "random", "input_len": self.input_len, "num_words": self.words(self.input_len), **facts}

    async def fit(self, client: BenchClient) -> None:
        """Set the scale so that the server counts ``input_len`` tokens in a prompt; unchanged if it sends no count.

        Raises:
            RemoteError: the server refuses the prompt, or no number of words comes within 2 % of the length (if a word is
                many tokens: within the difference between prompts of equally many words).
        """
        words, tokens_per_word = self.input_len, 1.0
        trials: list[tuple[int, int]] = []
        for attempt in range(_FIT_ATTEMPTS):
            sample = await client.measure(self._probe(words, attempt))
            if sample.error:
                is_last = attempt == _FIT_ATTEMPTS - 1
                if not sample.error.startswith(_REFUSED) or trials or words < _SHRINK or is_last:
                    raise RemoteError(f"a trial request failed: {sample.error}")
                words //= _SHRINK  # a word may be many tokens here, so the prompt exceeds the context
                continue
            if not sample.usage:
                return
            counted = sample.num_prompt
            if words == 1 and counted > self.input_len:
                raise RemoteError(
                    f"one word is already {counted} prompt tokens here, more than --input-len {self.input_len}"
                )
            # The slope between two trials excludes the template's tokens; trials close to each other would give noise.
            if not trials:
                tokens_per_word = counted / words
            elif abs(words - trials[-1][0]) > 2 and (slope := (counted - trials[-1][1]) / (words - trials[-1][0])) > 0:
                tokens_per_word = slope
            trials.append((words, counted))
            if counted == self.input_len:
                break
            words = max(1, words + round((self.input_len - counted) / max(1.0, tokens_per_word)))
        words, counted = min(trials, key=lambda trial: abs(trial[1] - self.input_len))
        # Random words have different lengths, so prompts of equally many words differ by a fraction of this; it exceeds
        # 2 % if a word is many tokens (of a byte tokenizer, for example).
        spread = tokens_per_word * math.sqrt(words)
        if abs(counted - self.input_len) > max(2, 0.02 * self.input_len, spread):
            raise RemoteError(
                f"cannot make prompts of {self.input_len} tokens for this server; the nearest had {counted}"
            )
        self.tokens_per_word, self.overhead = tokens_per_word, self.input_len - tokens_per_word * words

    def _probe(self, num_words: int, attempt: int) -> Prompt:
        """A prompt outside the sequence of ``take``."""
        source = random.Random(f"{self.seed}/probe {attempt}")
        return Prompt(content=self._content("", _text(source, num_words)), max_tokens=1)

    def _next(self) -> Prompt:
        prefix = ""
        if self.prefix_groups:
            group = self._random.randrange(self.prefix_groups)
            num_words = max(1, round(self.prefix_len / self.tokens_per_word))
            prefix = _text(random.Random(f"{self.seed}/group {group}"), num_words)
        text = _text(self._random, self.words(self.input_len))
        return Prompt(content=self._content(prefix, text), max_tokens=self.output_len)

    def _content(self, prefix: str, text: str) -> Any:
        if not self.chat:
            return f"{prefix} {text}" if prefix else text
        system = [{"role": "system", "content": prefix}] if prefix else []
        return [*system, {"role": "user", "content": text}]


def _text(source: random.Random, num_words: int) -> str:
    return " ".join(source.choices(english_words(), k=num_words))
