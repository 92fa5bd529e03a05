"""The body and the events of an answer of POST /v1/responses."""

import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from typing import Any, Literal

from msgspec import UNSET, Struct, json

from tightwire.server.api.chat import new_call_id
from tightwire.server.api.errors import ApiError, ErrorDetail
from tightwire.server.api.generation import Delta, TokenEntry
from tightwire.server.api.logprobs import ChatLogprob, chat_logprobs
from tightwire.server.api.response_bodies import Usage
from tightwire.server.api.serving import ServedModel
from tightwire.server.api.tool_calls import Piece
from tightwire.server.api.trace import Extra
from tightwire.server.dialects.adapted import AdaptedDialect
from tightwire.server.dialects.responses_request import ResponsesBody


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[str]  # always empty
    logprobs: list[ChatLogprob]


class OutputMessage(Struct, tag_field="type", tag="message"):
    id: str
    content: list[OutputText]
    status: str = "in_progress"
    role: str = "assistant"


class OutputCall(Struct, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: str = "in_progress"


class InputTokens(Struct, tag_field="object", tag="response.input_tokens"):
    input_tokens: int


class InputTokensDetails(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct, frozen=True):
    reasoning_tokens: int = 0


class ResponseUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Failure(Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(Struct, frozen=True):
    reason: str


class Reasoning(Struct, frozen=True):
    effort: str | None = None
    summary: None = None


class ResponseBody(Struct, kw_only=True):
    """``status``: in_progress, completed, incomplete or failed."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str = "in_progress"
    error: Failure | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputMessage | OutputCall]
    usage: ResponseUsage | None = None
    instructions: str | None
    text: dict[str, Any]
    tools: list[dict[str, Any]]
    tool_choice: Any
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    max_output_tokens: int | None
    metadata: dict[str, str]
    safety_identifier: str | None
    prompt_cache_key: str | None
    reasoning: Reasoning
    # Constants: nothing is stored or truncated here.
    max_tool_calls: None = None
    previous_response_id: None = None
    store: bool = False
    background: bool = False
    truncation: str = "disabled"
    service_tier: str = "default"
    tightwire: Extra = UNSET


class Event(Struct):
    """``sequence_number`` counts the events of a stream from 0."""

    sequence_number: int


class ResponseEvent(Event):
    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    response: ResponseBody


class ItemEvent(Event):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputMessage | OutputCall


class InItemEvent(Event):
    item_id: str
    output_index: int


class InTextEvent(InItemEvent):
    content_index: int


class PartEvent(InTextEvent):
    part: OutputText
    type: Literal["response.content_part.added", "response.content_part.done"]


class TextDelta(InTextEvent, tag_field="type", tag="response.output_text.delta"):
    delta: str
    logprobs: list[ChatLogprob]


class TextDone(InTextEvent, tag_field="type", tag="response.output_text.done"):
    text: str
    logprobs: list[ChatLogprob]


class ArgumentsDelta(InItemEvent, tag_field="type", tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(InItemEvent, tag_field="type", tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class ErrorEvent(Event, tag_field="type", tag="error"):
    """``error`` makes OpenAI's clients raise; the other fields are the event's own."""

    code: str | None
    message: str
    param: str | None
    error: ErrorDetail


EVENTS = (ResponseEvent, ItemEvent, PartEvent, TextDelta, TextDone, ArgumentsDelta, ArgumentsDone, ErrorEvent)
# Fields of a request that its response repeats.
_REPEATED = {
    *("instructions", "tool_choice", "parallel_tool_calls", "temperature", "top_p", "presence_penalty"),
    *("frequency_penalty", "max_output_tokens", "metadata", "safety_identifier", "prompt_cache_key"),
}


class ResponsesDialect(AdaptedDialect):
    """A message or a function call for each part."""

    body_type, id_prefix = ResponsesBody, "resp_"
    own_names = (
        (r"response_format\.json_schema\.schema", "text.format.schema"),
        ("response_format", "text.format"),
        ("max_tokens", "max_output_tokens"),
        ("messages", "input"),
    )

    def __init__(self, asked: ResponsesBody, model: ServedModel) -> None:
        super().__init__(asked, model)
        optional = dict.fromkeys(("description", "parameters", "strict"))
        text = asked.text.model_dump(exclude_none=True, by_alias=True) if asked.text is not None else {}
        self._response = ResponseBody(
            id=self.id,
            created_at=self._heading[1],
            model=self.model_name,
            output=[],
            text={"format": {"type": "text"}} | text,
            tools=[optional | tool.model_dump() for tool in asked.functions().values()],
            top_logprobs=asked.top_logprobs or 0,
            reasoning=Reasoning(self.body.reasoning_effort),
            **asked.model_dump(include=_REPEATED, warnings=False),  # of choices, which are told apart by their JSON
        )
        self._count = count().__next__  # the number of the next event
        self._entries: list[TokenEntry] = []  # with logprobs, not sent yet

    def begin(self, usage: Usage) -> Iterator[Struct]:
        yield ResponseEvent(self._count(), "response.created", self._response)
        yield ResponseEvent(self._count(), "response.in_progress", self._response)

    def open_text(self) -> Iterator[Struct]:
        message = OutputMessage(new_call_id("msg"), [])
        yield from self._add(message)
        message.content.append(OutputText("", [], []))
        yield PartEvent(**self._place(), part=message.content[0], type="response.content_part.added")

    def open_call(self, name: str) -> Iterator[Struct]:
        return self._add(OutputCall(new_call_id("fc"), new_call_id("call"), name))

    def extend(self, text: str) -> Iterator[Struct]:
        item = self._response.output[-1]
        if isinstance(item, OutputCall):
            item.arguments += text
            yield ArgumentsDelta(**self._place(), delta=text)
            return
        part = item.content[0]
        part.text += text
        # Tokens of calls, and the one that ends the answer, are in no text.
        end = self._readers[0].text_ends.pop(0) if self._readers else len(part.text)
        entries = [entry for entry in self._entries if end - len(text) <= entry.text_offset < end]
        self._entries = [entry for entry in self._entries if entry.text_offset >= end]
        logprobs = chat_logprobs(entries, self.model.tokens, self.name_of).content
        part.logprobs += logprobs
        yield TextDelta(**self._place(), delta=text, logprobs=logprobs)

    def close(self) -> Iterator[Struct]:
        item = self._response.output[-1]
        item.status = "incomplete" if self.finish_reason == "length" else "completed"
        if isinstance(item, OutputCall):
            with suppress(ValueError, RecursionError):
                json.decode(item.arguments)
                item.status = "completed"  # all of the call is there, whatever was cut off behind it
            yield ArgumentsDone(**self._place(), name=item.name, arguments=item.arguments)
        else:
            part = item.content[0]
            yield TextDone(**self._place(), text=part.text, logprobs=part.logprobs)
            yield PartEvent(**self._place(), part=part, type="response.content_part.done")
        yield ItemEvent(self._count(), "response.output_item.done", self._index, item)

    def finished(self, usage: Usage, extra: Extra) -> ResponseBody:
        for _ in self.last_chunks(usage, extra):
            pass
        return self._response

    def last_chunks(self, usage: Usage, extra: Extra) -> Iterator[Struct]:
        response, prompt, answer = self._response, usage.prompt_tokens, usage.completion_tokens
        if not response.output:  # clients expect a message, even an empty one
            yield from self.open_text()
            yield from self.close()
        cached = InputTokensDetails(usage.prompt_tokens_details.cached_tokens)
        response.usage = ResponseUsage(prompt, cached, answer, OutputTokensDetails(), usage.total_tokens)
        response.tightwire = extra
        if self.finish_reason == "length":
            response.status, response.incomplete_details = "incomplete", IncompleteDetails("max_output_tokens")
            yield ResponseEvent(self._count(), "response.incomplete", response)
        else:
            response.status, response.completed_at = "completed", int(time.time())
            yield ResponseEvent(self._count(), "response.completed", response)

    def failure(self, error: ApiError) -> Iterator[Struct]:
        detail = error.body().error
        self._response.status, self._response.error = "failed", Failure("server_error", error.message)
        yield ResponseEvent(self._count(), "response.failed", self._response)
        yield ErrorEvent(self._count(), detail.code, detail.message, detail.param, detail)

    def pieces(self, delta: Delta) -> list[Piece]:
        if self.body.num_logprobs is not None:
            self._entries += delta.entries
        return super().pieces(delta)

    def _add(self, item: OutputMessage | OutputCall) -> Iterator[Struct]:
        self._response.output.append(item)
        yield ItemEvent(self._count(), "response.output_item.added", self._index, item)

    def _place(self) -> dict[str, Any]:
        """The fields of an event inside the last item."""
        item = self._response.output[-1]
        part = {} if isinstance(item, OutputCall) else {"content_index": 0}  # a message has one part
        return {"sequence_number": self._count(), "item_id": item.id, "output_index": self._index, **part}

    @property
    def _index(self) -> int:
        return len(self._response.output) - 1
