"""Turns tokens into text one token at a time, and finds stop strings in that text.

Works on the bytes of single tokens, so each token costs O(its length) and emitted text never changes. All emitted text
equals ``tokenizer.decode`` of all ids, for the decoders of Llama checkpoints: byte level (Llama 3, SmolLM2), where a
character may be split anywhere, and SentencePiece style (Llama 2, TinyLlama) with byte tokens such as <0xE4>.
"""

import codecs
import functools
import json
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

from tightwire.model.sampling.parameters import BannedText
from tightwire.model.text.tokenizer import byte_characters

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Text of tool calls, although some tokenizers call them special.
_OF_CALLS = ("<tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|tool_call|>", "<|/tool_call|>")
_OF_CALLS += ("<function_calls>", "</function_calls>")
_SPACE_MARK = "\u2581"
_SENTENCEPIECE = [
    {"type": "Replace", "pattern": {"String": _SPACE_MARK}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
]


class TokenTable:
    """The bytes of each token, and how the tokenizer's decoder joins them. ValueError: it has an unknown step."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.special = {id_ for id_, token in added.items() if token.special}
        self.of_calls = {id_ for id_, token in added.items() if token.content in _OF_CALLS}
        # A decoder has no other way to read its settings.
        state = {"decoders": []} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        steps: list[dict[str, Any]] = state.get("decoders", [state])
        self.byte_level = [step["type"] for step in steps] == ["ByteLevel"]
        if not self.byte_level and steps[:3] != _SENTENCEPIECE[:3]:
            known = f"ByteLevel alone, or by {_SENTENCEPIECE}, the last optional"
            advice = f"text can be streamed from tokenizers that decode by {known}"
            raise ValueError(f"this tokenizer's decoder has the steps {steps}; {advice}")
        self.strips_space = steps[3:] == _SENTENCEPIECE[3:]
        self._byte_of_char = {char: byte for byte, char in enumerate(byte_characters())}
        self.bytes_of = functools.cache(self._make_bytes)

    def fallback_byte(self, token_id: int) -> int | None:
        """The byte that ``<0xE4>`` stands for; None for all other tokens."""
        match = _BYTE_TOKEN.fullmatch(self._piece(token_id)) if not self.byte_level else None
        return int(match[1], 16) if match else None

    def text_of(self, token_id: int) -> str:
        """The text of a single token; incomplete characters read ``bytes:\\xe2\\x82``, as OpenAI writes them."""
        raw = self.bytes_of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def banned(self, text: str, vocab_size: int) -> BannedText:
        """All spellings of ``text``, with and without a space before it, in the first ``vocab_size`` tokens."""
        text = text.lstrip() or text
        spelled, (longest, ids_of) = f" {text}".encode(), self._ids_of
        steps = tuple(
            {
                token_id: stop
                for stop in range(start + 1, min(start + longest, len(spelled)) + 1)
                for token_id in ids_of.get(spelled[start:stop], ())
                if token_id < vocab_size
            }
            for start in range(len(spelled))
        )
        return BannedText(steps, starts=(0, 1))

    @functools.cached_property
    def _ids_of(self) -> tuple[int, dict[bytes, list[int]]]:
        """The bytes of the longest token, and the tokens by their bytes. SentencePiece has two of some: a character and its byte."""
        ids_of: dict[bytes, list[int]] = {}
        for token_id in range(self._backend.get_vocab_size()):
            if token_id not in self.special and (raw := self.bytes_of(token_id)):
                ids_of.setdefault(raw, []).append(token_id)
        return max(map(len, ids_of), default=0), ids_of

    def _piece(self, token_id: int) -> str:
        return self._backend.id_to_token(token_id) or ""

    def _make_bytes(self, token_id: int) -> bytes:
        """The token's bytes, with the space before a word; a special token's bytes are its name. A padding id has none."""
        piece = self._piece(token_id)
        if self.byte_level:
            table = self._byte_of_char
            # Added tokens are stored as written, so one with a character outside the alphabet is plain text.
            return bytes(table[char] for char in piece) if all(char in table for char in piece) else piece.encode()
        byte = self.fallback_byte(token_id)
        return piece.replace(_SPACE_MARK, " ").encode() if byte is None else bytes([byte])


class Detokenizer:
    """The text of one growing sequence. ``push`` each token, then ``flush`` once.

    ``after_text``: the sequence continues a text, so a leading space is kept; a SentencePiece ``decode`` drops it.
    ``with_calls``: special tokens that belong to tool calls are text.
    """

    def __init__(
        self, table: TokenTable, *, after_text: bool = False, skip_special: bool = True, with_calls: bool = False
    ) -> None:
        hidden = table.special if skip_special else set[int]()
        self._table, self._hidden = table, hidden - table.of_calls if with_calls else hidden
        self._at_start = table.strips_space and not after_text
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._byte_run = bytearray()
        self.num_chars = 0  # emitted so far

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        raw = self._table.bytes_of(token_id)
        if not raw or token_id in self._hidden:
            return ""
        if self._table.byte_level:
            return self._emit(self._utf8.decode(raw))
        byte = self._table.fallback_byte(token_id)
        if byte is not None:
            # A run of byte tokens is text only if all of it is valid UTF-8, so none of it is final before it ends.
            self._byte_run.append(byte)
            return ""
        return self._emit(self._end_byte_run() + raw.decode())

    def flush(self) -> str:
        """The text of a character that was never completed."""
        return self._emit(self._utf8.decode(b"", final=True) if self._table.byte_level else self._end_byte_run())

    def _emit(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            text = text.removeprefix(" ")
        self.num_chars += len(text)
        return text

    def _end_byte_run(self) -> str:
        run, self._byte_run = bytes(self._byte_run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)  # one for each byte, as the tokenizers library writes it


def possible_start(text: str, marks: tuple[str, ...]) -> int:
    """The length of the longest end of ``text`` that begins one of the marks."""
    sizes = range(min(len(text), max(map(len, marks)) - 1), 0, -1)
    return next((size for size in sizes if any(mark.startswith(text[-size:]) for mark in marks)), 0)


class StopStrings:
    """Passes text through until a stop string is complete. The one complete first wins; among several, the longest."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops, self._include = tuple(stops), include
        self._held = ""
        self.hit: str | None = None  # the stop string found; the text ends there

    def push(self, text: str) -> str:
        """The new part of the text that cannot become a stop string."""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start, self.hit = min(found)
            self._held = ""
            return text[: end if self._include else start]
        keep = possible_start(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text held back; call it when no more text comes."""
        held, self._held = self._held, ""
        return held
