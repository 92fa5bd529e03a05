"""Tool calls in the text of answers: every form, cut into pieces at every place, and texts that are not calls."""

import json
from typing import Any

import pytest
from tokenizers import AddedToken

from tightwire.model.text.tokenizer import Tokenizer, byte_backend
from tightwire.server.api import tool_calls
from tightwire.server.api.tool_calls import CallReader, openers_of, opens_thought

NAMES = {"weather", "add", "geo.find", "find-in-page"}
PARIS = '{"city": "Paris {]\\" \\\\", "days": [1, {"a": 2}]}'
PARIS_CALL = ("weather", json.loads(PARIS))


def read(text: str, size: int, **options: Any) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls of an answer that comes in pieces of ``size`` characters."""
    reader = CallReader(NAMES, **options)
    pieces = [piece for at in range(0, len(text), size) for piece in reader.push(text[at : at + size])] + reader.flush()
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if not isinstance(piece, str):
            if piece.name is not None:
                assert piece.call == len(calls)
                calls.append((piece.name, ""))
            calls[piece.call] = calls[piece.call][0], calls[piece.call][1] + piece.arguments
    assert reader.num_calls == len(calls)
    return "".join(piece for piece in pieces if isinstance(piece, str)), calls


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>', "", [PARIS_CALL]),
        (f'Sure. <tool_call>{{"name": "weather", "arguments": {PARIS}}}</tool_call>', "Sure. ", [PARIS_CALL]),
        (
            f'<tool_call>{{"name": "weather", "arguments": {PARIS}}}</tool_call>\n<tool_call>'
            + '\n{"name":"add","arguments":{"a":1}}',
            "",
            [PARIS_CALL, ("add", {"a": 1})],
        ),
        (
            f'<tool_call>[\n{{"name": "weather", "arguments": {PARIS}}},\n{{"name": "add", "arguments": {{}}}}\n]</tool_call>',
            "",
            [PARIS_CALL, ("add", {})],
        ),
        ("<tool_call>[]</tool_call>", "", []),
        (f'{{"name": "weather", "parameters": {PARIS}}}', "", [PARIS_CALL]),
        (
            f'<|python_tag|>{{"name": "weather", "parameters": {PARIS}}}; {{"name": "add", "parameters": {{"a": 2}}}}',
            "",
            [PARIS_CALL, ("add", {"a": 2})],
        ),
        (f'{{"type": "function", "name": "weather", "parameters": {PARIS}}}', "", [PARIS_CALL]),
        (f'{{"arguments": {PARIS}, "name": "weather"}}', "", [PARIS_CALL]),
        ('[{"name": "add", "arguments": {"a": 3}}]', "", [("add", {"a": 3})]),
        ('[weather(city="Paris", days=[1]), geo.find(ok=True, at=None)]', "", [
            ("weather", {"city": "Paris", "days": [1]}),
            ("geo.find", {"ok": True, "at": None}),
        ]),
        ('[add(a="]")] Done [1].', " Done [1].", [("add", {"a": "]"})]),
        ('So <tool_call></tool_call>{"name": "add", "arguments": {}}', 'So {"name": "add", "arguments": {}}', []),
        ('[find-in-page(a="add-1 ()"), add()]', "", [("find-in-page", {"a": "add-1 ()"}), ("add", {})]),
        ("<function_calls>find-in-page()\nadd(a=-1)</function_calls>", "", [("find-in-page", {}), ("add", {"a": -1})]),
        ("[find-on-page(a=1)]", "[find-on-page(a=1)]", []),
        ("[add - 1]", "[add - 1]", []),
        ("[unknown(a=1)] Done.", "[unknown(a=1)] Done.", []),
        ('[add(a="""5" wide""")]', "", [("add", {"a": '5" wide'})]),
        ("[add(a='a]\\'', b=\"\u01c3Kung\", c=(1, ')'))]", "", [("add", {"a": "a]'", "b": "\u01c3Kung", "c": [1, ")"]})]),
        # Mistral: a list, or names and arguments, with or without ids.
        (
            f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}}}, {{"name": "add", "arguments": {{}}, "id": "a1b2c3d4e"}}]',
            "",
            [PARIS_CALL, ("add", {})],
        ),
        (f'Sure.[TOOL_CALLS][{{"name": "weather", "arguments": {PARIS}, "id": "a1b2c3d4e"}}]', "Sure.", [PARIS_CALL]),
        (f"[TOOL_CALLS]weather[ARGS]{PARIS}", "", [PARIS_CALL]),
        (f"Sure.[TOOL_CALLS]weather{PARIS}", "Sure.", [PARIS_CALL]),
        (
            f'[TOOL_CALLS]geo.find[CALL_ID]a1b2c3d4e[ARGS]{{"ok": 1}}[TOOL_CALLS]weather[CALL_ID]f5[ARGS]{PARIS}',
            "",
            [("geo.find", {"ok": 1}), PARIS_CALL],
        ),
        (f"[TOOL_CALLS]weather[ARGS]{PARIS} done", "done", [PARIS_CALL]),
        ("[TOOL_CALLS]unknown[ARGS]{}", "[TOOL_CALLS]unknown[ARGS]{}", []),
        ('[TOOL_CALLS]no[ARGS]{}[TOOL_CALLS]add[ARGS]{"a": 1}', "[TOOL_CALLS]no[ARGS]{}", [("add", {"a": 1})]),
        ("[TOOL_CALLS]add[ARGS]a = 1", "[TOOL_CALLS]add[ARGS]a = 1", []),
        ("[TOOL_CALLS]weather[AR", "[TOOL_CALLS]weather[AR", []),
        ("[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
        # Granite 3, with keys of its own; Phi-4-mini.
        (f'<|tool_call|>[{{"name": "weather", "arguments": {PARIS}, "label": "$1"}}]', "", [PARIS_CALL]),
        (
            f'Well.\n<|tool_call|> [ {{"name": "weather", "arguments": {PARIS}}},{{"name": "add", "parameters": {{}}}} ]<|/tool_call|>',
            "Well.\n",
            [PARIS_CALL, ("add", {})],
        ),
        (f'functools[{{"name": "weather", "arguments": {PARIS}}}]', "", [PARIS_CALL]),
        ("<|tool_call|>[add]<|/tool_call|>", "<|tool_call|>[add]<|/tool_call|>", []),
        ("Use functools[0], functools.", "Use functools[0], functools.", []),
        # OLMo 3.
        (
            'Sure.\n<function_calls>weather(city="Pa)\\nris</", days=[1, {"a": null}])\n\n  geo.find(ok=true, at=None, no=false)\n'
            + "</function_calls>",
            "Sure.\n",
            [
                ("weather", {"city": "Pa)\nris</", "days": [1, {"a": None}]}),
                ("geo.find", {"ok": True, "at": None, "no": False}),
            ],
        ),
        ("<function_calls>\nadd(a=1)", "", [("add", {"a": 1})]),
        ('<function_calls>add(a="""if b:\n    c""")</function_calls>', "", [("add", {"a": "if b:\n    c"})]),
        ("<function_calls>\n</function_calls>", "<function_calls>\n</function_calls>", []),
        ("<function_calls>add()</function_calls> <function_calls>add(a=-1)</function_calls>Done.", "Done.", [
            ("add", {}),
            ("add", {"a": -1}),
        ]),
        ("<function_calls>add(a=b)</function_calls>.", "<function_calls>add(a=b)</function_calls>.", []),
        ("<function_calls>add()\nunknown()</function_calls>", "<function_calls>add()\nunknown()</function_calls>", []),
        ("<function_calls>add(a=", "<function_calls>add(a=", []),
        # Qwen: what it thinks is text, and so are calls in it.
        (
            '<think>\nI <tool_call>{"name": "add", "arguments": {}}</tool_call>?\n</think>\n\n'
            + f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>',
            '<think>\nI <tool_call>{"name": "add", "arguments": {}}</tool_call>?\n</think>',
            [PARIS_CALL],
        ),
        ("<think>\n\n</think>\n\nHi <there>", "<think>\n\n</think>\n\nHi <there>", []),
        ("<think>[add(a=1)] </thin", "<think>[add(a=1)] </thin", []),
        ("<think> 1 </think>[add(a=1)]", "<think> 1 </think>", [("add", {"a": 1})]),
        # Qwen2.5-Coder: a fence.
        (f'```json\n{{\n  "name": "weather",\n  "arguments": {PARIS}\n}}\n```', "", [PARIS_CALL]),
        (f'```json\n[{{"name": "weather", "arguments": {PARIS}}}]\n```\nDone.', "\nDone.", [PARIS_CALL]),
        ('```json\n{"answer": 1}\n```\nDone.', '```json\n{"answer": 1}\n```\nDone.', []),
        ("```json\n[1, 2]\n```", "```json\n[1, 2]\n```", []),
        ("```python\nprint()\n```", "```python\nprint()\n```", []),
        # Braces that are missing or too many, as small models write them.
        (
            f'<tool_call>{{"name": "weather", "arguments": {PARIS}\n</tool_call>\n'
            + '<tool_call>{"name": "add", "arguments": {}}}\n</tool_call>',
            "",
            [PARIS_CALL, ("add", {})],
        ),
        (
            '<tool_call>add(1)</tool_call><tool_call>{"name": "add", "arguments": {}}</tool_call>',
            "<tool_call>add(1)</tool_call>",
            [("add", {})],
        ),
        ("Just text with { and [ and < and <tool.", "Just text with { and [ and < and <tool.", []),
        ('{"answer": [1, {"b": 2}]} and more', '{"answer": [1, {"b": 2}]} and more', []),
        ('[{"answer": 1}]', '[{"answer": 1}]', []),
        ("[1, 2, 3]", "[1, 2, 3]", []),
        ("[unknown(a=1)]", "[unknown(a=1)]", []),
        ("[add(1)]", "[add(1)]", []),
        ('{"name": "unknown", "arguments": {}}', '{"name": "unknown", "arguments": {}}', []),
        ('{"name": "add"', '{"name": "add"', []),
        ('<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [("add", {})]),
        ('<tool_call>{"name": "add", "parameters": [1]}</tool_call>', "", [("add", [1])]),
        ("[add(a=1e999)]", "[add(a=1e999)]", []),
        ('{"arguments": {"a": 1e999}, "name": "add"}', '{"arguments": {"a": 1e999}, "name": "add"}', []),
        ('{"arguments": {}, "name": ["add"]}', '{"arguments": {}, "name": ["add"]}', []),
        (f'{{"arguments": {"[" * 5000}{"]" * 5000}}}', f'{{"arguments": {"[" * 5000}{"]" * 5000}}}', []),
        ("<tool_call>add(1)</tool_call>", "<tool_call>add(1)</tool_call>", []),
        ("", "", []),
        (" \n", " \n", []),
    ],
)  # fmt: skip
def test_forms(text: str, content: str, calls: list[tuple[str, object]], size: int) -> None:
    got_content, got_calls = read(text, size)
    assert (got_content, [(name, json.loads(arguments)) for name, arguments in got_calls]) == (content, calls)


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (r'{"arguments": {"x": "\ud83d é"}, "name": "add"}', r'{"x": "\ud83d é"}'),
        (r'{"arguments": "\ud83d", "name": "add"}', r"\ud83d"),
        (r'[add(x="\ud83d")]', r'{"x": "\ud83d"}'),
    ],
)
def test_half_a_surrogate_pair_stays_escaped(text: str, arguments: str, size: int) -> None:
    assert read(text, size) == ("", [("add", arguments)])


def test_arguments_come_as_they_are_written() -> None:
    reader = CallReader(NAMES)
    pieces = [piece for char in '<tool_call>{"name": "add", "arguments": {"a": 12}}' for piece in reader.push(char)]
    assert [piece.arguments for piece in pieces if not isinstance(piece, str)] == ["", *'{"a": 12}']


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_call_that_is_cut_off_keeps_what_was_sent(size: int) -> None:
    assert read('<tool_call>{"name": "add", "arguments": {"a": 1', size) == ("", [("add", '{"a": 1')])


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("cut", ["", ",", ', {"na', ', {"name": "add"'])
def test_the_cut_off_beginning_of_another_required_call_is_no_text(cut: str, size: int) -> None:
    text = '[{"name": "add", "arguments": {"a": 1}}' + cut
    assert read(text, size, calls_only=True) == ("", [("add", '{"a": 1}')])


@pytest.mark.parametrize("size", [1, 1000])
def test_a_named_tool_answers_with_its_arguments(size: int) -> None:
    assert read('{"a": 1}', size, whole_call="add") == ("", [("add", '{"a": 1}')])


@pytest.mark.parametrize("size", [1, 1000])
def test_a_prompt_may_have_begun_the_thinking(size: int) -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert read(f"So {call}?\n</think>\n{call}", size, thinks=True) == (f"So {call}?\n</think>", [("add", "{}")])


@pytest.mark.parametrize("size", [1, 1000])
def test_marks_that_a_model_does_not_know_are_text(size: int) -> None:
    call = '[TOOL_CALLS]add[ARGS]{"a": 1}'
    assert read(call, size, openers=("<tool_call>",)) == (call, [])


def test_a_list_of_python_calls_is_parsed_once_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    monkeypatch.setattr(tool_calls, "_parse_python", lambda text: parsed.append(text))
    reader, given = CallReader(NAMES), "[add(a=[" + "[1], " * 9 + "])]"
    assert [piece for char in given + "(no call" for piece in reader.push(char)] == [given, *"(no call"]
    assert parsed == [given]


@pytest.mark.parametrize("size", [1, 1000])
def test_a_list_after_the_only_mark_that_a_model_knows(size: int) -> None:
    text = '<tool_call>[{"name": "add", "arguments": {"a": 1}}]</tool_call>'
    assert read(text, size, openers=("<tool_call>",)) == ("", [("add", '{"a": 1}')])


def _tokenizer(template: str, *tokens: str) -> Tokenizer:
    backend = byte_backend(300)
    backend.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    return Tokenizer(backend, chat_template=template, special_tokens={}, bos_token_id=None, eos_token_ids=())


ALL = {"<tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "<function_calls>", "<|tool_call|>", "functools["}
WRITES_TOOLS = "{{ tools }}{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("template", "tokens", "openers"),
    [
        (WRITES_TOOLS + "<tool_call>", (), {"<tool_call>"}),
        (WRITES_TOOLS, ("[TOOL_CALLS]",), {"[TOOL_CALLS]"}),
        (WRITES_TOOLS + "[TOOL_CALLS]", ("<|python_tag|>",), {"[TOOL_CALLS]", "<|python_tag|>"}),
        (WRITES_TOOLS + "<function_calls>", (), {"<function_calls>"}),
        (WRITES_TOOLS, ("<|tool_call|>",), {"<|tool_call|>", "<tool_call>", "functools["}),
        (WRITES_TOOLS, (), ALL),
        # A template that ignores tools gets a prompt that asks for <tool_call>.
        ("{{ messages[0].content }}", ("[TOOL_CALLS]",), ALL),
    ],
)
def test_template_and_tokens_choose_the_marks(template: str, tokens: tuple[str, ...], openers: set[str]) -> None:
    assert set(openers_of(_tokenizer(template, *tokens))) == openers


@pytest.mark.parametrize(("end", "thinks"), [("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("", False)])
def test_the_end_of_a_prompt_says_whether_the_model_thinks(end: str, thinks: bool) -> None:
    tokenizer = _tokenizer("", "<think>", "</think>")
    assert opens_thought(tokenizer, tokenizer.encode("<|start|>assistant\n" + end)) is thinks
