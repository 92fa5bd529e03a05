"""The base of APIs that are another form of a chat: their fields become a ``ChatBody``, a chat's deltas become their parts.

Prompts, tools, structured output, sampling, cancellation and errors are the chat's. A whole answer is made of the same parts as a
stream, so the two never differ.
"""

import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from msgspec import Struct
from pydantic import ConfigDict

from tightwire.server.api.answer import StreamUsage
from tightwire.server.api.chat import ChatDialect
from tightwire.server.api.errors import ApiError
from tightwire.server.api.fields import Fields
from tightwire.server.api.generation import Delta
from tightwire.server.api.request_bodies import PROGRESS, ChatBody, Message, SamplingBody, StreamOptions, TextPart
from tightwire.server.api.response_bodies import Usage
from tightwire.server.api.serving import ServedModel
from tightwire.server.api.structured import JsonSchemaFormat, ResponseFormat, Schema
from tightwire.server.api.tool_calls import CallPiece, Piece
from tightwire.server.api.tools import CalledFunction, Function, Tool, ToolCall
from tightwire.server.api.trace import Extra

_TEXT = -1  # in place of a call's number


class OtherTool(Fields):
    """A tool whose schema or execution is the API's own, such as web_search. It is ignored, and the response header says so."""

    model_config = ConfigDict(extra="ignore")

    type: str


def other_tools(tools: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Path and name of each tool that is ignored."""
    for index, tool in enumerate(tools):
        if isinstance(tool, OtherTool):
            yield f"tools[{index}].{tool.type}", tool.type


class AdaptedBody(SamplingBody):
    """A request body that has the meaning of a chat's."""

    @abstractmethod
    def to_chat(self) -> ChatBody:
        """The chat that this body asks for. Raises ApiError 400."""

    def ignored_values(self) -> Iterator[tuple[str, str]]:
        if self.tightwire.progress:
            yield PROGRESS  # these APIs have no event for it

    def make_chat(self, **fields: Any) -> ChatBody:
        """A chat with the fields that both APIs share, and ``fields``. The values have been checked."""
        shared = {name: getattr(self, name) for name in SamplingBody.model_fields if name in self.model_fields_set}
        if self.stream:
            shared["stream_options"] = StreamOptions.model_construct(include_usage=True, continuous_usage_stats=True)
        if self.tightwire.progress:
            shared["tightwire"] = self.tightwire.model_copy(update={"progress": False})
        return ChatBody.model_construct(**shared | {name: value for name, value in fields.items() if value is not None})


def text_message(role: str, *texts: str, call_id: str | None = None) -> Message:
    parts = [TextPart.model_construct(type="text", text=text) for text in texts]
    return Message.model_construct(role=role, content=parts, tool_call_id=call_id)


def add_call(messages: list[Message], call_id: str, name: str, arguments: str) -> None:
    """Put a call that the model made into its last message, or into a new one."""
    if not messages or messages[-1].role != "assistant":
        messages.append(text_message("assistant"))
    function = CalledFunction.model_construct(name=name, arguments=arguments)
    call = ToolCall.model_construct(id=call_id, type="function", function=function)
    messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), call]


def chat_tool(path: str, name: str, description: str | None, parameters: Schema | None) -> Tool:
    function = Function.model_construct(name=name, description=description, parameters=parameters)
    return Tool.model_construct(type="function", function=function).at(path)


def schema_format(schema: Schema) -> ResponseFormat:
    form = JsonSchemaFormat.model_construct(schema_=schema)
    return ResponseFormat.model_construct(type="json_schema", json_schema=form)


class AdaptedDialect(ChatDialect):
    """Splits an answer into parts, each a text or a call, and lets the API open, extend and close them."""

    own_names: ClassVar[Sequence[tuple[str, str]]]  # a pattern of a chat's field, and the field's name in this API

    def __init__(self, asked: AdaptedBody, model: ServedModel) -> None:
        super().__init__(asked.to_chat(), model)
        self._open: int | None = None  # the number of the open part's call
        self.num_calls, self.finish_reason = 0, ""
        self.stop_string: str | None = None

    @abstractmethod
    def begin(self, usage: Usage) -> Iterator[Struct]:
        """The events before the first part."""

    @abstractmethod
    def open_text(self) -> Iterator[Struct]: ...

    @abstractmethod
    def open_call(self, name: str) -> Iterator[Struct]: ...

    @abstractmethod
    def extend(self, text: str) -> Iterator[Struct]:
        """Add text, or a part of the arguments' JSON, to the open part."""

    @abstractmethod
    def close(self) -> Iterator[Struct]: ...

    @abstractmethod
    def finished(self, usage: Usage, extra: Extra) -> Struct:
        """The body of the whole answer, after its last part."""

    def chunks(self, delta: Delta, usage: StreamUsage) -> Iterator[Struct]:
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            assert isinstance(usage, Usage)
            yield from self.begin(usage)
        for piece in self.pieces(delta):
            yield from self._switch_to(piece)
            if text := piece if isinstance(piece, str) else piece.arguments:
                yield from self.extend(text)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_string = delta.finish_reason, delta.stop_string
            if self._open is not None:
                yield from self.close()

    def _switch_to(self, piece: Piece) -> Iterator[Struct]:
        """Open the part that this piece belongs to, unless it is open."""
        number = piece.call if isinstance(piece, CallPiece) else _TEXT
        if number == self._open:
            return
        if self._open is not None:
            yield from self.close()
        self._open = number
        if isinstance(piece, CallPiece):
            self.num_calls += 1
            yield from self.open_call(piece.name or "")
        else:
            yield from self.open_text()

    def whole(self, deltas: Sequence[Delta], usage: Usage, extra: Extra) -> Struct:
        for delta in deltas:
            for _ in self.chunks(delta, usage):
                pass
        return self.finished(usage, extra)

    def in_own_words(self, error: ApiError) -> ApiError:
        error.message = self._own(error.message)
        error.param = error.param and self._own(error.param)
        return error

    def _own(self, text: str) -> str:
        for pattern, name in self.own_names:
            text = re.sub(rf"^{pattern}\b|(?<= ){pattern}(?=[=\[.])", name, text)
        return text
