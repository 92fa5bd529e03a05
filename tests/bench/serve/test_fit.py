"""Prompts of a requested length, by a server's own count."""

from typing import cast

import pytest

from tightwire.bench.client import BenchClient, Prompt, Sample
from tightwire.bench.serve.fit import fit_scale
from tightwire.bench.serve.workload import GeneratedWorkload
from tightwire.server.cli.remote import RemoteError


class _ByteServer:
    """Counts a token a byte, and ``overhead`` more."""

    def __init__(self, overhead: int = 0) -> None:
        self._overhead = overhead

    async def measure(self, prompt: Prompt) -> Sample:
        return Sample(num_prompt=len(cast(str, prompt.content)) + self._overhead, usage=True)


async def _fitted(seed: int, input_len: int, overhead: int = 0) -> int:
    """The number of words that make ``input_len`` tokens."""
    workload = GeneratedWorkload("random", input_len=input_len, output_len=8, seed=seed)
    await fit_scale(cast(BenchClient, _ByteServer(overhead)), workload)
    return workload.scale.words(input_len)


@pytest.mark.parametrize("seed", range(5))
async def test_lengths_are_fitted_when_a_word_is_many_tokens(seed: int) -> None:
    short, long, templated = await _fitted(seed, 30), await _fitted(seed, 600), await _fitted(seed, 660, overhead=60)
    # A word and its blank are 6.1 bytes on average.
    assert 3 <= short <= 8
    assert 89 <= long <= 109
    assert 89 <= templated <= 109


async def test_the_servers_refusal_is_in_the_error() -> None:
    class Full(_ByteServer):
        async def measure(self, prompt: Prompt) -> Sample:
            return Sample(error="HTTP 400: too long")

    with pytest.raises(RemoteError, match="a trial request failed: HTTP 400: too long"):
        await fit_scale(cast(BenchClient, Full()), GeneratedWorkload("random", input_len=1 << 17, output_len=8, seed=0))


async def test_a_count_independent_of_the_words_is_refused() -> None:
    class Deaf(_ByteServer):
        async def measure(self, prompt: Prompt) -> Sample:
            return Sample(num_prompt=20, usage=True)

    with pytest.raises(RemoteError, match="cannot make prompts of 3000 tokens .* the nearest had 20"):
        await fit_scale(cast(BenchClient, Deaf()), GeneratedWorkload("random", input_len=3000, output_len=8, seed=0))


async def test_a_template_longer_than_the_prompt_is_refused() -> None:
    with pytest.raises(RemoteError, match="one word is already .* more than --input-len 30"):
        await _fitted(0, 30, overhead=100)
