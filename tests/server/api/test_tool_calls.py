"""Tool calls in the text of answers: every form, cut into pieces at every place, and texts that are not calls."""

import json

import pytest

from tightwire.server.api.tool_calls import CallReader

NAMES = {"weather", "add", "geo.find"}
PARIS = '{"city": "Paris {]\\" \\\\", "days": [1, {"a": 2}]}'
PARIS_CALL = ("weather", json.loads(PARIS))


def read(
    text: str, size: int, *, whole_call: str | None = None, calls_only: bool = False
) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls of an answer that comes in pieces of ``size`` characters."""
    reader = CallReader(NAMES, whole_call=whole_call, calls_only=calls_only)
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
        ("Just text with { and [ and < and <tool.", "Just text with { and [ and < and <tool.", []),
        ('{"answer": [1, {"b": 2}]} and more', '{"answer": [1, {"b": 2}]} and more', []),
        ('[{"answer": 1}]', '[{"answer": 1}]', []),
        ("[1, 2, 3]", "[1, 2, 3]", []),
        ("[unknown(a=1)]", "[unknown(a=1)]", []),
        ("[add(1)]", "[add(1)]", []),
        ('{"name": "unknown", "arguments": {}}', '{"name": "unknown", "arguments": {}}', []),
        ('{"name": "add"', '{"name": "add"', []),
        ("<tool_call>add(1)</tool_call>", "<tool_call>add(1)</tool_call>", []),
        ("", "", []),
    ],
)  # fmt: skip
def test_forms(text: str, content: str, calls: list[tuple[str, object]], size: int) -> None:
    got_content, got_calls = read(text, size)
    assert (got_content, [(name, json.loads(arguments)) for name, arguments in got_calls]) == (content, calls)


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
