"""Finds a run's files and reads documents from them on demand: text separated by blank lines, whole text files, JSON lines, chats.

A hash of each document's text decides whether it is held out, so the split does not depend on order, epoch or number of ranks.
Does not import torch, so that missing data is refused at once.
"""

import glob
import gzip
import hashlib
import json
import os
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from tightwire.training.config.tree import CHATS, ENGLISH, PREFERENCES, PROMPTS, TrainConfig

ROLES = ("system", "user", "assistant", "tool")
# The prose of the benches and the training examples; ``english/ORIGIN.md`` lists sources and licences.
ENGLISH_NAME = "English prose of the project (Austen, Twain, Newton, the Jargon File)"
ENGLISH_FOLDER = Path(__file__).parent / "english"
OWN_FILES = {ENGLISH: tuple(ENGLISH_FOLDER / f"{piece}.txt" for piece in ("emma", "jargon", "opticks", "tom_sawyer"))}
# 240 sentences about persons: chats answer with the facts as JSON, preferences have a worse answer too, prompts the facts alone.
_EXAMPLES = ENGLISH_FOLDER.with_name("examples")
OWN_FILES |= {name: (_EXAMPLES / f"{name.removeprefix('example-')}.jsonl",) for name in (CHATS, PREFERENCES, PROMPTS)}
_HASH_BYTES = 8
_MOST_NAMES = 3  # file names in an error message


@cache
def english_text() -> str:
    """330 000 characters, about 77 000 tokens of SmolLM2's tokenizer."""
    return "\n".join(path.read_text(encoding="utf-8") for path in OWN_FILES[ENGLISH])


class DataError(ValueError):
    """The data is missing, empty or damaged."""


class Line(str):
    """A document that is a line of JSON and knows its file and number, for error messages."""

    place: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """All documents of ``files``; each iteration reads the files again.

    ``parted_by``: ``blank-line`` or ``file``, for text files. A JSONL file has one document per line, under ``text_key``.
    ``kind``: of any but ``text``, every file has JSON lines, and documents are ``Line``.
    """

    files: tuple[Path, ...]
    kind: str = "text"
    text_key: str = "text"
    parted_by: str = "blank-line"

    def __post_init__(self) -> None:
        wrong = [path for path in self.files if path.name.lower().removesuffix(".gz").endswith(".json")]
        if wrong and self.kind == "text":
            advice = "give .jsonl, a line for each document, or rename it to .txt to learn it as it stands"
            raise DataError(f"data: {wrong[0]} is JSON, and data.kind=text reads text and JSON lines; {advice}")

    def __iter__(self) -> Iterator[str]:
        return self.read(self.files)

    def read(self, files: Iterable[Path]) -> Iterator[str]:
        """The documents of some of the files. Raises DataError: one is unreadable or not UTF-8, or a line has no text."""
        for path in files:
            opened = gzip.open if path.suffix.lower() == ".gz" else open
            try:
                with opened(path, "rt", encoding="utf-8-sig") as lines:  # without the mark that some editors begin with
                    yield from self._documents(path, lines)
            except (OSError, EOFError, zlib.error) as error:
                raise DataError(f"{path}: cannot be read: {error}") from None
            except UnicodeDecodeError as error:
                raise DataError(f"{path}: is not UTF-8 text: {error}; convert or remove it") from None

    def _documents(self, path: Path, lines: IO[str]) -> Iterator[str]:
        if self.kind != "text":
            check = {"preferences": check_preference, "prompts": check_prompt, "distill": check_prompt}.get(self.kind)
            for line, value in _json_lines(path, lines):
                value = value if isinstance(value, dict) else {}
                check(value, line.place) if check else check_messages(value.get("messages"), line.place)
                yield line
        elif {".jsonl", ".ndjson"} & {suffix.lower() for suffix in path.suffixes}:
            yield from _json_texts(path, lines, self.text_key)
        elif self.parted_by == "file":
            text = lines.read()
            if text.strip():
                yield text
        else:
            parts = groupby(lines, lambda line: bool(line.strip()))
            yield from ("".join(paragraph) for has_text, paragraph in parts if has_text)


def find_files(patterns: Sequence[str]) -> tuple[Path, ...]:
    """The files that match any pattern, sorted, each once. Raises DataError: a pattern matches no file."""
    found: set[Path] = set()
    for pattern in patterns:
        if pattern in OWN_FILES:
            found |= set(OWN_FILES[pattern])
            continue
        given = os.path.expanduser(pattern)
        matching = [given] if os.path.isfile(given) else glob.glob(given, recursive=True)  # a name may have brackets
        files = {path for path in map(Path, matching) if path.is_file()}
        if not files:
            raise DataError(
                f"data: no file matches {pattern} (in {Path.cwd()}); give paths or patterns such as docs/**/*.md, or "
                f"{ENGLISH}, the prose that comes with Tightwire"
            )
        found |= files
    return tuple(sorted(found))


def fingerprint_of(files: Sequence[Path]) -> str:
    """A fingerprint of the files' names and sizes, in order."""
    return hashlib.sha256("\n".join(f"{path.name} {path.stat().st_size}" for path in files).encode()).hexdigest()[:16]


def is_held_out(document: str, share: float) -> bool:
    """Whether a hash of the document's text is in the held-out ``share`` of all hashes."""
    digest = hashlib.blake2b(document.encode(), digest_size=_HASH_BYTES).digest()
    return int.from_bytes(digest) < share * 256**_HASH_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """The run's documents; ``held_out_documents`` is None if a share of ``documents`` is held out."""

    config: TrainConfig
    documents: Documents
    held_out_documents: Documents | None

    @classmethod
    def find(cls, config: TrainConfig) -> "RunData":
        """Raises DataError: a pattern matches no file."""
        data = config.data
        documents, held_out = (
            Documents(files=find_files(patterns), kind=data.kind, text_key=data.text_key, parted_by=data.parted_by)
            for patterns in (data.files, data.held_out_files)
        )
        return cls(config=config, documents=documents, held_out_documents=held_out if held_out.files else None)

    def check_documents(self) -> None:
        """Raises DataError: the files contain no document, or the first one cannot be read; the message names the files."""
        for key, documents in (("files", self.documents), ("held_out_files", self.held_out_documents)):
            if documents is not None and next(iter(documents), None) is None:
                names = ", ".join(map(str, documents.files[:_MOST_NAMES]))
                more = len(documents.files) - _MOST_NAMES
                rest = f" and {more} more" if more > 0 else ""
                raise DataError(f"data.{key}: there is no document in {names}{rest}; give files with text")

    @property
    def held_out_share(self) -> float:
        """The share of ``documents`` that is held out."""
        return self.config.data.held_out if self.held_out_documents is None else 0.0

    def training(self, epoch: int, *, in_order: bool = False) -> Iterator[str]:
        """Every document that is not held out once, in an order that the seed and ``epoch`` determine, or as they stand.

        Files come in random order; each document is drawn at random from a window of the next ``data.shuffle_documents``.
        """
        window, share = 0 if in_order else self.config.data.shuffle_documents, self.held_out_share
        draw, files = random.Random(f"{self.config.seed} {epoch}"), list(self.documents.files)
        if window:
            draw.shuffle(files)
        kept = (text for text in self.documents.read(files) if not is_held_out(text, share))
        return _shuffled(kept, window, draw) if window > 1 else kept

    def held_out(self) -> Iterable[str]:
        if self.held_out_documents is not None:
            return self.held_out_documents
        return (text for text in self.documents if is_held_out(text, self.held_out_share))


def _shuffled(documents: Iterator[str], window: int, draw: random.Random) -> Iterator[str]:
    held: list[str] = []
    for document in documents:
        if len(held) < window:
            held.append(document)
            continue
        place = draw.randrange(window)
        held[place], document = document, held[place]
        yield document
    draw.shuffle(held)
    yield from held


def _json_lines(path: Path, lines: IO[str]) -> Iterator[tuple[Line, Any]]:
    """The lines that are not blank, with their values."""
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        line = Line(text)
        line.place = f"{path}:{number}"
        try:
            value = json.loads(text)
            if "\\u" in text:
                json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
        except (ValueError, RecursionError) as error:  # also of a number with thousands of digits
            raise DataError(f"{line.place}: is not valid JSON: {error}") from None
        yield line, value


def _json_texts(path: Path, lines: IO[str], key: str) -> Iterator[str]:
    for line, value in _json_lines(path, lines):
        text = value.get(key) if isinstance(value, dict) else None
        if not isinstance(text, str):
            keys = ", ".join(value) if isinstance(value, dict) else type(value).__name__
            raise DataError(f"{line.place}: has no text under {key!r} (found: {keys}); set data.text_key")
        if text:
            yield text


def check_preference(value: Mapping[str, Any], place: str) -> None:
    """Raises DataError: it has no prompt, no two answers, or twice the same."""
    parts: list[Any] = [value.get(key) for key in ("prompt", "chosen", "rejected")]
    prompt, *answers = parts
    if not all(isinstance(part, list) and part for part in parts):
        raise DataError(f"{place}: needs messages under prompt, chosen and rejected (found: {', '.join(value)})")
    for answer in answers:
        check_messages([*prompt, *answer], place)
        if answer[-1]["role"] != "assistant":
            raise DataError(f"{place}: chosen and rejected must end with a message of the assistant")
    if answers[0] == answers[1]:
        raise DataError(f"{place}: chosen and rejected are the same")


def check_prompt(value: Mapping[str, Any], place: str) -> None:
    """Raises DataError: it has no prompt, or one that the assistant ends or that is empty."""
    prompt = value.get("prompt")
    check_messages(prompt, place, answered=False)
    assert isinstance(prompt, list)
    if prompt[-1]["role"] == "assistant" or not prompt[-1]["content"].strip():
        raise DataError(f"{place}: prompt must end with a message that is not the assistant's and not empty")
    if taken := {"prompts", "completions"} & value.keys():
        raise DataError(f"{place}: the key {taken.pop()} is what rewards get the prompts and answers by; rename it")


def check_messages(messages: Any, place: str, *, answered: bool = True) -> None:
    """Raises DataError: these are not messages, or none is the assistant's. ``answered`` False: none need be."""
    if not isinstance(messages, list) or not messages:
        key = "messages" if answered else "prompt"
        raise DataError(f'{place}: has no messages; write {{"{key}": [{{"role": "user", "content": "..."}}, ...]}}')
    for number, message in enumerate(messages):
        role, content = (message.get(key) if isinstance(message, dict) else None for key in ("role", "content"))
        if role not in ROLES:
            raise DataError(f"{place}: message {number} has role {role!r}; known: {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise DataError(f"{place}: message {number} has no text under content (got {type(content).__name__})")
    if answered and not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{place}: has no message of the assistant, so there is nothing to learn")
