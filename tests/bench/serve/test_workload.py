import json
import statistics
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest

from tightwire.bench.client import Prompt
from tightwire.bench.serve.workload import FileWorkload, GeneratedWorkload, WordScale
from tightwire.bench.text import english_words
from tightwire.model.open import open_checkpoint


def synthetic(seed: int = 1, num_words: int = 32) -> GeneratedWorkload:
    return GeneratedWorkload("random", input_len=num_words, output_len=8, seed=seed)


def first_words(prompts: list[Prompt], count: int) -> set[str]:
    return {" ".join(str(prompt.content).split()[:count]) for prompt in prompts}


def test_a_seed_gives_the_same_prompts_however_they_are_taken() -> None:
    together = synthetic().take(10)
    apart = synthetic()

    assert apart.take(3) + apart.take(7) == together
    assert synthetic(seed=2).take(10) != together


def test_no_two_prompts_share_a_prefix() -> None:
    workload = synthetic()
    prompts = [*workload.take(500), *(workload.probe(32, i) for i in range(5)), *synthetic(seed=2).take(500)]

    assert len(first_words(prompts, 4)) == len(prompts)


def test_prompt_words_follow_the_scale() -> None:
    workload = synthetic(num_words=7)
    workload.scale = WordScale(tokens_per_word=2.0, overhead=-11.0)

    assert [len(str(prompt.content).split()) for prompt in workload.take(3)] == [9, 9, 9]
    assert workload.probe(9).max_tokens == 1


def test_chat_prompts_are_messages() -> None:
    prompt = GeneratedWorkload("random", input_len=3, output_len=8, seed=1, chat=True).take(1)[0]

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


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_a_file_gives_each_prompt_once_in_order(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    path = write_lines(
        tmp_path / "p.jsonl", {"prompt": "a"}, "", {"prompt": [1, 2], "max_tokens": 3}, {"messages": messages}
    )
    workload = FileWorkload(path, output_len=9)

    assert [prompt.body() for prompt in workload.take(2) + workload.take(1)] == [
        {"prompt": "a", "max_tokens": 9},
        {"prompt": [1, 2], "max_tokens": 3},
        {"messages": messages, "max_tokens": 9},
    ]
    with pytest.raises(ValueError, match=r"p\.jsonl has 3 prompts.*need 4.*--num-requests"):
        workload.take(1)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", r"p\.jsonl:2: Input data was truncated"),
        ("[]", r"p\.jsonl:2: Expected `object`"),
        ({"text": "a"}, "prompt or messages"),
        ({"prompt": ""}, "not empty"),
        ({"prompt": []}, "not empty"),
        ({"prompt": [1, "a"]}, r"\$\.prompt\[1\]"),
        ({"prompt": [True]}, r"\$\.prompt\[0\]"),
        ({"messages": "a"}, r"\$\.messages"),
        ({"prompt": "\ud800"}, r"p\.jsonl:2: "),
        ({"messages": [{"content": float("nan")}]}, r"p\.jsonl:2: "),
        ({"prompt": "a", "max_tokens": 0}, r"\$\.max_tokens"),
        ({"prompt": "a", "max_tokens": True}, r"\$\.max_tokens"),
    ],
)
def test_the_error_names_the_bad_line(tmp_path: Path, line: object, says: str) -> None:
    path = write_lines(tmp_path / "p.jsonl", {"prompt": "fine"}, line)

    with pytest.raises(ValueError, match=says):
        FileWorkload(path, output_len=9)


def test_the_error_names_a_missing_or_empty_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read prompts from .*none\.jsonl"):
        FileWorkload(tmp_path / "none.jsonl", output_len=9)
    with pytest.raises(ValueError, match="holds no prompts"):
        FileWorkload(write_lines(tmp_path / "p.jsonl", ""), output_len=9)


def count_words(prompt: Prompt) -> int:
    return len(str(prompt.content).split())


def shared(seed: int = 1, *, chat: bool = False) -> GeneratedWorkload:
    return GeneratedWorkload(
        "shared-prefix", prefix_len=60, num_groups=3, input_len=20, output_len=8, seed=seed, chat=chat
    )


def test_sharegpt_lengths_have_the_given_means_and_long_tails() -> None:
    prompts = GeneratedWorkload("sharegpt", input_len=100, output_len=150, seed=1).take(4000)
    inputs, outputs = [count_words(prompt) for prompt in prompts], [prompt.max_tokens for prompt in prompts]

    # Cutting at 1024 takes a little off the mean; five standard errors of 4000 draws.
    for lengths, mean in ((inputs, 100), (outputs, 150)):
        assert statistics.fmean(lengths) == pytest.approx(mean, rel=0.05 + 5 * 1.6 / 4000**0.5)
        assert statistics.median(lengths) < 0.8 * mean
        assert 4 <= min(lengths) < 20 and 800 < max(lengths) <= 1024


def test_lengths_follow_the_scale() -> None:
    workload = GeneratedWorkload("sharegpt", input_len=100, output_len=150, seed=1)
    plain = [count_words(prompt) for prompt in workload.take(50)]
    other = GeneratedWorkload("sharegpt", input_len=100, output_len=150, seed=1)
    other.scale = WordScale(tokens_per_word=2.0, overhead=10.0)

    first, scaled = plain[0], count_words(other.take(1)[0])
    assert scaled == max(1, round((first - 10) / 2))


def test_only_the_prefix_of_a_group_is_shared() -> None:
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


def sharegpt(seed: int) -> GeneratedWorkload:
    return GeneratedWorkload("sharegpt", input_len=30, output_len=9, seed=seed)


@pytest.mark.parametrize("make", [shared, sharegpt])
def test_a_seed_repeats_the_prompts(make: Callable[[int], GeneratedWorkload]) -> None:
    assert make(4).take(9) == make(4).take(9)
    assert make(4).take(9) != make(5).take(9)
