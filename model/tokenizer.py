"""Text to token ids and back, and messages to a prompt, for every kind of checkpoint.

Built on the ``tokenizers`` library directly: importing transformers costs each process two seconds and 200 MB, and is
done only for folders that have no tokenizer.json.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from tightwire.model.byte_tokenizer import byte_characters
from tightwire.model.chat_template import ChatTemplate
from tightwire.model.errors import ChatTemplateError, ModelError
from tightwire.model.weights.safetensors import read_json


class Tokenizer:
    """What the server asks of a tokenizer. Thread-safe."""

    def __init__(
        self,
        backend: Backend,
        *,
        chat_template: str | None,
        special_tokens: Mapping[str, str],
        bos_token_id: int | None,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        """``special_tokens``: texts by role, such as ``{"bos_token": "<s>"}``, as chat templates name them."""
        self._backend = backend
        self._chat_template_source = chat_template
        self._special_tokens = dict(special_tokens)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids

    @property
    def backend(self) -> Backend:
        """The library's own object, for what streams token by token."""
        return self._backend

    @cached_property
    def vocab_size(self) -> int:
        """Ids run from 0 to one less. A model's own vocabulary may be padded beyond."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``; with special tokens, what the model wants around a plain prompt (often a BOS)."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; incomplete UTF-8 becomes U+FFFD, ids without a token nothing."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this token stands for inside a text; empty for an id without a token."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added_ids:
            return token.encode()
        if self._is_byte_level:
            return b"".join(_byte_level_bytes(self._byte_of, character) for character in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    def token_text(self, token_id: int) -> str:
        """The token as shown in logprobs; bytes that are no whole character as U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template_source is not None

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text for ``messages`` (``{"role", "content"}``); further variables reach the template.

        Raises:
            ChatTemplateError: no chat template, or it refuses these messages.
        """
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Ids of ``render_chat``. The template writes the BOS itself where there is one: none is added here."""
        return self.encode(self.render_chat(messages, add_generation_prompt, **variables), add_special_tokens=False)

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        if self._chat_template_source is None:
            raise ChatTemplateError("this model has no chat template; use /v1/completions, or an instruct model")
        return ChatTemplate(self._chat_template_source, self._special_tokens)

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self._backend.get_added_tokens_decoder())

    @cached_property
    def _is_byte_level(self) -> bool:
        decoder = self._backend.decoder
        return decoder is not None and b"ByteLevel" in decoder.__getstate__()

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        return {character: byte for byte, character in enumerate(byte_characters())}


def _byte_level_bytes(byte_of: Mapping[str, int], character: str) -> bytes:
    """The byte a character stands for; a character outside the alphabet (an odd vocabulary) stands for itself."""
    byte = byte_of.get(character)
    return character.encode() if byte is None else bytes([byte])


def tokenizer_from_folder(folder: Path, *, bos_token_id: int | None, eos_token_ids: tuple[int, ...]) -> Tokenizer:
    """From tokenizer.json with tokenizer_config.json beside it; through transformers when there is only another kind.

    Raises:
        ModelError: there is no tokenizer, or it cannot be read.
    """
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    backend = _read_backend(folder)
    return Tokenizer(
        backend,
        chat_template=_chat_template_source(folder, config),
        special_tokens=_special_tokens(folder, config),
        bos_token_id=bos_token_id,
        eos_token_ids=eos_token_ids,
    )


def _read_backend(folder: Path) -> Backend:
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{path}: cannot be read: {error}") from None
        # Training leftovers some files carry; a server must neither cut nor fill prompts.
        backend.no_truncation()
        backend.no_padding()
        return backend
    return _convert_with_transformers(folder)


def _convert_with_transformers(folder: Path) -> Backend:
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer
    except Exception as error:  # whatever the many tokenizer classes raise
        raise ModelError(
            f"{folder}: has no tokenizer.json, and transformers could not make one of what is there: {error}"
        ) from None


def _chat_template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """A file of its own wins over the key; of several named templates, the default one."""
    for name in ("chat_template.jinja", "chat_template.json"):
        if (path := folder / name).is_file():
            return path.read_text() if name.endswith(".jinja") else read_json(path).get("chat_template")
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        return named.get("default") or next(iter(named.values()), None)
    return source


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and the like; older folders keep them in a file of their own."""
    older = folder / "special_tokens_map.json"
    values = {**(read_json(older) if older.is_file() else {}), **config}
    tokens: dict[str, str] = {}
    for key, value in values.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            tokens[key] = text
    return tokens
