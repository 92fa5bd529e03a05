"""A chat's prompt: long conversations and tools are rendered and tokenized off the event loop."""

import threading
from typing import Any

import pytest
from helpers.server.fake_engine import INFO, byte_tokenizer

from tightwire.model.text.tokenizer import Tokenizer
from tightwire.server.api.chat import ChatDialect
from tightwire.server.api.request_bodies import ChatBody
from tightwire.server.api.serving import ModelHolder
from tightwire.server.api.tool_calls import openers_of
from tightwire.server.http.check_body import check_fields

USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function", "function": {"name": "add", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields", "in_thread"),
    [
        ({"messages": [USER] * 3}, False),
        ({"messages": [{**USER, "content": "Hi" * 4000}]}, True),
        ({"messages": [{**USER, "content": ""}] * 200}, True),
        ({"messages": [USER], "tools": [{"type": "function", "function": {"name": "add"}}]}, True),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]}, True),
        ({"messages": [USER], "chat_template_kwargs": {"documents": []}}, True),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_long_conversation_is_rendered_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], in_thread: bool
) -> None:
    encode, threads = Tokenizer.encode_chat, list[int]()

    def note_thread(tokenizer: Tokenizer, *arguments: Any, **variables: Any) -> list[int]:
        threads.append(threading.get_ident())
        return encode(tokenizer, *arguments, **variables)

    monkeypatch.setattr(Tokenizer, "encode_chat", note_thread)
    holder = ModelHolder()
    holder.fill(info=INFO, tokenizer=byte_tokenizer())
    assert holder.model is not None
    await ChatDialect(check_fields(fields, ChatBody), holder.model).prompts()
    [thread] = threads
    assert (thread != threading.get_ident()) == in_thread


async def test_a_template_for_tools_is_that_of_conversations_with_tools() -> None:
    """The default template may omit earlier calls, so without tools they stand in the text."""
    holder = ModelHolder()
    holder.fill(info=INFO, tokenizer=byte_tokenizer())
    assert holder.model is not None
    tokenizer = holder.model.tokenizer
    tokenizer.tool_template = (
        "{{ tools[0].function.name }} by [TOOL_CALLS]{{ (messages[-1].tool_calls or [{}])[0].id }}"
    )
    called = [USER, {"role": "assistant", "tool_calls": [CALL | {"id": "call_123456789"}]}]
    with_tools = {"messages": called, "tools": [{"type": "function", "function": {"name": "add"}}]}
    for fields, wanted in ((with_tools, "add by [TOOL_CALLS]123456789"), ({"messages": called}, '<tool_call>[{"name"')):
        (prompt,) = await ChatDialect(check_fields(fields, ChatBody), holder.model).prompts()
        assert wanted in tokenizer.decode(prompt.token_ids)
    assert openers_of(tokenizer) == ("[TOOL_CALLS]",)
