"""Tools of a chat: the fields of a request, the grammar of required calls, and the prompt of models without a tool template."""

import json
import re
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import AfterValidator, Field, GetPydanticSchema, PrivateAttr, Tag, ValidationInfo

from tightwire.server.api.errors import invalid
from tightwire.server.api.fields import Fields, is_nested_deeply, refusal, told_apart
from tightwire.server.api.structured import Schema, checked_grammar

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
_DECIDING = frozenset(("type", "$ref", "anyOf", "allOf", "oneOf", "enum", "const"))
_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_NO_PARAMETERS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}

# SmolLM2's own system prompt for tools (model card of HuggingFaceTB/SmolLM2-1.7B-Instruct).
_PROMPT = """You are an expert in composing functions. You are given a question and a set of possible functions.
Based on the question, you will need to make one or more function/tool calls to achieve the purpose.
If none of the functions can be used, point it out and refuse to answer.
If the given question lacks the parameters required by the function, also point it out.

You have access to the following tools:
<tools>{tools}</tools>

The output MUST strictly adhere to the following format, and NO other text MUST be included.
The example format is as follows. Please make sure the parameter type is correct. If no function call is needed, please make \
the tool calls an empty list '[]'.
<tool_call>[
{{"name": "func_name1", "arguments": {{"argument1": "value1", "argument2": "value2"}}}},
... (more tool calls as required)
]</tool_call>"""


class Function(Fields):
    name: Name
    description: str | None = None
    parameters: Schema | None = Field(None, description="A JSON schema of the arguments. Default: no arguments.")
    strict: bool | None = Field(None, description="Part of the prompt; demanded calls follow the schema anyway.")


class Tool(Fields):
    type: Literal["function"]
    function: Function
    _path: str = PrivateAttr("")

    @property
    def path(self) -> str:
        """Where the schema of the arguments stands in the request."""
        return self._path

    def at(self, path: str) -> Self:
        self._path = path
        return self


def _placed(tools: list[Tool]) -> list[Tool]:
    return [tool.at(f"tools[{index}].function.parameters") for index, tool in enumerate(tools)]


Tools = Annotated[list[Tool], Field(max_length=128), AfterValidator(_placed)]


class CalledFunction(Fields):
    name: str
    arguments: str = Field(description="The arguments as JSON.")


class ToolCall(Fields):
    """A call that the model made earlier in the conversation."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def to_template(self) -> dict[str, Any]:
        """The form that chat templates read, with the arguments as an object; as a text where they are no valid JSON."""
        given = self.function.arguments
        try:
            arguments = msgspec.json.decode(given or "{}")
        except (ValueError, RecursionError):  # half of a surrogate pair too, which no tokenizer takes
            arguments = given
        arguments = given if is_nested_deeply(arguments) else arguments
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class AllowedTools(Fields):
    mode: Literal["auto", "required"]
    tools: list[Tool] = Field(description="By name; the other tools are left out of the prompt.")


class LimitedChoice(Fields):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _in_short(choice: Any, info: ValidationInfo) -> str:
    if choice == "auto" and info.data.get("tools") == []:
        raise refusal('is "auto" without tools; send tools, or leave it out')
    if isinstance(choice, LimitedChoice):
        names = [tool.function.name for tool in choice.allowed_tools.tools]
        tools = info.data.get("tools", [])
        tools[:] = [tool for tool in tools if tool.function.name in names]
        return choice.allowed_tools.mode
    return "=" + choice.function.name if isinstance(choice, Tool) else choice


ChoiceWord = Annotated[Literal["none", "auto", "required"], Tag("~")]
CHOICES = told_apart(lambda choice: choice.get("type"), "none, auto, required, function, allowed_tools")
_Choice = ChoiceWord | Annotated[Tool, Tag("~function")] | Annotated[LimitedChoice, Tag("~allowed_tools")]
_Shortened = Annotated[_Choice, CHOICES, AfterValidator(_in_short)]
# "none", "auto", "required", or the name of a tool after "=".
ToolChoice = Annotated[str, GetPydanticSchema(lambda _, handler: handler.generate_schema(_Shortened))]


def check_tools(tools: list[Tool], choice: str) -> None:
    """400: a name twice, or a choice without its tool."""
    names = [tool.function.name for tool in tools]
    if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
        raise invalid(f"tools has two functions with the name {twice!r}", "tools")
    for tool in tools:
        if (kind := (tool.function.parameters or {}).get("type", "object")) not in ("object", ["object"]):
            raise invalid(f"{tool.path}.type is {str(kind)[:40]!r}; arguments are an object", f"{tool.path}.type")
    if choice == "required" and not tools:
        raise invalid('tool_choice "required" needs tools', "tool_choice")
    if choice.startswith("=") and choice[1:] not in names:
        known = ", ".join(names) or "none"
        raise invalid(f"tool_choice names {choice[1:65]!r}, which is not among the tools: {known}", "tool_choice")


def tool_grammar(tools: list[Tool], choice: str, *, parallel: bool) -> str:
    """The grammar of demanded calls: a named tool's arguments, or a list of objects. ApiError 400: a schema is not supported."""
    indexes = {tool.function.name: index for index, tool in enumerate(tools)}
    for name, index in indexes.items():
        if choice in ("required", "=" + name):
            grammar = checked_grammar(tools[index].path, "json", _parameters(tools[index]))
            if choice != "required":
                return grammar
    # With an id a schema's references to its own root stay its own. Drafts before 2019 ignore an id beside a reference.
    own = {name: {"$schema": _DRAFT, "$id": f"tool:{index}"} for name, index in indexes.items()}
    definitions = {name: _parameters(tools[index]) | own[name] for name, index in indexes.items()}
    call = {"type": "object", "required": ["name", "arguments"], "additionalProperties": False}
    properties = [{"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}} for name in indexes]
    calls = [{**call, "properties": each} for each in properties]
    most = {} if parallel else {"maxItems": 1}
    schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most, "$defs": definitions}
    return checked_grammar("tools", "json", schema)


def _parameters(tool: Tool) -> Schema:
    """The schema of the arguments. Without a type it would allow other values than objects."""
    given = tool.function.parameters or _NO_PARAMETERS
    return given if _DECIDING.intersection(given) else {"type": "object", **given}


def shorten_ids(messages: list[dict[str, Any]]) -> None:
    """Make the ids of calls and results nine letters and digits, as Mistral's templates demand: their last nine."""
    for message in messages:
        of_result = [(message, "tool_call_id")] if message["role"] == "tool" else []
        for holder, key in (*of_result, *((call, "id") for call in message.get("tool_calls", ()))):
            holder[key] = re.sub("[^A-Za-z0-9]", "", holder.get(key) or "")[-9:].rjust(9, "0")


def with_tool_prompt(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages for a template that ignores tools: they stand in the system message, calls and results in the texts."""
    prompt = _PROMPT.format(tools=json.dumps(tools, ensure_ascii=False)) if tools else ""
    plain = [_as_text(message) for message in messages]
    system = plain.pop(0)["content"] if plain and plain[0]["role"] == "system" else ""
    system = "\n\n".join(filter(None, (system, prompt)))
    return [{"role": "system", "content": system}, *plain] if system else plain


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if calls := message.get("tool_calls"):
        listed = json.dumps([call["function"] for call in calls], ensure_ascii=False)
        text = f"{message['content']}\n" if message["content"] else ""
        return {"role": message["role"], "content": f"{text}<tool_call>{listed}</tool_call>"}
    return message
