"""A tool that adds numbers: the schema of its arguments, an answer that calls it, and a template that lists tools."""

from typing import Any

from tightwire.model.text.tokenizer import CHAT_TEMPLATE

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
# The arguments of the second call do not fit the schema.
WRITTEN = 'Well. <tool_call>[{"name": "add", "arguments": {"a": 12}}, {"name": "add", "arguments": {}}]</tool_call>'
TOOL_TEMPLATE = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}" + CHAT_TEMPLATE
