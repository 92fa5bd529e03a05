"""The main job as a user meets it: SmolLM2 on two ranks, and the official openai client."""

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.server.server_process import ServerProcess
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from tightwire.model.open import open_checkpoint

pytestmark = pytest.mark.slow

_QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
_MODEL = "smollm2-135m"
_EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def url(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("end-to-end") / "run"
    arguments = ("--tp", "2", "--port", "0", "--max-model-len", "2048", "--kv-cache-memory", "256MiB")
    with ServerProcess(folder, str(smollm2_path), *arguments, "--served-model-name", _MODEL) as process:
        yield process.wait_ready()


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=_MODEL, messages=_QUESTION, temperature=0, max_tokens=40)

    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage and answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_is_the_whole_one_in_pieces(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=_MODEL, messages=_QUESTION, temperature=0, max_tokens=40)

    with client.chat.completions.create(
        model=_MODEL,
        messages=_QUESTION,
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)

    pieces = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(piece.delta.content or "" for piece in pieces) == whole.choices[0].message.content
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["stop"]
    usage = chunks[-1].usage
    assert usage and whole.usage and usage.total_tokens == whole.usage.total_tokens
    # All of the question but what is in its last block, which the answer to it was computed from.
    assert usage.prompt_tokens_details and (usage.prompt_tokens_details.cached_tokens or 0) >= usage.prompt_tokens - 16


def test_emoji_and_chinese_come_through_a_stream_whole(client: OpenAI, smollm2_path: Path) -> None:
    """The prompt's own characters, echoed token by token, are never cut in half."""
    text = "今天天气很好 🎉🎂 naïve"
    tokenizer = open_checkpoint(str(smollm2_path)).tokenizer()

    with client.completions.create(
        model=_MODEL, prompt=text, echo=True, max_tokens=8, temperature=0, stream=True
    ) as stream:
        pieces = [chunk.choices[0].text for chunk in stream if chunk.choices]

    assert "".join(pieces).startswith(text)
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(tokenizer.encode(text)) > len(text) / 2  # several tokens a character: the halves were there


def test_completion_logprobs_and_echo_agree_with_generation(client: OpenAI) -> None:
    prompt = "The capital of France is"
    first = client.completions.create(model=_MODEL, prompt=prompt, max_tokens=6, temperature=0, logprobs=3)
    generated = first.choices[0].logprobs
    assert generated and generated.tokens and generated.token_logprobs

    echoed = client.completions.create(
        model=_MODEL, prompt=prompt + first.choices[0].text, max_tokens=0, echo=True, logprobs=3
    )
    scored = echoed.choices[0].logprobs

    assert scored and scored.tokens and scored.token_logprobs
    assert scored.token_logprobs[0] is None
    assert scored.tokens[-len(generated.tokens) :] == generated.tokens
    for ours, theirs in zip(scored.token_logprobs[-len(generated.tokens) :], generated.token_logprobs, strict=True):
        # Prompt and generated tokens go through unlike kernels; a bfloat16 logit of 16 to 32 moves in steps of 1/8.
        assert ours == pytest.approx(theirs, abs=2 / 8)


def test_n_gives_different_answers_and_a_seed_the_same(client: OpenAI) -> None:
    def ask() -> list[str | None]:
        answer = client.chat.completions.create(
            model=_MODEL, messages=_QUESTION, n=3, seed=5, temperature=1.2, max_tokens=12
        )
        return [choice.message.content for choice in sorted(answer.choices, key=lambda choice: choice.index)]

    first, second = ask(), ask()

    assert len(set(first)) == 3
    assert first == second


def test_bad_words_and_allowed_tokens_with_a_real_vocabulary(client: OpenAI, smollm2_path: Path) -> None:
    """The words are not in the answer, at the start of a text or after a space, streamed or not, for every choice."""
    tokenizer = open_checkpoint(str(smollm2_path)).tokenizer()
    request: dict[str, Any] = {"model": _MODEL, "messages": _QUESTION, "max_tokens": 12, "seed": 3}

    create: Any = client.chat.completions.create

    def texts(**changes: Any) -> list[str]:
        answer = create(**request | changes)
        return [choice.message.content or "" for choice in answer.choices]

    banned: dict[str, Any] = {"extra_body": {"bad_words": ["Paris", "France", "Louvre"]}}
    assert "Paris" in texts(temperature=0)[0]
    for word in ("Paris", "capital"):  # each without the spelling that the tokenizer writes, which is " Paris"
        assert word not in texts(temperature=0, extra_body={"bad_words": [word]})[0]
    answers = texts(temperature=0, **banned) + texts(n=3, temperature=1, **banned)
    assert not any(word in text for word in ("Paris", "France", "Louvre") for text in answers)
    with create(**request, temperature=0, stream=True, **banned) as stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == answers[0]

    digits: dict[str, Any] = {
        "allowed_token_ids": [token for digit in "0123456789" for token in tokenizer.encode(digit)]
    }
    for text in texts(n=2, temperature=1, extra_body=digits):
        assert text.isdigit() and len(text) == 12


def test_a_chat_goes_on_in_the_last_message(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=_MODEL,
        messages=[*_QUESTION, {"role": "assistant", "content": "The capital of France is"}],
        temperature=0,
        max_tokens=3,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )

    assert (answer.choices[0].message.content or "").startswith(" Paris")


@pytest.mark.parametrize(
    ("example", "package", "expected"),
    [
        ("chat_openai.py", "openai", ["Paris"]),
        ("responses_openai.py", "openai", ["Paris", "'country': ", "get_weather {"]),
        ("messages_anthropic.py", "anthropic", ["Paris", "[end_turn]", "get_weather {"]),
        ("tools_langchain.py", "langchain_openai", ["multiply {", "country="]),
        ("curl.sh", "", ['"object":"response"', '"stop_reason":"end_turn"', "[DONE]", "embeddings"]),
    ],
)
def test_examples(url: str, example: str, package: str, expected: list[str]) -> None:
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if not package and shutil.which("curl") is None:
        pytest.skip("there is no curl")
    command = [sys.executable] if package else ["bash"]
    done = subprocess.run(
        [*command, str(_EXAMPLES / example), url], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(text in done.stdout for text in expected), done.stdout
