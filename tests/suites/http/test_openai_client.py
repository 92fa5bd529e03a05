"""OpenAI's client against the app on a real socket: common calls and exceptions."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from helpers.server.fake_engine import FakeEngine, app_for, says, serve
from openai import AsyncOpenAI, OpenAI

from tightwire.server.config.serve import HttpOptions
from tightwire.server.ipc.engine_client import EngineState, Phase

KEY = "secret"
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, FakeEngine]]:
    engine = FakeEngine()
    with serve(app_for(engine, http=HttpOptions(api_key=KEY))) as url:
        yield url, engine


@pytest.fixture
def engine(served: tuple[str, FakeEngine]) -> FakeEngine:
    """The served engine, reset to its defaults."""
    _, engine = served
    vars(engine).update(vars(FakeEngine()))
    return engine


@pytest.fixture
def openai_client(served: tuple[str, FakeEngine], engine: FakeEngine) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served[0]}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


def test_chat(openai_client: OpenAI, engine: FakeEngine) -> None:
    answer = openai_client.chat.completions.create(**CHAT, seed=42, temperature=0.5, user="me")
    assert answer.choices[0].message.content == "Hello, world."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == 14
    assert engine.submitted[0].params.seed == 42


def test_chat_stream_with_usage(openai_client: OpenAI, engine: FakeEngine) -> None:
    engine.script = says("你好 🙂")
    stream = openai_client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "你好 🙂"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12


def test_a_stream_with_progress_of_its_prompt(openai_client: OpenAI, engine: FakeEngine) -> None:
    engine.chunk_tokens = 4
    extra = {"tightwire": {"progress": True}}
    chunks = list(openai_client.chat.completions.create(**CHAT, stream=True, extra_body=extra))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello, world."
    told = [chunk.model_extra["tightwire"]["progress"] for chunk in chunks if chunk.model_extra]
    assert len(told) > 2 and told[-1]["computed"] == told[-1]["prompt_tokens"]


def test_n_and_stop_and_stream_by_choice(openai_client: OpenAI) -> None:
    texts = {0: "", 1: "", 2: ""}
    reasons: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for chunk in openai_client.chat.completions.create(**CHAT, n=3, stop=[", w"], stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert texts == {0: "Hello", 1: "Hello", 2: "Hello"}
    assert reasons == {0: ["stop"], 1: ["stop"], 2: ["stop"]}


def test_logprobs(openai_client: OpenAI) -> None:
    answer = openai_client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2, max_completion_tokens=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["H", "e"]
    assert logprobs.content[0].top_logprobs[0].bytes == [ord("I")]


def test_completion_and_its_logprobs(openai_client: OpenAI) -> None:
    answer = openai_client.completions.create(model="tiny", prompt=["a", "b"], n=2, logprobs=1, max_tokens=2)
    assert [choice.text for choice in answer.choices] == ["He"] * 4
    assert answer.choices[3].index == 3
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens == ["H", "e"] and logprobs.text_offset == [0, 1]


def test_completion_stream(openai_client: OpenAI) -> None:
    stream = openai_client.completions.create(model="tiny", prompt="a", max_tokens=5, stream=True, echo=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "aHello"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_extensions_by_extra_body(openai_client: OpenAI, engine: FakeEngine) -> None:
    extra = {"top_k": 3, "min_p": 0.1, "tightwire": {"comm": True}}
    answer = openai_client.chat.completions.create(**CHAT, extra_body=extra)
    assert engine.submitted[0].params.top_k == 3
    assert answer.model_extra is not None and answer.model_extra["tightwire"]["comm"]["bytes_sent"] > 0


def test_models(openai_client: OpenAI) -> None:
    assert [model.id for model in openai_client.models.list()] == ["tiny"]
    assert openai_client.models.retrieve("tiny").owned_by == "tightwire"


def test_exceptions_are_the_ones_programs_catch(openai_client: OpenAI, engine: FakeEngine) -> None:
    create = openai_client.chat.completions.create
    with pytest.raises(openai.BadRequestError, match="exceed the model's 256") as bad:
        create(**CHAT, max_tokens=300)
    assert (bad.value.param, bad.value.code) == ("max_tokens", "context_length_exceeded")
    with pytest.raises(openai.NotFoundError, match="gpt-5"):
        create(**{**CHAT, "model": "gpt-5"})
    with pytest.raises(openai.NotFoundError):
        openai_client.models.retrieve("gpt-5")
    with pytest.raises(openai.NotFoundError, match="no such route"):
        openai_client.moderations.create(input="a")
    with pytest.raises(openai.NotFoundError, match="has no embeddings; send this request to a server with"):
        openai_client.embeddings.create(model="tiny", input="a")
    with pytest.raises(openai.AuthenticationError):
        openai_client.with_options(api_key="wrong").chat.completions.create(**CHAT)
    with pytest.raises(openai.APIStatusError) as large:
        create(**{**CHAT, "user": "a" * (5 << 20)})
    assert large.value.status_code == 413
    engine.full = True
    with pytest.raises(openai.RateLimitError) as limited:
        create(**CHAT)
    assert limited.value.response.headers["retry-after"] == "1"
    engine.full, engine.gives_up = False, "error"
    with pytest.raises(openai.InternalServerError, match="out of blocks"):
        create(**CHAT)
    engine.gives_up, engine.state = None, EngineState(phase=Phase.LOADING, reason="weights")
    with pytest.raises(openai.APIStatusError) as loading:
        create(**CHAT)
    assert loading.value.status_code == 503


def test_engine_death_in_a_stream_raises_in_the_client(openai_client: OpenAI, engine: FakeEngine) -> None:
    engine.dies_after = 3
    with pytest.raises(openai.APIError, match="rank 1 was killed"):
        list(openai_client.chat.completions.create(**CHAT, stream=True))


@pytest.mark.parametrize("stream", [False, True])
async def test_client_disconnect_frees_its_sequences(
    served: tuple[str, FakeEngine], engine: FakeEngine, stream: bool
) -> None:
    engine.token_s, engine.script = 0.01, lambda request: [65] * 10_000
    async with AsyncOpenAI(base_url=f"{served[0]}/v1", api_key=KEY, max_retries=0) as client:
        if stream:
            chunks = await client.chat.completions.create(**CHAT, stream=True, max_tokens=200)
            async for _ in chunks:
                break
            await chunks.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                await client.with_options(timeout=0.2).chat.completions.create(**CHAT, max_tokens=200)
        async with asyncio.timeout(5):
            while engine.live or not engine.cancelled:
                await asyncio.sleep(0.01)
    assert engine.num_outputs < 200
