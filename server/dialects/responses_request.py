"""The body of POST /v1/responses, and the chat that it asks for."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, Tag

from tightwire.server.api import request_bodies
from tightwire.server.api.errors import invalid
from tightwire.server.api.fields import Fields, told_apart
from tightwire.server.api.request_bodies import ChatBody, Message, Stop, text_parts
from tightwire.server.api.structured import ResponseFormat, Schema
from tightwire.server.api.tools import CHOICES, ChoiceWord, Name
from tightwire.server.dialects import adapted
from tightwire.server.dialects.adapted import OtherTool, other_tools, text_message

_STATELESS = "this server stores no responses; send the whole conversation as input"
_IN_CHAT = "it is a field of chat completions; in this API use "
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "previous_response_id": ((), _STATELESS),
    "conversation": ((), _STATELESS),
    "background": ((False,), "this server stores no responses; use stream"),
    "background_options": ((), "this server stores no responses"),
    "prompt": ((), "this server has no prompt templates; use instructions and input"),
    "moderation": ((), "this server does not moderate"),
    "response_format": (({"type": "text"},), _IN_CHAT + "text.format"),
    "messages": ((), _IN_CHAT + "input"),
    "max_tokens": ((), _IN_CHAT + "max_output_tokens"),
    "max_completion_tokens": ((), _IN_CHAT + "max_output_tokens"),
    "functions": (([],), _IN_CHAT + "tools"),
    "n": ((1,), "a response has one answer"),
    "logprobs": ((False,), _IN_CHAT + 'include: ["message.output_text.logprobs"]'),
    "prompt_logprobs": ((), "only completions and chat completions have them"),
    **request_bodies.UNSUPPORTED_EXTENSIONS,
}
LOGPROBS = "message.output_text.logprobs"


class InputText(Fields):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Any = None
    logprobs: Any = None


class RefusalText(Fields):
    type: Literal["refusal"]
    text: str = Field(alias="refusal")


def _part_kind(part: dict[str, Any]) -> Any:
    return "text" if part.get("type") in ("input_text", "output_text") else part.get("type")


_Part = Annotated[
    Annotated[InputText, Tag("~text")] | Annotated[RefusalText, Tag("~refusal")],
    told_apart(_part_kind, "input_text, output_text, refusal; the model reads text only"),
]
_Parts = Annotated[list[_Part], BeforeValidator(text_parts, json_schema_input_type=str | list[_Part])]


class _Item(Fields):
    id: str | None = Field(None, description="Accepted and ignored.")
    status: str | None = Field(None, description="Accepted and ignored.")


class InputMessage(_Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Parts
    phase: str | None = Field(None, description="Accepted and ignored.")


class CallItem(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = Field(description="The arguments as JSON.")
    namespace: str | None = Field(None, description="Accepted and ignored.")


class CallOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: _Parts


class ReasoningItem(_Item):
    """Left out of the prompt."""

    type: Literal["reasoning"]
    summary: Any = None
    content: Any = None
    encrypted_content: Any = None


_InputItem = Annotated[
    Annotated[InputMessage, Tag("~message")]
    | Annotated[CallItem, Tag("~function_call")]
    | Annotated[CallOutputItem, Tag("~function_call_output")]
    | Annotated[ReasoningItem, Tag("~reasoning")],
    told_apart(
        lambda item: item.get("type") or ("message" if "role" in item else "item_reference"),
        "message, function_call, function_call_output, reasoning (ignored); nothing is stored that an item could refer to",
    ),
]


def _as_items(value: Any) -> Any:
    return [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value


_Items = Annotated[list[_InputItem], Field(min_length=1)]
Input = Annotated[_Items, BeforeValidator(_as_items, json_schema_input_type=str | _Items)]


class TextFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=64, description="Repeated in the response.")
    description: str | None = Field(None, description="Repeated in the response.")
    schema_: Schema | None = Field(None, alias="schema", description="With the type json_schema.")
    strict: bool | None = Field(None, description="Repeated in the response; the answer follows the schema anyway.")


class TextOptions(Fields):
    format: TextFormat | None = None
    verbosity: str | None = Field(None, description="Accepted and ignored.")


class ReasoningOptions(Fields):
    effort: request_bodies.Effort | None = None
    summary: Any = Field(None, description="Accepted and ignored.")
    generate_summary: Any = Field(None, description="Accepted and ignored.")


class FunctionTool(Fields):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: Schema | None = Field(None, description="A JSON schema of the arguments. Default: no arguments.")
    strict: bool | None = Field(None, description="Repeated in the response; demanded calls follow the schema anyway.")


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("~function")] | Annotated[OtherTool, Tag("~other")],
    told_apart(lambda tool: "function" if tool.get("type") == "function" else "other", "objects with a type"),
]


class NamedChoice(Fields):
    type: Literal["function"]
    name: str


class AllowedChoice(Fields):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


_Choice = Annotated[
    ChoiceWord | Annotated[NamedChoice, Tag("~function")] | Annotated[AllowedChoice, Tag("~allowed_tools")], CHOICES
]
_Metadata = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]


class ResponsesBody(adapted.AdaptedBody):
    """``store`` is always false. ``truncation`` and ``service_tier`` are ignored."""

    unsupported: ClassVar[Any] = UNSUPPORTED

    input: Input
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: int | None = Field(
        None,
        ge=1,
        lt=2**31,
        description="Most tokens of the answer. Default: the model's max_new_tokens, else what fits the context.",
    )
    stop: Stop = Field(default_factory=list, description="Extension.")
    text: TextOptions | None = Field(None, description="The form of the answer.")
    reasoning: ReasoningOptions | None = Field(None, description="effort: reasoning_effort of chat completions.")
    tools: list[AnyTool] = Field(default_factory=list, max_length=128, description="Only functions are used.")
    tool_choice: _Choice = Field("auto", description="As in chat completions.")
    parallel_tool_calls: bool = Field(True, description="False: an answer has one call at most.")
    include: list[str] = Field(default_factory=list, description=f"{LOGPROBS}; others are ignored.")
    top_logprobs: request_bodies.NumLogprobs | None = None
    stream_options: request_bodies.StreamOptions | None = Field(None, description="Accepted and ignored.")
    metadata: _Metadata = Field(default_factory=dict, max_length=16, description="Repeated in the response.")
    safety_identifier: str | None = Field(None, description="Repeated in the response.")
    prompt_cache_key: str | None = Field(None, description="Repeated in the response.")

    def ignored_values(self) -> Iterator[tuple[str, str]]:
        yield from super().ignored_values()
        yield from other_tools(self.tools)

    def functions(self) -> dict[int, FunctionTool]:
        """The tools that the answer may call, by their place in ``tools``."""
        functions = {index: tool for index, tool in enumerate(self.tools) if isinstance(tool, FunctionTool)}
        if isinstance(self.tool_choice, AllowedChoice):
            names = [tool.get("name") for tool in self.tool_choice.tools if tool.get("type") == "function"]
            functions = {index: tool for index, tool in functions.items() if tool.name in names}
        return functions

    def to_chat(self) -> ChatBody:
        wants_logprobs = LOGPROBS in self.include or bool(self.top_logprobs)
        return self.make_chat(
            messages=self._messages(),
            max_tokens=self.max_output_tokens,
            stop=self.stop,
            response_format=self._format(),
            tools=[
                adapted.chat_tool(f"tools[{index}].parameters", tool.name, tool.description, tool.parameters)
                for index, tool in self.functions().items()
            ],
            tool_choice=self._chat_choice(),
            parallel_tool_calls=self.parallel_tool_calls,
            logprobs=wants_logprobs,
            top_logprobs=(self.top_logprobs or 0) if wants_logprobs else None,
            reasoning_effort=self.reasoning and self.reasoning.effort,
        )

    def _messages(self) -> list[Message]:
        messages = [text_message("system", self.instructions)] if self.instructions else []
        num_instructions = len(messages)
        for item in self.input:
            if isinstance(item, InputMessage):
                messages.append(text_message(item.role, *(part.text for part in item.content)))
            elif isinstance(item, CallItem):
                adapted.add_call(messages, item.call_id, item.name, item.arguments)
            elif isinstance(item, CallOutputItem):
                messages.append(text_message("tool", *(part.text for part in item.output), call_id=item.call_id))
        if len(messages) == num_instructions:
            raise invalid("input has no message, only reasoning, which is left out of the prompt", "input")
        return messages

    def _chat_choice(self) -> str:
        """The choice in the form of ``ToolChoice``."""
        if isinstance(self.tool_choice, NamedChoice):
            return "=" + self.tool_choice.name
        return self.tool_choice.mode if isinstance(self.tool_choice, AllowedChoice) else self.tool_choice

    def _format(self) -> ResponseFormat | None:
        given = self.text.format if self.text is not None else None
        if given is None:
            return None
        if (given.type == "json_schema") != (given.schema_ is not None):
            message = "text.format.schema belongs to the type json_schema, and that type needs it"
            raise invalid(message, "text.format.schema")
        if given.schema_ is not None:
            return adapted.schema_format(given.schema_)
        return ResponseFormat.model_construct(type=given.type)
