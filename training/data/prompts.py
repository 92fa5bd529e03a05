"""Prompts as training data: JSON lines of messages that the model answers, with what their rewards need to know."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tightwire.model.checkpoint.errors import ChatTemplateError
from tightwire.training.data.chats import ChatEncoder, Messages
from tightwire.training.data.documents import DataError, Line


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
                tokens = self.encode.encode(self.encode.render(messages, add_generation_prompt=True))
            except ChatTemplateError as error:
                raise DataError(f"{place}: {error}") from None
            if len(tokens) + self.answer_tokens > self.sequence_tokens:
                raise DataError(
                    f"{place}: a prompt of {len(tokens)} tokens and an answer of answer_tokens={self.answer_tokens} are "
                    f"more than data.sequence_tokens={self.sequence_tokens}; raise it, or shorten one"
                )
            yield Prompt(tokens, messages, value)
