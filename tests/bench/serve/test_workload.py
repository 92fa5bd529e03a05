from itertools import groupby
from typing import cast

import pytest

from tightwire.bench.client import BenchClient, Prompt, Sample
from tightwire.bench.serve.workload import Workload, english_words
from tightwire.model.open import open_checkpoint
from tightwire.remote import RemoteError


def synthetic(seed: int = 1, num_words: int = 32, salt: int = 0) -> Workload:
    return Workload(input_len=num_words, output_len=8, seed=seed, salt=salt)


def first_words(prompts: list[Prompt], count: int) -> set[str]:
    return {" ".join(str(prompt.content).split()[:count]) for prompt in prompts}


def test_a_seed_gives_the_same_prompts_however_they_are_taken() -> None:
    together = synthetic().take(10)
    apart = synthetic()

    assert apart.take(3) + apart.take(7) == together
    assert synthetic(seed=2).take(10) != together


def test_two_runs_of_a_seed_share_all_but_the_beginning() -> None:
    """So that the second run does not find its prompts in the server's prefix cache."""
    one, two = (Workload(input_len=32, output_len=8, seed=1).take(20) for _ in range(2))
    first, second = ([str(prompt.content).split() for prompt in prompts] for prompts in (one, two))

    assert [words[4:] for words in first] == [words[4:] for words in second]
    assert not {tuple(words[:4]) for words in first} & {tuple(words[:4]) for words in second}
    groups = [{tuple(str(p.content).split()[:4]) for p in shared(salt=salt).take(20)} for salt in (1, 2)]
    assert not groups[0] & groups[1]


def test_no_two_prompts_share_a_prefix() -> None:
    workload = synthetic()
    prompts = [*workload.take(500), *synthetic(seed=2, salt=2).take(500)]

    assert len(first_words(prompts, 4)) == len(prompts)


def test_prompt_words_follow_the_scale() -> None:
    workload = synthetic(num_words=7)
    workload.tokens_per_word, workload.overhead = 2.0, -11.0

    assert [len(str(prompt.content).split()) for prompt in workload.take(3)] == [9, 9, 9]


def test_chat_prompts_are_messages() -> None:
    prompt = Workload(input_len=3, output_len=8, seed=1, chat=True).take(1)[0]

    assert prompt.is_chat
    assert prompt.body()["messages"][0]["role"] == "user"
    assert prompt.body()["max_tokens"] == 8


def test_words_are_distinct_and_plain() -> None:
    assert len(set(english_words())) == len(english_words()) > 500
    assert all(word.isascii() and word.isalpha() and word.islower() for word in english_words())


def test_words_are_one_token_each_for_the_embedded_model() -> None:
    tokenizer = open_checkpoint("smollm2-135m").tokenizer()

    for prompt in synthetic(num_words=len(english_words())).take(3):
        assert len(tokenizer.encode(str(prompt.content))) == len(english_words())
    split = [
        word for word in english_words() if len(tokenizer.encode(word)) != 1 or len(tokenizer.encode(f" {word}")) != 1
    ]
    assert split == []


def count_words(prompt: Prompt) -> int:
    return len(str(prompt.content).split())


def shared(seed: int = 1, *, chat: bool = False, salt: int = 0) -> Workload:
    return Workload(prefix_len=60, prefix_groups=3, input_len=20, output_len=8, seed=seed, chat=chat, salt=salt)


def test_only_the_prefix_of_a_group_is_shared() -> None:
    prompts = [str(prompt.content).split() for prompt in shared().take(60)]
    groups = {key: list(group) for key, group in groupby(sorted(prompts), key=lambda words: tuple(words[:60]))}

    assert len(groups) == 3
    assert {len(words) for words in prompts} == {80}
    assert len({tuple(words[60:64]) for words in prompts}) == 60
    assert not set(groups) & {tuple(str(prompt.content).split()[:60]) for prompt in shared(salt=2).take(30)}


def test_in_a_chat_the_prefix_is_the_system_prompt() -> None:
    prompts = shared(chat=True).take(20)

    assert all([message["role"] for message in prompt.body()["messages"]] == ["system", "user"] for prompt in prompts)
    assert len({prompt.body()["messages"][0]["content"] for prompt in prompts}) == 3


def test_a_seed_repeats_the_prompts() -> None:
    assert shared(4).take(9) == shared(4).take(9) != shared(5).take(9)


class _ByteServer:
    """Counts a token a byte, and ``overhead`` more."""

    def __init__(self, overhead: int = 0) -> None:
        self._overhead = overhead

    async def measure(self, prompt: Prompt) -> Sample:
        return Sample(num_prompt=len(cast(str, prompt.content)) + self._overhead, usage=True)


async def _fitted(seed: int, input_len: int, overhead: int = 0) -> int:
    """The number of words that make ``input_len`` tokens."""
    workload = Workload(input_len=input_len, output_len=8, seed=seed)
    await workload.fit(cast(BenchClient, _ByteServer(overhead)))
    return workload.words(input_len)


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
        await Workload(input_len=1 << 17, output_len=8, seed=0).fit(cast(BenchClient, Full()))


async def test_a_count_independent_of_the_words_is_refused() -> None:
    class Deaf(_ByteServer):
        async def measure(self, prompt: Prompt) -> Sample:
            return Sample(num_prompt=20, usage=True)

    with pytest.raises(RemoteError, match="counts 20 prompt tokens whatever the prompt"):
        await Workload(input_len=3000, output_len=8, seed=0).fit(cast(BenchClient, Deaf()))


async def test_a_template_longer_than_the_prompt_is_refused() -> None:
    with pytest.raises(RemoteError, match="one word is already .* more than --input-len 30"):
        await _fitted(0, 30, overhead=100)
