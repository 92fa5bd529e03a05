"""Implements POST /v1/chat/completions: messages to a prompt, deltas to ``chat.completion`` bodies and chunks."""

from collections.abc import Iterator

from msgspec import UNSET, Struct, UnsetType

from tightwire.server.api.answer import HeadedBody, Heading
from tightwire.server.api.detokenize import TokenTable
from tightwire.server.api.errors import invalid
from tightwire.server.api.generation import Delta, Sequence
from tightwire.server.api.logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs, prompt_logprobs
from tightwire.server.api.prompts import check_count, make_sequences, run_off_loop
from tightwire.server.api.responses import Usage
from tightwire.server.api.schemas import ChatBody, Message
from tightwire.server.api.serving import ServedModel
from tightwire.server.api.trace import TightwireExtra


class ChatMessage(Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatCompletion(HeadedBody):
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    tightwire: TightwireExtra | UnsetType = UNSET


class ChatDelta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(HeadedBody):
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET
    tightwire: TightwireExtra | UnsetType = UNSET


async def chat_token_ids(model: ServedModel, messages: list[Message]) -> list[int]:
    """The tokens of the conversation in the model's chat template.

    Raises:
        ApiError: 400; the model has no template, or the template rejects these messages.
    """
    if not model.tokenizer.has_chat_template:
        raise invalid(
            f"the model {model.info.name!r} has no chat template; use /v1/completions, or serve an instruct model",
            param="messages",
            code="no_chat_template",
        )
    plain = [message.to_template() for message in messages]
    num_chars = sum(len(message.content) for message in messages)
    try:
        return await run_off_loop(lambda: model.tokenizer.encode_chat(plain), num_chars)
    except ValueError as error:
        raise invalid(f"the model's chat template rejects these messages: {error}", param="messages") from None


async def chat_sequences(body: ChatBody, model: ServedModel, max_sequences: int) -> list[Sequence]:
    check_count(1, body.n, max_sequences)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs requires logprobs: true", param="top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise invalid("max_tokens and max_completion_tokens differ; give one of them", param="max_completion_tokens")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return make_sequences(
        body,
        model,
        [await chat_token_ids(model, body.messages)],
        max_tokens=max_tokens,
        default_max_tokens=None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


class ChatDialect:
    """Makes chat bodies and chunks. A choice's first chunk has the role, its last only the finish reason."""

    def __init__(self, body: ChatBody, heading: Heading, tokens: TokenTable) -> None:
        self._heading, self._tokens = heading, tokens
        self._logprobs = body.logprobs
        self._usage: None | UnsetType = None if body.stream_options and body.stream_options.include_usage else UNSET
        self._begun: set[int] = set()

    def chunks(self, delta: Delta) -> Iterator[ChatChunk]:
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            yield self._chunk(ChatChunkChoice(delta.index, ChatDelta(role="assistant", content="")))
        logprobs = self._logprobs_of(delta)
        if delta.text:
            yield self._chunk(ChatChunkChoice(delta.index, ChatDelta(content=delta.text), logprobs))
            logprobs = None
        if delta.finish_reason is not None:
            yield self._chunk(ChatChunkChoice(delta.index, ChatDelta(), logprobs, delta.finish_reason))

    def last_chunk(self, usage: Usage | None, extra: TightwireExtra | UnsetType) -> ChatChunk:
        return ChatChunk(**self._heading, choices=[], usage=usage or self._usage, tightwire=extra)

    def whole(self, choices: list[Delta], usage: Usage, extra: TightwireExtra | UnsetType) -> ChatCompletion:
        return ChatCompletion(**self._heading, choices=list(map(self._choice, choices)), usage=usage, tightwire=extra)

    def _choice(self, choice: Delta) -> ChatChoice:
        of_prompt = choice.prompt_logprobs
        return ChatChoice(
            index=choice.index,
            message=ChatMessage(content=choice.text),
            finish_reason=choice.finish_reason or "",
            logprobs=self._logprobs_of(choice),
            prompt_logprobs=UNSET if of_prompt is None else prompt_logprobs(of_prompt, self._tokens),
        )

    def _logprobs_of(self, delta: Delta) -> ChatLogprobs | None:
        return chat_logprobs(delta.entries, self._tokens) if self._logprobs and delta.entries else None

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(**self._heading, choices=[choice], usage=self._usage)
