"""The bodies of POST /v1/messages and /v1/messages/count_tokens, and the chat that they ask for."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, Tag
from pydantic_core import PydanticCustomError

from tightwire.server.api.errors import invalid
from tightwire.server.api.fields import Fields, told_apart
from tightwire.server.api.request_bodies import UNSUPPORTED_EXTENSIONS, ChatBody, Effort, Message, Stop, text_parts
from tightwire.server.api.structured import Schema
from tightwire.server.dialects import adapted
from tightwire.server.dialects.adapted import OtherTool, other_tools, text_message

UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "mcp_servers": (([],), "this server calls no MCP servers"),
    "container": ((), "this server runs no containers"),
    "thread": ((), "this server stores no conversations; send the whole conversation as messages"),
    "output_format": ((), "its newer place is output_config.format"),
    "max_completion_tokens": ((), "it is a field of chat completions; in this API use max_tokens"),
    "stop": ((), "it is a field of chat completions; in this API use stop_sequences"),
    "response_format": (({"type": "text"},), "it is a field of chat completions; in this API use output_config.format"),
    "n": ((1,), "a message is one answer"),
    **UNSUPPORTED_EXTENSIONS,
}


class TextBlock(Fields):
    type: Literal["text"]
    text: str
    cache_control: Any = None
    citations: Any = None


def _check_text_block(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") != "text":
        raise PydanticCustomError("kind", "text; the model reads text only")
    return value


_TextBlocks = Annotated[
    list[Annotated[TextBlock, BeforeValidator(_check_text_block)]],
    BeforeValidator(text_parts, json_schema_input_type=str | list[TextBlock]),
]


class ToolUseBlock(Fields):
    """A call that the model made earlier in the conversation."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Any = None
    caller: Any = None


class ToolResultBlock(Fields):
    type: Literal["tool_result"]
    tool_use_id: str
    content: _TextBlocks = Field(default_factory=list)
    is_error: bool | None = Field(None, description="Accepted and ignored; the content says what went wrong.")
    cache_control: Any = None


class ThinkingBlock(Fields):
    """Left out of the prompt."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: Any = None
    signature: Any = None
    data: Any = None


_Block = Annotated[
    Annotated[TextBlock, Tag("~text")]
    | Annotated[ToolUseBlock, Tag("~tool_use")]
    | Annotated[ToolResultBlock, Tag("~tool_result")]
    | Annotated[ThinkingBlock, Tag("~thinking")],
    told_apart(
        lambda block: "thinking" if block.get("type") == "redacted_thinking" else block.get("type"),
        "text, tool_use, tool_result, thinking (ignored); the model reads text only",
    ),
]
_Blocks = Annotated[list[_Block], BeforeValidator(text_parts, json_schema_input_type=str | list[_Block])]


class Turn(Fields):
    role: Literal["user", "assistant", "system"]
    content: _Blocks


class CustomTool(Fields):
    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    input_schema: Schema = Field(description="A JSON schema of the input.")
    strict: bool | None = Field(None, description="Accepted and ignored: a demanded input follows the schema anyway.")
    cache_control: Any = None


_Tool = Annotated[
    Annotated[CustomTool, Tag("~custom")] | Annotated[OtherTool, Tag("~other")],
    told_apart(lambda tool: "custom" if tool.get("type") in (None, "custom") else "other", "objects with a name"),
]


class ToolSelection(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="With the type tool.")
    disable_parallel_tool_use: bool = Field(False, description="An answer has one call at most.")


class OutputFormat(Fields):
    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema", description="The JSON schema that the answer follows.")


class OutputConfig(Fields):
    format: OutputFormat | None = None
    effort: Effort | None = Field(None, description="As reasoning_effort of chat completions.")


class Thinking(Fields):
    type: str
    budget_tokens: Any = Field(None, description="Accepted and ignored.")
    display: Any = Field(None, description="Accepted and ignored.")


class MessagesBody(adapted.AdaptedBody):
    """``cache_control`` is ignored; cached prefixes are found without it."""

    unsupported: ClassVar[Any] = UNSUPPORTED

    max_tokens: int = Field(ge=1, lt=2**31, description="Most tokens of the answer; it ends where the context does.")
    stop_sequences: Stop = Field(default_factory=list)
    output_config: OutputConfig | None = Field(None, description="The form of the answer.")
    messages: list[Turn] = Field(min_length=1, description="The answer continues a last one of the assistant.")
    system: _TextBlocks | None = None
    tools: list[_Tool] = Field(default_factory=list, max_length=1024, description="Only tools with a schema are used.")
    tool_choice: ToolSelection | None = None
    thinking: Thinking | None = Field(
        None, description="disabled: as the effort none; other types: as output_config.effort, high without one."
    )

    def ignored_values(self) -> Iterator[tuple[str, str]]:
        yield from super().ignored_values()
        yield from other_tools(self.tools)

    def to_chat(self) -> ChatBody:
        chosen = self.tool_choice or ToolSelection.model_construct(type="auto")
        functions = [
            adapted.chat_tool(f"tools[{index}].input_schema", tool.name, tool.description, tool.input_schema)
            for index, tool in enumerate(self.tools)
            if isinstance(tool, CustomTool)
        ]
        if (chosen.type == "tool") != (chosen.name is not None):
            raise invalid("tool_choice.name belongs to the type tool, and that type needs it", "tool_choice.name")
        if chosen.type == "any" and not functions:
            raise invalid("tool_choice of the type any needs tools", "tool_choice")
        choices = {"auto": "auto", "none": "none", "any": "required", "tool": f"={chosen.name}"}
        messages = self._messages()
        last = messages[-1]
        form = self.output_config.format if self.output_config is not None else None
        effort = self.output_config.effort if self.output_config is not None else None
        if self.thinking is not None:
            effort = "none" if self.thinking.type == "disabled" else effort or "high"
        return self.make_chat(
            messages=messages,
            tools=functions,
            tool_choice=choices[chosen.type],
            parallel_tool_calls=not chosen.disable_parallel_tool_use,
            continue_final_message=last.role == "assistant" and not last.tool_calls and bool(last.content),
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            response_format=adapted.schema_format(form.schema_) if form is not None else None,
            reasoning_effort=effort,
        )

    def _messages(self) -> list[Message]:
        system = [block.text for block in self.system or () if block.text]
        messages = [text_message("system", *system)] if system else []
        num_system = len(messages)
        for turn in self.messages:
            texts: list[str] = []
            for block in turn.content:
                if isinstance(block, TextBlock):
                    texts.append(block.text)
                elif isinstance(block, ToolResultBlock):
                    result = (part.text for part in block.content)
                    messages.append(text_message("tool", *result, call_id=block.tool_use_id))
            # Two messages of one role in a row are one, as in Anthropic's API.
            if texts and messages and messages[-1].role == turn.role != "system" and not messages[-1].tool_calls:
                messages[-1].content += text_message(turn.role, *texts).content
            elif texts:
                messages.append(text_message(turn.role, *texts))
            for block in turn.content:
                if isinstance(block, ToolUseBlock):
                    adapted.add_call(messages, block.id, block.name, json.dumps(block.input, ensure_ascii=False))
        if len(messages) == num_system:
            raise invalid("messages is empty: no message has text, a tool_use or a tool_result", "messages")
        return messages


class CountTokensBody(MessagesBody):
    """Only the fields that make up the prompt have an effect."""

    unsupported: ClassVar[Any] = {}
    max_tokens: int = 1
