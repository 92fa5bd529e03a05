"""Renders messages with a model's Jinja template, in a sandbox, as transformers does.

Templates expect transformers' whitespace settings, ``raise_exception``, ``strftime_now``, ``tojson`` and ``generation``.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tightwire.model.checkpoint.errors import ChatTemplateError

_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # marks the end of the last message; the space shows whether a template trims


class ChatTemplate:
    """A compiled template and its special tokens (``bos_token``, ``eos_token``, ...)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template cannot be compiled: {error}") from None
        self._special_tokens = dict(special_tokens)

    def render_open(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Render messages up to the end of the last one's text, so that an answer continues it, as transformers does.

        Raises:
            ChatTemplateError: the template rejects these messages, or does not print the last one's text.
        """
        *before, last = messages
        marked = {**last, "content": last["content"] + _MARK}
        text = self.render([*before, marked], add_generation_prompt=False, **variables)
        end = text.rfind(_MARK.strip())
        if end < 0 or last["content"].strip() not in text:
            raise ChatTemplateError("the model's chat template does not print the last message as it is")
        return text[:end] if text.startswith(_MARK, end) else text[:end].rstrip()  # this template trims messages

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, **variables: Any) -> str:
        """Render messages; raises ChatTemplateError with the template's message if it rejects them."""
        values = {"tools": None, "documents": None, **self._special_tokens, **variables}
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **values)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template rejects these messages: {error}") from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
            raise ChatTemplateError(f"the model's chat template fails on these messages: {error!r}") from None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}``: prints its body."""

    tags = {"generation"}  # noqa: RUF012 - the type that jinja2 requires

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Encode JSON without escaping HTML characters; Jinja's filter would turn ``<`` into ``\\u003c``."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
