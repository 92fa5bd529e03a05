"""The chat dialect: messages to a prompt, deltas to ``chat.completion`` bodies and chunks."""

from collections.abc import Iterator

from msgspec import UNSET, UnsetType

from tightwire.server.api.answer import Heading
from tightwire.server.api.detokenize import TokenTable
from tightwire.server.api.errors import invalid
from tightwire.server.api.generation import Delta, Sequence
from tightwire.server.api.prompts import check_count, make_sequences, off_loop
from tightwire.server.api.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    TightwireExtra,
    Usage,
)
from tightwire.server.api.schemas import ChatBody, Message
from tightwire.server.api.served_model import ServedModel
from tightwire.server.api.token_text import chat_logprobs, prompt_logprobs


async def chat_token_ids(model: ServedModel, messages: list[Message]) -> list[int]:
    """The conversation as the model's template writes it.

    Raises:
        ApiError: 400, the model has no template, or its template refuses these messages.
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
        return await off_loop(lambda: model.tokenizer.encode_chat(plain), num_chars)
    except ValueError as error:
        raise invalid(f"the model's chat template refuses these messages: {error}", param="messages") from None


async def chat_sequences(body: ChatBody, model: ServedModel, max_sequences: int) -> list[Sequence]:
    check_count(1, body.n, max_sequences)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs is for logprobs: true", param="top_logprobs")
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
    """A stream's first chunk of each choice has the role, the last one only the finish reason."""

    def __init__(self, body: ChatBody, heading: Heading, tokens: TokenTable) -> None:
        self._heading = heading
        self._tokens = tokens
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
        chunk = self._chunk()
        chunk.usage, chunk.tightwire = usage or self._usage, extra
        return chunk

    def whole(self, choices: list[Delta], usage: Usage, extra: TightwireExtra | UnsetType) -> ChatCompletion:
        return ChatCompletion(
            id=self._heading.id,
            created=self._heading.created,
            model=self._heading.model,
            system_fingerprint=self._heading.system_fingerprint,
            choices=[self._choice(choice) for choice in choices],
            usage=usage,
            tightwire=extra,
        )

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

    def _chunk(self, *choices: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(
            id=self._heading.id,
            created=self._heading.created,
            model=self._heading.model,
            system_fingerprint=self._heading.system_fingerprint,
            choices=list(choices),
            usage=self._usage,
        )
