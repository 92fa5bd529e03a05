"""Chats, preferences and prompts as training data: JSON lines of messages, of which only the assistant's tokens are learned.

Each chat is one sample. Samples are packed into rows of equal length without attention across them: positions begin again at
each sample, which transformers reads as its border. A row's rest is filled with end tokens that nothing learns.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from tightwire.model.checkpoint.errors import ChatTemplateError
from tightwire.training.data.documents import DataError, Line

IGNORED = -100  # a target that nothing learns; torch's ignore_index
_SEEN_CHARACTERS = 64  # more than the longest special token has

Render = Callable[..., str]  # of messages; ``add_generation_prompt`` as in ``Tokenizer.render_chat``
Messages = Sequence[Mapping[str, Any]]


class Row(NamedTuple):
    """S inputs, the token to predict after each, and the position of each in its sample."""

    inputs: list[int]
    targets: list[int]
    positions: list[int]


@dataclass(frozen=True, slots=True)
class ChatEncoder:
    """The tokens of a chat, and which of them the assistant wrote, with the end of its turns."""

    render: Render
    encode: Callable[[str], list[int]]  # without special tokens around the text
    end_token_ids: tuple[int, ...]

    def of(self, line: Mapping[str, Any], place: str) -> "ChatEncoder":
        """The encoder for a line with ``tools``. Raises DataError: the chat template drops or rejects them."""
        tools, asked = line.get("tools"), [{"role": "user", "content": "Hi"}]
        render = partial(self.render, tools=tools)
        try:
            if tools and render(asked, True) == self.render(asked, True):
                raise DataError(f"{place}: the model's chat template does not write tools; remove them from the line")
        except ChatTemplateError as error:
            raise DataError(f"{place}: {error}") from None
        return replace(self, render=render) if tools else self

    def __call__(self, messages: Messages, place: str, first: int = 0) -> tuple[list[int], list[bool]]:
        """The tokens of a chat, and whether each is learned; of messages before ``first`` none is.

        Raises DataError: the chat template rejects the messages, or does not write them one after the other.
        """
        try:
            text = self.render(messages, add_generation_prompt=False)
            cuts = [0]  # from 1 on by turns: where the assistant begins, where it ends
            for number, message in enumerate(messages):
                if message["role"] == "assistant" and number >= first:
                    for part, opens in ((messages[:number], True), (messages[: number + 1], False)):
                        before = self.render(part, add_generation_prompt=opens)
                        if not text.startswith(before) or len(before) < cuts[-1]:
                            raise DataError(
                                f"{place}: the model's chat template does not write message {number} as it would be generated; "
                                "end the chat with it, or begin with the user's message"
                            )
                        cuts.append(len(before))
        except ChatTemplateError as error:
            raise DataError(f"{place}: {error}") from None
        tokens, learned = [], []
        for number, (begin, end) in enumerate(zip(cuts, [*cuts[1:], len(text)], strict=True)):
            # A tokenizer may begin every text with a space, so a part is encoded behind what the model sees before it.
            seen = max(0, begin - _SEEN_CHARACTERS)
            before, upto = self.encode(text[seen:begin]), self.encode(text[seen:end])
            own = upto[len(before) :] if upto[: len(before)] == before else self.encode(text[begin:end])
            tokens += own
            # What a template writes after the end of the turn, such as a newline, is not generated.
            ends = [at for at, token in enumerate(own) if token in self.end_token_ids]
            most = (ends[-1] + 1 if ends else len(own)) if number % 2 else 0
            learned += [at < most for at in range(len(own))]
        return tokens, learned


@dataclass(frozen=True, slots=True)
class ChatPacker:
    """Packs chats in the order they come; a chat that does not fit begins a new row.

    ``recorded``: they are lines of ``recorded_answers``, whose tokens are known, and the targets are the places of its rows.
    """

    encode: ChatEncoder
    sequence_tokens: int
    end_token_id: int
    recorded: bool = False
    same_length = False  # epochs in another order may have more or fewer rows

    def __call__(self, documents: Iterable[str]) -> Iterator[Row]:
        """Raises DataError: a chat is longer than a row, or has no token to learn."""
        row = Row([], [], [])
        for document in documents:
            place, value = document.place if isinstance(document, Line) else "a chat", json.loads(document)
            if self.recorded:
                sample = recorded_row(value)
            else:
                sample = make_row(*self.encode.of(value, place)(value["messages"], place), self.sequence_tokens, place)
            if len(row.inputs) + len(sample.inputs) > self.sequence_tokens:
                yield fill_row(row, self.sequence_tokens, self.end_token_id)
                row = Row([], [], [])
            for values, more in zip(row, sample, strict=True):
                values += more
        if row.inputs:
            yield fill_row(row, self.sequence_tokens, self.end_token_id)


@dataclass(frozen=True, slots=True)
class PairPacker:
    """Makes one sequence of each preference: the row of the chosen answer, then that of the rejected one.

    ``scored``: the rows of a reward model, whose only target stands at the end of the answer.
    """

    encode: ChatEncoder
    sequence_tokens: int
    end_token_id: int
    scored: bool = False
    same_length = True

    def __call__(self, documents: Iterable[str]) -> Iterator[Row]:
        """Raises DataError: a prompt with its answer is longer than a row."""
        for document in documents:
            place, value = document.place if isinstance(document, Line) else "a preference", json.loads(document)
            pair, encode = Row([], [], []), self.encode.of(value, place)
            for answer in (value["chosen"], value["rejected"]):
                encoded = encode([*value["prompt"], *answer], place, first=len(value["prompt"]))
                encoded = up_to_answer(*encoded) if self.scored else encoded
                row = fill_row(make_row(*encoded, self.sequence_tokens, place), self.sequence_tokens, self.end_token_id)
                for values, more in zip(pair, row, strict=True):
                    values += more
            yield pair


class Prompt(NamedTuple):
    """A prompt's tokens, up to where the answer begins; its messages; the other keys of its line."""

    token_ids: list[int]
    messages: Messages
    columns: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PromptPacker:
    """Makes one sequence of each prompt."""

    encode: ChatEncoder
    sequence_tokens: int
    answer_tokens: int
    same_length = True

    def __call__(self, documents: Iterable[str]) -> Iterator[Prompt]:
        """Raises DataError: the chat template rejects a prompt, or its answer would not fit."""
        for document in documents:
            place, value = document.place if isinstance(document, Line) else "a prompt", json.loads(document)
            messages = value.pop("prompt")
            try:
                tokens = self.encode.encode(self.encode.of(value, place).render(messages, add_generation_prompt=True))
            except ChatTemplateError as error:
                raise DataError(f"{place}: {error}") from None
            if len(tokens) + self.answer_tokens > self.sequence_tokens:
                raise DataError(
                    f"{place}: a prompt of {len(tokens)} tokens and an answer of answer_tokens={self.answer_tokens} are "
                    f"more than data.sequence_tokens={self.sequence_tokens}; raise it, or shorten one"
                )
            yield Prompt(tokens, messages, value)


def up_to_answer(tokens: list[int], learned: list[bool]) -> tuple[list[int], list[bool]]:
    """The tokens up to the end of the answer, and one behind them, which alone is learned."""
    end = max((at + 1 for at, own in enumerate(learned) if own), default=0)
    return [*tokens[:end], 0], [False] * end + [True] * (end > 0)


def make_row(tokens: list[int], learned: list[bool], most: int, place: str) -> Row:
    """One sample as a row of its own length. Raises DataError: it is longer than ``most``, or has nothing to learn."""
    if len(tokens) > most + 1:
        raise DataError(
            f"{place}: the chat has {len(tokens)} tokens and data.sequence_tokens is {most}; raise it to {len(tokens) - 1} or "
            "more, or shorten the chat"
        )
    targets = [token if own else IGNORED for token, own in zip(tokens[1:], learned[1:], strict=True)]
    if all(target == IGNORED for target in targets):
        raise DataError(f"{place}: the assistant's messages are empty, so there is no token to learn")
    return Row(tokens[:-1], targets, list(range(len(targets))))


def recorded_row(value: Mapping[str, Any]) -> Row:
    """A line of ``recorded_answers``; the targets are its rows of most likely tokens."""
    tokens, num, place = value["tokens"][:-1], value["num_answered"], value["place"]
    return Row(tokens, [IGNORED] * (len(tokens) - num) + list(range(place, place + num)), list(range(len(tokens))))


def fill_row(row: Row, length: int, token: int) -> Row:
    """``row`` with its rest filled by a sample of ``token`` that nothing learns."""
    rest = length - len(row.inputs)
    return Row(row.inputs + [token] * rest, row.targets + [IGNORED] * rest, row.positions + list(range(rest)))
