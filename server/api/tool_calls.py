"""Finds tool calls in the text of an answer, piece by piece.

It reads ``<tool_call>`` with an object (Hermes, Qwen) or a list of objects (SmolLM2), ``<|tool_call|>`` (Granite 3, Phi-4-mini) and
``functools`` (Phi-4-mini) with a list of objects, an object at the start, in a fence or after ``<|python_tag|>`` (Llama 3),
``[TOOL_CALLS]`` with a list of objects or ``name[ARGS]`` and an object (Mistral), ``[name(key=value)]`` at the start (Llama 3.2,
"pythonic"), and ``<function_calls>`` with a line ``name(key=value)`` for each call (OLMo 3). What is not a call of a known tool
stays text, and so does all that a model thinks between ``<think>`` and ``</think>``.
"""

import ast
import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from tightwire.model.text.tokenizer import Tokenizer
from tightwire.server.api.detokenize import possible_start

_MISTRAL = "[TOOL_CALLS]"
_LINES, _LINES_END = "<function_calls>", "</function_calls>"
_BAR, _FUNCTOOLS = "<|tool_call|>", "functools["
_OPENERS = ("<tool_call>", "<|python_tag|>", _MISTRAL, _LINES, _BAR, _FUNCTOOLS)
_ALSO = {_BAR: ("<tool_call>", _FUNCTOOLS)}  # what Granite 3.1 and Phi-4-mini, which know the key, may write instead
_CLOSERS = ("</tool_call>", "<|/tool_call|>")
_FENCE, _FENCE_END = "```json", "```"  # around an object at the start, as Qwen2.5-Coder writes calls
_THINK, _THINK_END = "<think>", "</think>"
_BETWEEN = re.compile(r"(?:[\s,;\]}]|\[(?!T|\Z))*")  # two calls
_NAMED = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")
_NAMED_CHARS = 200  # longer than a name and an id
_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_PYTHONIC = re.compile(r"\[\s*[A-Za-z_][\w.-]*\s*\(")
_MAYBE_PYTHONIC = re.compile(r"\[\s*([A-Za-z_][\w.-]*\s*)?")
_HYPHENATED = re.compile(r"(?<![\w.-])[A-Za-z_][\w.]*(?:-[\w.]+)+(?=\s*\()")  # a name, but a difference for Python
_HYPHEN = "\U00010767"  # in place of its hyphens: a letter for Python, of Linear A


class CallPiece(NamedTuple):
    """A part of a call: the first has its name, and all together have the JSON of its arguments."""

    call: int  # its number in the answer, from 0
    name: str | None
    arguments: str


Piece = str | CallPiece


class CallReader:
    """Splits one answer into text and calls. ``push`` each piece of text, then ``flush`` once."""

    def __init__(
        self,
        names: Collection[str],
        *,
        openers: tuple[str, ...] = _OPENERS,
        thinks: bool = False,
        whole_call: str | None = None,
        calls_only: bool = False,
    ) -> None:
        """``names``: the known tools. ``openers``: see ``openers_of``. ``thinks``: the prompt ends with ``<think>``.

        ``whole_call``: the answer is the arguments of this tool and nothing else. ``calls_only``: a grammar demands calls,
        so text after one is the beginning of another that was cut off. It is dropped.
        """
        self._names, self._whole_call, self._calls_only = names, whole_call, calls_only
        self._openers, self._thinks = openers, thinks
        self.num_calls = int(whole_call is not None)
        self._text, self._num_chars = "", 0  # not read yet; of the whole answer so far
        self.text_ends: list[int] = []  # where the last pieces of text end in the answer
        self._at_start, self._in_calls = True, False
        self._skipped = ""  # read since the last call; text after all, if no call follows
        self._call: _OpenCall | None = None

    def push(self, text: str) -> list[Piece]:
        """The pieces that this text completes."""
        if self._whole_call is not None:
            name = self._whole_call if self._at_start else None
            self._at_start = False
            return [CallPiece(0, name, text)] if text or name else []
        self._text, self._num_chars, self.text_ends = self._text + text, self._num_chars + len(text), []
        return [piece for piece in self._read(at_end=False) if self._noted(piece)]

    def flush(self) -> list[Piece]:
        """The rest, when no more text comes. A call that was cut off and not begun to be sent is text."""
        pieces = [piece for piece in self._read(at_end=True) if self._noted(piece)]
        if self._call is not None and self._call.raw.startswith("["):  # or a quote in three quotes has hidden its end
            call, self._call = self._call, None
            pieces += [piece for piece in self._whole(call.raw) if self._noted(piece)]
        rest = self._skipped + self._call.raw if self._call is not None and self._call.sent is None else self._text
        self._text = ""
        if (rest.strip() or not self.num_calls) and self._noted(rest):
            pieces.append(rest)
        drops_text = self._calls_only and self.num_calls > 0
        return [piece for piece in pieces if not (drops_text and isinstance(piece, str))]

    def _noted(self, piece: Piece) -> bool:
        """False if the piece is empty. Otherwise all that was read before it and in it is no longer in ``_text``."""
        if isinstance(piece, str) and piece:
            self.text_ends.append(self._num_chars - len(self._text))
        return piece != ""

    def _read(self, *, at_end: bool) -> Iterator[Piece]:
        before = None
        while self._text and before != (self._text, self._call, self._in_calls):
            before = self._text, self._call, self._in_calls
            if self._call is not None:
                yield from self._continue_call(self._call)
            elif self._in_calls:
                yield from self._between_calls(at_end)
            else:
                yield from self._before_calls(at_end)

    def _before_calls(self, at_end: bool) -> Iterator[Piece]:
        """Pass text on until something begins a call."""
        stripped = self._text.lstrip()
        self._thinks = self._thinks or (self._at_start and stripped.startswith(_THINK))
        if self._thinks:
            yield from self._thought(at_end)
            return
        if self._at_start and not at_end and (_THINK.startswith(stripped) or _FENCE.startswith(stripped)):
            return
        if self._at_start and re.match(r"\[(?!\s*\{)", stripped):
            if _PYTHONIC.match(stripped):
                self._call, self._text, self._at_start = _OpenCall(is_python=True), stripped, False
                return
            if not at_end and _MAYBE_PYTHONIC.fullmatch(stripped):
                return
        elif self._at_start and stripped.startswith(("{", "[", _FENCE)):
            self._in_calls, self._at_start = True, False
            self._text = stripped.removeprefix(_FENCE)
            self._skipped = stripped.removesuffix(self._text)
            return
        found = [(at, opener) for opener in self._openers if (at := self._text.find(opener)) >= 0]
        if found:
            at, self._skipped = min(found)
            before, self._text = self._text[:at], self._text[at:]
            if not self._is_blank_between(before):
                self._at_start = False
                yield before
            self._in_calls, self._text = True, self._text.removeprefix(self._skipped)
            return
        ready = self._text[: len(self._text) - (0 if at_end else possible_start(self._text, self._openers))]
        if not self._is_blank_between(ready):
            self._text, self._at_start = self._text[len(ready) :], False
            yield ready

    def _thought(self, at_end: bool) -> Iterator[Piece]:
        """Pass on what the model thinks. The answer starts behind it."""
        text, mark, rest = self._text.partition(_THINK_END)
        held = 0 if mark or at_end else possible_start(text, (_THINK_END,))
        self._thinks, self._text = not mark, rest or text[len(text) - held :]
        yield text[: len(text) - held] + mark

    def _is_blank_between(self, text: str) -> bool:
        """True if it is white space around calls, or may be."""
        return not text.strip() and (self._at_start or self.num_calls > 0)

    def _between_calls(self, at_end: bool) -> Iterator[Piece]:
        if self._skipped == _LINES:
            yield from self._python_lines(at_end)
            return
        rest = _BETWEEN.sub("", self._text, count=1)
        skipped = self._skipped + self._text[: len(self._text) - len(rest)]
        if rest.startswith("{"):
            self._call, self._text, self._skipped = _OpenCall(), rest, skipped
        elif closer := next((mark for mark in self._closers if rest.startswith(mark)), ""):
            self._in_calls, self._text, self._skipped = False, rest.removeprefix(closer), ""
        elif opener := next((mark for mark in self._openers if rest.startswith(mark)), ""):
            # The next call without the end of the last one.
            self._skipped, self._text = opener, rest.removeprefix(opener)
        elif self._skipped == _MISTRAL and (head := _NAMED.match(rest)) and head[1] in self._names:
            self._call, self._text = _OpenCall(sent=0), rest[head.end() :]
            yield self._begin(head[1])
        elif at_end or not self._may_begin(rest):
            self._in_calls, self._text, self._at_start = False, rest, False
            if self.num_calls == 0:  # not a call; separators after a call are dropped
                yield skipped
            self._skipped = ""

    def _may_begin(self, rest: str) -> bool:
        """True if more text may make ``rest`` the beginning of a call or the end of one."""
        is_name = self._skipped == _MISTRAL and "{" not in rest and len(rest) < _NAMED_CHARS
        return is_name or any(mark.startswith(rest) for mark in (*self._closers, *self._openers, "["))

    @property
    def _closers(self) -> tuple[str, ...]:
        """The marks that end calls. A fence around what is no call is text."""
        return (*_CLOSERS, _FENCE_END) if self.num_calls else _CLOSERS

    def _begin(self, name: str, arguments: Any = "") -> CallPiece:
        """The first piece of the next call; the marks before it are no text. Half of a surrogate pair stays escaped."""
        self.num_calls, self._skipped = self.num_calls + 1, ""
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return CallPiece(self.num_calls - 1, name, text.encode(errors="backslashreplace").decode())

    def _continue_call(self, call: "_OpenCall") -> Iterator[Piece]:
        self._text = call.take(self._text)
        if call.sent is None and (head := _HEAD.match(call.raw)) and head[1] in self._names:
            call.sent = head.end()
            yield self._begin(head[1])
        # The call's own closing brace does not belong to its arguments.
        if call.sent is not None and (end := call.arguments_end) > call.sent:
            yield CallPiece(self.num_calls - 1, None, call.raw[call.sent : end])
            call.sent = end
        if call.is_complete:
            self._call = None
            if call.sent is None:
                yield from self._whole(call.raw)

    def _whole(self, raw: str) -> Iterator[Piece]:
        """A complete object whose keys are in another order, or that is not a call, or a list of Python calls."""
        if raw.startswith("["):
            yield from self._python_calls(_parse_python(raw), raw)
            return
        try:
            found: dict[str, Any] = json.loads(raw)
            json.dumps(found, allow_nan=False)  # a number that is too large, or NaN, is no JSON
        except (ValueError, RecursionError):
            found = {}
        name, arguments = found.get("name"), found.get("arguments", found.get("parameters"))
        if isinstance(name, str) and name in self._names:
            yield self._begin(name, {} if arguments is None else arguments)
        else:
            yield self._skipped + raw
            self._skipped = ""

    def _python_lines(self, at_end: bool) -> Iterator[Piece]:
        """Calls up to the end mark, or to the answer's end without it."""
        lines, end, rest = self._text.partition(_LINES_END)
        if end or at_end:
            self._in_calls, self._text, self._skipped, self._at_start = False, rest, "", False
            calls = _parse_python(lines.strip()) or _parse_python(re.sub(r"\n\s+", "\n", lines.strip()))
            yield from self._python_calls(calls, _LINES + lines + end)

    def _python_calls(self, calls: list[tuple[str, dict[str, Any]]] | None, text: str) -> Iterator[Piece]:
        """The calls; the text that they were read from if there are none, or one is of no known tool."""
        if not calls or any(name not in self._names for name, _ in calls):
            yield text
        else:
            yield from (self._begin(name, arguments) for name, arguments in calls)


class _OpenCall:
    """The text so far of a JSON object, or of a list of Python calls. ``sent``: the end of what was sent of ``raw``, or None.

    An object that is made with ``sent=0`` is the arguments themselves.
    """

    def __init__(self, sent: int | None = None, *, is_python: bool = False) -> None:
        self.raw = ""
        self._quotes, self._opening, self._closing = ("\"'", "([{", ")]}") if is_python else ('"', "[{", "]}")
        self.sent, self._is_arguments = sent, sent is not None
        self.is_complete = False
        self._depth, self._escaped, self._quote = 0, False, ""  # of the string that the text ends in
        self._inner_end: int | None = None  # after the first value inside that is not a string or number

    def take(self, text: str) -> str:
        """Add text up to the object's end; returns the rest."""
        for at, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif char == "\\" and self._quote:
                self._escaped = True
            elif char in self._quotes and self._quote in ("", char):
                self._quote = "" if self._quote else char
            elif self._quote:
                continue
            elif char in self._opening:
                self._depth += 1
            elif char in self._closing:
                self._depth -= 1
                if self._depth == 1 and self._inner_end is None:
                    self._inner_end = len(self.raw) + at + 1
                if self._depth == 0:
                    return self._end(text, at + 1)
            elif char == "<" and self._inner_end is not None and self._depth == 1:
                return self._end(text, at)  # the call's own closing brace is missing
        self.raw += text
        return ""

    def _end(self, text: str, at: int) -> str:
        self.is_complete = True
        self.raw += text[:at]
        return text[at:]

    @property
    def arguments_end(self) -> int:
        """Where the arguments end, as far as they are known."""
        return len(self.raw) if self._inner_end is None or self._is_arguments else self._inner_end


def openers_of(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the marks of calls that the model knows, from its chat template and its tokens; all where they name none."""
    template, id_of = tokenizer.tool_template or tokenizer.chat_template or "", tokenizer.backend.token_to_id
    known = {mark for mark in _OPENERS if mark in template or id_of(mark) is not None}
    known = known.union(*(_ALSO.get(mark, ()) for mark in known))
    return tuple(known) if known and tokenizer.template_writes_tools else _OPENERS


def opens_thought(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> bool:
    """True if the template has begun what the model thinks."""
    return tokenizer.decode(prompt_ids[-8:], skip_special_tokens=False).rstrip().endswith(_THINK)


class _JsonNames(ast.NodeTransformer):
    """Reads JSON's names of constants as Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        constants = {"true": True, "false": False, "null": None}
        return ast.Constant(constants[node.id]) if node.id in constants else node


def _parse_python(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    """Names and arguments of ``[f(a=1), g()]`` or of calls in lines; None if it is something else, or no argument is a literal."""
    try:
        text = _HYPHENATED.sub(lambda name: name[0].replace("-", _HYPHEN), text)
        found = [each.value if isinstance(each, ast.Expr) else each for each in ast.parse(text).body]
        if len(found) == 1 and isinstance(found[0], ast.List):
            found = list(found[0].elts)
        calls: list[tuple[str, dict[str, Any]]] = []
        for call in found:
            if not isinstance(call, ast.Call) or call.args:
                return None
            values = {kw.arg or "": ast.literal_eval(_JsonNames().visit(kw.value)) for kw in call.keywords}
            calls.append((ast.unparse(call.func), values))
        return json.loads(json.dumps(calls, allow_nan=False).replace(json.dumps(_HYPHEN)[1:-1], "-"))
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None
