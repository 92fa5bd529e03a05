"""POST /v1/chat/completions: messages to a prompt, deltas to ``chat.completion`` bodies and chunks."""

from collections.abc import Iterator

from msgspec import UNSET, Struct, UnsetType, structs

from tightwire.server.api.answer import Dialect, HeadedBody, StreamUsage
from tightwire.server.api.errors import invalid
from tightwire.server.api.generation import Delta, Prompt
from tightwire.server.api.logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs
from tightwire.server.api.prompts import run_off_loop
from tightwire.server.api.responses import Usage
from tightwire.server.api.schemas import ChatBody, Message, TemplateFields
from tightwire.server.api.serving import ServedModel
from tightwire.server.api.trace import TightwireExtra

Logprobs = ChatLogprobs | None


class ChatMessage(Struct):
    content: str
    role: str
    refusal: None = None


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: Logprobs = None
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
    logprobs: Logprobs = None
    finish_reason: str | None = None


class ChatChunk(HeadedBody):
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET
    tightwire: TightwireExtra | UnsetType = UNSET


async def chat_token_ids(model: ServedModel, messages: list[Message], body: TemplateFields) -> list[int]:
    """The conversation in the model's chat template. Raises ApiError 400 without one, or if it rejects the messages."""
    if body.continue_final_message and body.add_generation_prompt:
        raise invalid(
            "continue_final_message and add_generation_prompt are both true, but an answer either continues the last "
            "message or begins a new one; leave one of them out",
            param="continue_final_message",
        )
    if not model.tokenizer.has_chat_template:
        raise invalid(
            f"the model {model.info.name!r} has no chat template; use /v1/completions, or serve an instruct model",
            param="messages",
            code="no_chat_template",
        )
    plain = [message.to_template() for message in messages]
    ending = {"add_generation_prompt": body.begins_message, "continue_final_message": body.continue_final_message}
    num_chars = sum(len(message["content"]) for message in plain)
    try:
        return await run_off_loop(lambda: model.tokenizer.encode_chat(plain, **ending), num_chars)
    except ValueError as error:
        raise invalid(f"the model's chat template rejects these messages: {error}", param="messages") from None


class ChatDialect(Dialect[ChatBody]):
    """A choice's first chunk has the role, its last only the finish reason."""

    body_type, whole_type, chunk_type, id_prefix = ChatBody, ChatCompletion, ChatChunk, "chatcmpl"

    def __init__(self, body: ChatBody, model: ServedModel) -> None:
        super().__init__(body, model)
        self._role = "assistant" if body.begins_message else body.messages[-1].role
        self._begun: set[int] = set()

    async def prompts(self) -> list[Prompt]:
        body = self.body
        if body.top_logprobs is not None and not body.logprobs:
            raise invalid("top_logprobs requires logprobs: true", param="top_logprobs")
        if body.max_tokens is not None and body.token_limit != body.max_tokens:
            raise invalid("max_tokens and max_completion_tokens differ; give one of them", "max_completion_tokens")
        return [Prompt(await chat_token_ids(self.model, body.messages, body), after_text=body.continue_final_message)]

    def chunks(self, delta: Delta, usage: StreamUsage) -> Iterator[HeadedBody]:
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            before = usage
            if isinstance(usage, Usage):
                before = structs.replace(usage, completion_tokens=0, total_tokens=usage.prompt_tokens)
            yield self.chunk([ChatChunkChoice(delta.index, ChatDelta(role=self._role, content=""))], before)
        yield from super().chunks(delta, usage)

    def piece(self, index: int, text: str, logprobs: Logprobs, finish_reason: str | None = None) -> ChatChunkChoice:
        return ChatChunkChoice(index, ChatDelta(content=text or UNSET), logprobs, finish_reason)

    def choice(self, delta: Delta, logprobs: Logprobs, of_prompt: PromptLogprobs | UnsetType) -> ChatChoice:
        return ChatChoice(
            delta.index, ChatMessage(delta.text, self._role), delta.finish_reason or "", logprobs, of_prompt
        )

    def logprobs(self, delta: Delta) -> ChatLogprobs:
        return chat_logprobs(delta.entries, self.model.tokens, self.name_of)
