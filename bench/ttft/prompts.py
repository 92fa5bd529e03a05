"""Prompts of real text with exactly as many tokens as wanted, as the server counts them; none is handed out twice.

They begin at unlike places of the text, so no prefix cache can help. They are sent as text, because tokenizing is part
of what a user waits for.
"""

from dataclasses import dataclass
from typing import Any

import httpx

from tightwire.bench.text import Passages
from tightwire.server.cli.remote import Remote, RemoteError, ask

_ATTEMPTS = 200  # a passage that begins or ends inside a word often comes back as another number of tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPrompt:
    text: str
    token_ids: tuple[int, ...]  # as the server makes them of the text, special ones included


class PromptMaker:
    """Cuts passages out of one text, with the server's own tokenizer."""

    def __init__(self, http: httpx.AsyncClient, remote: Remote, *, seed: int) -> None:
        self._http, self._root, self._seed = http, remote.root, seed
        self._passages: Passages | None = None
        self._num_special = 0

    async def open(self, text: str) -> None:
        """Tokenize the text.

        Raises:
            RemoteError: the server does not tokenize.
        """
        plain, special = await self._tokenize("A word", special=False), await self._tokenize("A word")
        self._num_special = len(special) - len(plain)
        self._passages = Passages(await self._tokenize(text, special=False), seed=self._seed)

    async def take(self, num_tokens: int) -> TextPrompt:
        """A prompt that the server counts as ``num_tokens``.

        Raises:
            ValueError: the text has no such passage left.
            RemoteError: no passage comes out at that length.
        """
        assert self._passages is not None, "open() comes first"
        wanted = num_tokens - self._num_special
        if wanted < 1:
            raise ValueError(
                f"--prompt-lens {num_tokens} leaves no room for text: the tokenizer adds {self._num_special} of its own"
            )
        for _ in range(_ATTEMPTS):
            text = await self._detokenize(self._passages.take(wanted))
            token_ids = await self._tokenize(text) if text else []
            if len(token_ids) == num_tokens:
                return TextPrompt(text=text, token_ids=tuple(token_ids))
        raise RemoteError(f"none of {_ATTEMPTS} passages comes out at {num_tokens} tokens with this model's tokenizer")

    async def _tokenize(self, text: str, *, special: bool = True) -> list[int]:
        return (await self._post("tokenize", {"prompt": text, "add_special_tokens": special}))["tokens"]

    async def _detokenize(self, token_ids: list[int]) -> str:
        return (await self._post("detokenize", {"tokens": token_ids}))["prompt"]

    async def _post(self, route: str, body: dict[str, object]) -> dict[str, Any]:
        return await ask(self._http, f"{self._root}/{route}", body)
