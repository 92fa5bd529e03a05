import statistics
from collections.abc import Callable
from itertools import groupby

import pytest

from tightwire.bench.serve.mixed_workload import MixedWorkload, SharedPrefixWorkload, ShareGptWorkload, WordScale
from tightwire.bench.serve.workload import Prompt


def num_words(prompt: Prompt) -> int:
    return len(str(prompt.content).split())


def shared(seed: int = 1, *, chat: bool = False) -> SharedPrefixWorkload:
    return SharedPrefixWorkload(prefix_len=60, num_groups=3, input_len=20, output_len=8, seed=seed, chat=chat)


def test_sharegpt_lengths_have_the_means_that_were_asked_for_and_long_tails() -> None:
    prompts = ShareGptWorkload(input_len=100, output_len=150, seed=1).take(4000)
    inputs, outputs = [num_words(prompt) for prompt in prompts], [prompt.max_tokens for prompt in prompts]

    # Cutting at 1024 takes a little off the mean; five standard errors of 4000 draws.
    for lengths, mean in ((inputs, 100), (outputs, 150)):
        assert statistics.fmean(lengths) == pytest.approx(mean, rel=0.05 + 5 * 1.6 / 4000**0.5)
        assert statistics.median(lengths) < 0.8 * mean
        assert 4 <= min(lengths) < 20 and 800 < max(lengths) <= 1024


def test_lengths_are_counted_as_the_server_counts() -> None:
    workload = ShareGptWorkload(input_len=100, output_len=150, seed=1)
    plain = [num_words(prompt) for prompt in workload.take(50)]
    other = ShareGptWorkload(input_len=100, output_len=150, seed=1)
    other.scale = WordScale(tokens_per_word=2.0, overhead=10.0)

    first, scaled = plain[0], num_words(other.take(1)[0])
    assert scaled == max(1, round((first - 10) / 2))


def test_a_prefix_is_shared_within_its_group_and_nothing_else_is() -> None:
    prompts = [str(prompt.content).split() for prompt in shared().take(60)]
    groups = {key: list(group) for key, group in groupby(sorted(prompts), key=lambda words: tuple(words[:60]))}

    assert len(groups) == 3
    assert {len(words) for words in prompts} == {80}
    assert len({tuple(words[60:64]) for words in prompts}) == 60
    assert not set(groups) & {tuple(str(prompt.content).split()[:60]) for prompt in shared(seed=2).take(30)}


def test_in_a_chat_the_prefix_is_the_system_prompt() -> None:
    prompts = shared(chat=True).take(20)

    assert all([message["role"] for message in prompt.body()["messages"]] == ["system", "user"] for prompt in prompts)
    assert len({prompt.body()["messages"][0]["content"] for prompt in prompts}) == 3


def sharegpt(seed: int) -> ShareGptWorkload:
    return ShareGptWorkload(input_len=30, output_len=9, seed=seed)


@pytest.mark.parametrize("make", [shared, sharegpt])
def test_a_seed_repeats_the_prompts(make: Callable[[int], MixedWorkload]) -> None:
    assert make(4).take(9) == make(4).take(9)
    assert make(4).take(9) != make(5).take(9)
