"""The body and the events of an answer of POST /v1/messages."""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET, Struct

from tightwire.server.api.chat import new_call_id
from tightwire.server.api.errors import ApiError, MessagesErrorBody
from tightwire.server.api.generation import Prompt
from tightwire.server.api.response_bodies import Usage
from tightwire.server.api.serving import ServedModel
from tightwire.server.api.trace import Extra
from tightwire.server.dialects.adapted import AdaptedDialect
from tightwire.server.dialects.messages_request import MessagesBody


class Text(Struct, tag_field="type", tag="text"):
    text: str


class ToolUse(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Struct, frozen=True):
    """``input_tokens``: the prompt tokens computed for this request; the others were found in the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class AnsweredMessage(Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    model: str
    content: list[Text | ToolUse]
    usage: MessageUsage
    role: str = "assistant"
    stop_reason: str | None = None
    stop_sequence: str | None = None
    tightwire: Extra = UNSET


class TokenCount(Struct, frozen=True):
    input_tokens: int


class TextPiece(Struct, tag_field="type", tag="text_delta"):
    text: str


class InputPiece(Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class Event(Struct, tag_field="type"): ...


class MessageStart(Event, tag="message_start"):
    message: AnsweredMessage


class Ping(Event, tag="ping"): ...


class BlockStart(Event, tag="content_block_start"):
    index: int
    content_block: Text | ToolUse


class BlockDelta(Event, tag="content_block_delta"):
    index: int
    delta: TextPiece | InputPiece


class BlockStop(Event, tag="content_block_stop"):
    index: int


class StopDelta(Struct):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(Event, tag="message_delta"):
    delta: StopDelta
    usage: MessageUsage
    tightwire: Extra = UNSET


class MessageStop(Event, tag="message_stop"): ...


EVENTS = (MessageStart, Ping, BlockStart, BlockDelta, BlockStop, MessageDelta, MessageStop)


class MessagesDialect(AdaptedDialect):
    """A content block for each part."""

    body_type, id_prefix = MessagesBody, "msg_"
    end_of_stream = b""
    own_names = (
        (r"response_format\.json_schema\.schema", "output_config.format.schema"),
        ("response_format", "output_config.format"),
    )

    def __init__(self, asked: MessagesBody, model: ServedModel) -> None:
        super().__init__(asked, model)
        usage = MessageUsage(0, 0, 0)  # until the answer begins
        self._message = AnsweredMessage(id=self.id, model=self.model_name, content=[], usage=usage)
        self._input = ""  # the JSON of the open block's input
        self._fills_context = False

    async def prompts(self) -> list[Prompt]:
        """The prompt. A max_tokens that the context has no room for is lowered, and the stop reason says so."""
        [prompt] = await super().prompts()
        room = self.model.info.plan.max_model_len - len(prompt.token_ids)
        if 1 <= room < (self.body.max_tokens or 0):
            self.body.max_tokens, self._fills_context = room, True
        return [prompt]

    def begin(self, usage: Usage) -> Iterator[Struct]:
        self._message.usage = _usage(usage)
        yield MessageStart(self._message)
        yield Ping()

    def open_text(self) -> Iterator[Struct]:
        return self._add(Text(""))

    def open_call(self, name: str) -> Iterator[Struct]:
        self._input = ""
        return self._add(ToolUse(new_call_id("toolu"), name, {}))

    def extend(self, text: str) -> Iterator[Struct]:
        block = self._message.content[-1]
        if isinstance(block, Text):
            block.text += text
            yield BlockDelta(self._index, TextPiece(text))
        else:
            self._input += text
            yield BlockDelta(self._index, InputPiece(text))

    def close(self) -> Iterator[Struct]:
        block = self._message.content[-1]
        if isinstance(block, ToolUse):
            block.input = _parsed(self._input)
        yield BlockStop(self._index)

    def finished(self, usage: Usage, extra: Extra) -> AnsweredMessage:
        self._message.stop_reason, self._message.stop_sequence = self._stop_reason(), self.stop_string
        self._message.usage, self._message.tightwire = _usage(usage), extra
        return self._message

    def last_chunks(self, usage: Usage, extra: Extra) -> Iterator[Struct]:
        yield MessageDelta(StopDelta(self._stop_reason(), self.stop_string), _usage(usage), extra)
        yield MessageStop()

    def failure(self, error: ApiError) -> Iterator[Struct]:
        yield error.body(MessagesErrorBody)

    def _stop_reason(self) -> str:
        if self.finish_reason == "length":
            return "model_context_window_exceeded" if self._fills_context else "max_tokens"
        if self.stop_string is not None:
            return "stop_sequence"
        return "tool_use" if self.num_calls else "end_turn"

    def _add(self, block: Text | ToolUse) -> Iterator[Struct]:
        self._message.content.append(block)
        yield BlockStart(self._index, block)

    @property
    def _index(self) -> int:
        return len(self._message.content) - 1


def _usage(usage: Usage) -> MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)


def _parsed(text: str) -> dict[str, Any]:
    """The input of a call. Text that is cut off, or that the model wrote wrong, comes under a name of Anthropic's docs."""
    try:
        found = msgspec.json.decode(text or "{}")
    except (msgspec.MsgspecError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": text}
