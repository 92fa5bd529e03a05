"""POST /v1/chat/completions: messages to a prompt, deltas to ``chat.completion`` bodies and chunks."""

import functools
import logging
import math
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import UNSET, Struct, UnsetType, structs

from tightwire.server.api.answer import Dialect, HeadedBody, StreamUsage
from tightwire.server.api.errors import invalid
from tightwire.server.api.generation import Delta, Prompt
from tightwire.server.api.logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs
from tightwire.server.api.prompts import run_off_loop
from tightwire.server.api.request_bodies import ChatBody, Message, TemplateFields
from tightwire.server.api.response_bodies import Usage
from tightwire.server.api.serving import ServedModel
from tightwire.server.api.tool_calls import CallPiece, CallReader, Piece, openers_of, opens_thought
from tightwire.server.api.tools import Tool, check_tools, shorten_ids, with_tool_prompt
from tightwire.server.api.trace import Extra

_OWN_VARIABLES = {"self", "messages", "tools", "add_generation_prompt", "continue_final_message"}  # of chat templates

_log = logging.getLogger(__name__)

Logprobs = ChatLogprobs | None


class FunctionDelta(Struct):
    """``arguments``: JSON; in a stream the next part of it. ``name``: only with the first part."""

    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(Struct):
    """A tool call. In a stream its parts have the same ``index``, and only the first has ``id`` and ``type``."""

    function: FunctionDelta
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatMessage(Struct):
    content: str | None  # null if there are only tool calls
    role: str
    refusal: None = None
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: Logprobs = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(HeadedBody):
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    tightwire: Extra = UNSET


class ChatDelta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: Logprobs = None
    finish_reason: str | None = None


class ChatChunk(HeadedBody):
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET
    tightwire: Extra = UNSET


@functools.cache
def _note_tool_prompt(name: str) -> None:
    _log.warning("the chat template of %s ignores tools; requests with tools get Tightwire's own system prompt", name)


async def chat_token_ids(
    model: ServedModel, messages: list[Message], body: TemplateFields, tools: Sequence[Tool] = ()
) -> list[int]:
    """The conversation in the model's chat template. Raises ApiError 400 without one, or if it rejects the messages."""
    if body.continue_final_message and body.add_generation_prompt:
        both = "continue_final_message and add_generation_prompt are both true"
        why = "an answer either continues the last message or begins a new one"
        raise invalid(f"{both}, but {why}; leave one of them out", "continue_final_message")
    if model.tokenizer.chat_template is None:
        message = f"the model {model.info.name!r} has no chat template; use /v1/completions, or serve an instruct model"
        raise invalid(message, "messages", "no_chat_template")
    if taken := sorted(_OWN_VARIABLES & body.chat_template_kwargs.keys()):
        path = f"chat_template_kwargs.{taken[0]}"
        raise invalid(f"{path} is set by the server; use the field of this name, or leave it out", path)
    ending = {"add_generation_prompt": body.begins_message, "continue_final_message": body.continue_final_message}
    variables = body.template_variables | ending

    def encode() -> list[int]:
        plain, listed = [m.to_template() for m in messages], [tool.model_dump(exclude_none=True) for tool in tools]
        if listed or any(message["role"] == "tool" or "tool_calls" in message for message in plain):
            # A template for tools is that of conversations with a list of them; the default one may omit earlier calls.
            if model.tokenizer.template_writes_tools and (listed or not model.tokenizer.tool_template):
                variables["tools"] = listed or None
                if "[TOOL_CALLS]" in (model.tokenizer.tool_template or model.tokenizer.chat_template or ""):
                    shorten_ids(plain)
            else:
                _note_tool_prompt(model.info.name)
                plain = with_tool_prompt(plain, listed)
        return model.tokenizer.encode_chat(plain, **variables)

    # A message without text takes time as well; tools, calls and variables of the template may be long.
    size = sum(32 + sum(len(part.text) + 1 for part in message.content) for message in messages)
    is_plain = not (tools or body.chat_template_kwargs or any(message.tool_calls for message in messages))
    try:
        return await run_off_loop(encode, size if is_plain else math.inf)
    except ValueError as error:
        raise invalid(f"the model's chat template rejects these messages: {error}", param="messages") from None


class ChatDialect(Dialect[ChatBody]):
    """A choice's first chunk has the role, its last only the finish reason."""

    body_type, whole_type, chunk_type, id_prefix = ChatBody, ChatCompletion, ChatChunk, "chatcmpl-"

    def __init__(self, body: ChatBody, model: ServedModel) -> None:
        super().__init__(body, model)
        self._role = "assistant" if body.begins_message else body.messages[-1].role
        self._begun: set[int] = set()
        self._thinks = False  # the prompt has begun what the model thinks
        self._readers: dict[int, CallReader] = {}  # by choice

    async def prompts(self) -> list[Prompt]:
        body = self.body
        if body.top_logprobs is not None and not body.logprobs:
            raise invalid("top_logprobs requires logprobs: true", param="top_logprobs")
        if body.max_tokens is not None and body.token_limit != body.max_tokens:
            raise invalid("max_tokens and max_completion_tokens differ; give one of them", "max_completion_tokens")
        if body.tools or body.demands_calls:
            check_tools(body.tools, body.tool_choice)
        ids = await chat_token_ids(self.model, body.messages, body, () if body.tool_choice == "none" else body.tools)
        self._thinks = body.may_call_tools and opens_thought(self.model.tokenizer, ids)
        return [Prompt(ids, after_text=body.continue_final_message)]

    def chunks(self, delta: Delta, usage: StreamUsage) -> Iterator[Struct]:
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            before = usage
            if isinstance(usage, Usage):
                before = structs.replace(usage, completion_tokens=0, total_tokens=usage.prompt_tokens)
            yield self.chunk([ChatChunkChoice(delta.index, ChatDelta(role=self._role, content=""))], before)
        if not self.body.may_call_tools:
            yield from super().chunks(delta, usage)
            return
        logprobs: Any = self._logprobs(delta)
        for piece in self.pieces(delta):
            part = ChatDelta(content=piece) if isinstance(piece, str) else ChatDelta(tool_calls=[_call_delta(piece)])
            yield self.chunk([ChatChunkChoice(delta.index, part, logprobs)], usage)
            logprobs = None
        if delta.finish_reason is not None or logprobs is not None:
            reason = delta.finish_reason and _reason(delta.finish_reason, self._readers[delta.index])
            yield self.chunk([ChatChunkChoice(delta.index, ChatDelta(), logprobs, reason)], usage)

    def pieces(self, delta: Delta) -> list[Piece]:
        """The next pieces of text and calls of this delta's choice. Call it with each delta in order."""
        if not self.body.may_call_tools:
            return [delta.text] if delta.text else []
        if (reader := self._readers.get(delta.index)) is None:
            reader = self._readers[delta.index] = self._make_reader()
        found = reader.push(delta.text) + (reader.flush() if delta.finish_reason is not None else [])
        parallel = self.body.parallel_tool_calls
        return [piece for piece in found if parallel or isinstance(piece, str) or piece.call == 0]

    def piece(self, index: int, text: str, logprobs: Logprobs, finish_reason: str | None = None) -> ChatChunkChoice:
        return ChatChunkChoice(index, ChatDelta(content=text or UNSET), logprobs, finish_reason)

    def choice(self, delta: Delta, logprobs: Logprobs, of_prompt: PromptLogprobs | UnsetType) -> ChatChoice:
        message = _message(self.pieces(delta), self._role)
        reason = _reason(delta.finish_reason or "", self._readers.get(delta.index))
        ids = delta.token_ids if self.body.return_token_ids else UNSET
        return ChatChoice(delta.index, message, reason, logprobs, of_prompt, ids)

    def logprobs(self, delta: Delta) -> ChatLogprobs:
        return chat_logprobs(delta.entries, self.model.tokens, self.name_of)

    def _make_reader(self) -> CallReader:
        choice, demanded = self.body.tool_choice, self.body.demands_calls
        names = {tool.function.name for tool in self.body.tools}
        whole_call = choice[1:] if choice.startswith("=") else None
        openers, thinks = openers_of(self.model.tokenizer), self._thinks and not demanded
        return CallReader(names, openers=openers, thinks=thinks, whole_call=whole_call, calls_only=demanded)


def _call_delta(piece: CallPiece) -> CallDelta:
    if piece.name is None:
        return CallDelta(FunctionDelta(piece.arguments), index=piece.call)
    function = FunctionDelta(piece.arguments, name=piece.name)
    return CallDelta(function, index=piece.call, id=new_call_id("call"), type="function")


def _message(pieces: Sequence[Piece], role: str) -> ChatMessage:
    calls: dict[int, CallDelta] = {}
    for piece in pieces:
        if not isinstance(piece, str):
            first = CallDelta(FunctionDelta("", name=piece.name or ""), id=new_call_id("call"), type="function")
            calls.setdefault(piece.call, first).function.arguments += piece.arguments
    text = "".join(piece for piece in pieces if isinstance(piece, str))
    return ChatMessage(text or (None if calls else ""), role, tool_calls=list(calls.values()) or UNSET)


def _reason(reason: str, reader: CallReader | None) -> str:
    return "tool_calls" if reason == "stop" and reader is not None and reader.num_calls else reason


def new_call_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex[:24]}"
