import json
from pathlib import Path

import pytest

from tightwire.bench.serve.words import WORDS
from tightwire.bench.serve.workload import FileWorkload, Prompt, SyntheticWorkload
from tightwire.model.open import open_checkpoint


def synthetic(seed: int = 1, num_words: int = 32) -> SyntheticWorkload:
    return SyntheticWorkload(num_words=num_words, output_len=8, seed=seed)


def first_words(prompts: list[Prompt], count: int) -> set[str]:
    return {" ".join(str(prompt.content).split()[:count]) for prompt in prompts}


def test_a_seed_gives_the_same_prompts_whatever_they_are_taken_in() -> None:
    together = synthetic().take(10)
    apart = synthetic()

    assert apart.take(3) + apart.take(7) == together
    assert synthetic(seed=2).take(10) != together


def test_no_two_prompts_share_the_beginning_that_a_prefix_cache_would_keep() -> None:
    workload = synthetic()
    prompts = [*workload.take(500), *(workload.probe(i) for i in range(5)), *synthetic(seed=2).take(500)]

    assert len(first_words(prompts, 4)) == len(prompts)


def test_prompts_have_the_number_of_words_asked_for_now() -> None:
    workload = synthetic(num_words=7)
    workload.num_words = 9

    assert [len(str(prompt.content).split()) for prompt in workload.take(3)] == [9, 9, 9]
    assert workload.probe(0).max_tokens == 1


def test_chat_prompts_are_messages() -> None:
    prompt = SyntheticWorkload(num_words=3, output_len=8, seed=1, chat=True).take(1)[0]

    assert prompt.is_chat
    assert prompt.body()["messages"][0]["role"] == "user"
    assert prompt.body()["max_tokens"] == 8


def test_words_are_unlike_and_plain() -> None:
    assert len(set(WORDS)) == len(WORDS) > 500
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)


def test_words_are_one_token_each_for_the_embedded_model() -> None:
    tokenizer = open_checkpoint("smollm2-135m").tokenizer()

    for prompt in synthetic(num_words=len(WORDS)).take(3):
        assert len(tokenizer.encode(str(prompt.content))) == len(WORDS)
    split = [word for word in WORDS if len(tokenizer.encode(word)) != 1 or len(tokenizer.encode(f" {word}")) != 1]
    assert split == []


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_a_file_gives_its_prompts_in_order_each_once(tmp_path: Path) -> None:
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
    with pytest.raises(ValueError, match=r"p\.jsonl has 3 prompts.*need 4.*--reuse-prompts"):
        workload.take(1)


def test_a_file_starts_over_when_that_is_wished(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "b"})

    taken = FileWorkload(path, output_len=9, reuse=True).take(5)

    assert [prompt.content for prompt in taken] == ["a", "b", "a", "b", "a"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "p.jsonl:2 is not JSON"),
        ("[]", "p.jsonl:2 must be a JSON object"),
        ({"text": "a"}, "prompt or messages"),
        ({"prompt": ""}, "not empty"),
        ({"prompt": []}, "not empty"),
        ({"prompt": [1, "a"]}, "token ids"),
        ({"prompt": [True]}, "token ids"),
        ({"messages": "a"}, "a list of objects"),
        ({"prompt": "\ud800"}, "p.jsonl:2 cannot be sent as JSON"),
        ({"messages": [{"content": float("nan")}]}, "p.jsonl:2 cannot be sent as JSON"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens must be"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens must be"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, says: str) -> None:
    path = write_lines(tmp_path / "p.jsonl", {"prompt": "fine"}, line)

    with pytest.raises(ValueError, match=says):
        FileWorkload(path, output_len=9)


def test_a_file_that_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read prompts from .*none\.jsonl"):
        FileWorkload(tmp_path / "none.jsonl", output_len=9)
    with pytest.raises(ValueError, match="holds no prompts"):
        FileWorkload(write_lines(tmp_path / "p.jsonl", ""), output_len=9)
