"""The model as HTTP sees it: its name and limits, its tokenizer, and the slot both appear in once it is loaded."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

from tightwire.server.api.detokenize import TokenTable


class TextTokenizer(Protocol):
    """What routes need of ``model.tokenizer.Tokenizer``."""

    @property
    def backend(self) -> Backend:
        """The `tokenizers` object, for the bytes of single tokens."""
        ...

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt of a conversation, ready for the assistant's turn.

        Raises:
            ChatTemplateError: the model's template refuses these messages.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """Facts of the running model, known once its ranks are ready."""

    name: str  # what clients call it
    max_model_len: int  # prompt and answer, in tokens
    vocab_size: int  # rows of the embedding; ids at or above it do not exist
    root: str = ""  # the folder or file it came from
    tp: int = 1
    dp: int = 1  # replicas; a text does not depend on which one computes it, so no part of the fingerprint
    allreduce: str = "native"
    arms: tuple[str, ...] = ("native",)  # the AllReduces that a request may ask for by name, the server's own first
    transport: str = "none"
    dtype: str = ""
    weights: str = ""  # what they are packed as, such as Q4_1+Q8_0; empty: plain numbers
    default_seed: int = 0  # for requests that bring none; 0: a fresh one per request
    created: int = field(default_factory=lambda: int(time.time()))

    def fingerprint(self, arm: str | None = None) -> str:
        """Equal seeds give equal text only under an equal fingerprint: these change the last bits of a sum, or the weights.

        ``arm``: the AllReduce that was asked for by name; what the server's options say beside it holds for it too.
        """
        own = self.arms[0]
        allreduce = (own if arm is None else arm) + self.allreduce.removeprefix(own)
        return "-".join(filter(None, ["tightwire", f"tp{self.tp}", allreduce, self.dtype, self.weights]))


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    info: ModelInfo
    tokenizer: TextTokenizer
    tokens: TokenTable


class ModelSlot:
    """Empty while the model loads; whoever starts the ranks fills it once, before the engine says ready."""

    def __init__(self) -> None:
        self.startup_s: float | None = None  # from the process's start until the model answered
        self._model: ServedModel | None = None

    @property
    def model(self) -> ServedModel | None:
        return self._model

    def fill(self, *, info: ModelInfo, tokenizer: TextTokenizer) -> None:
        """Raises ValueError when this tokenizer's text cannot be streamed."""
        self._model = ServedModel(info=info, tokenizer=tokenizer, tokens=TokenTable(tokenizer.backend))
