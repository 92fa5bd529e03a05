"""Converts text to token ids and back, and messages to a prompt, for every kind of checkpoint.

It uses the ``tokenizers`` library directly: importing transformers costs each process two seconds and 200 MB, and is needed
only for folders without a tokenizer.json.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tightwire.model.checkpoint.errors import ChatTemplateError, ModelError
from tightwire.model.checkpoint.safetensors import read_json
from tightwire.model.text.chat_template import ChatTemplate


class Tokenizer:
    """One model's tokenizer and chat template. Thread-safe."""

    def __init__(
        self,
        backend: Backend,
        *,
        chat_template: str | None,
        special_tokens: Mapping[str, str],
        bos_token_id: int | None,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        """``special_tokens``: texts by role, such as ``{"bos_token": "<s>"}``, by the names of chat templates."""
        self._backend = backend
        self._chat_template_source = chat_template
        self._special_tokens = dict(special_tokens)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids

    @property
    def backend(self) -> Backend:
        """The library's own object, for streaming token by token."""
        return self._backend

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus one. The model's vocabulary may be padded beyond."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``; with special tokens, also those that the model expects around a prompt (often a BOS)."""
        # This method of the library does not record each token's place in the text and takes a third less time.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; incomplete UTF-8 becomes U+FFFD, ids without a token are left out."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template_source is not None

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text for ``messages`` (``{"role", "content"}``); further variables are passed to the template.

        Raises:
            ChatTemplateError: no chat template, or it refuses these messages.
        """
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Ids of ``render_chat``. The template itself writes a BOS if the model needs one."""
        return self.encode(self.render_chat(messages, add_generation_prompt, **variables), add_special_tokens=False)

    def save(self, folder: Path) -> None:
        """Write the files that ``tokenizer_from_folder`` opens as this tokenizer; the ids of BOS and EOS are in config.json."""
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self._special_tokens}
        if self._chat_template_source is not None:
            config["chat_template"] = self._chat_template_source
        (folder / "tokenizer.json").write_text(self._backend.to_str(), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        if self._chat_template_source is None:
            raise ChatTemplateError("this model has no chat template; use /v1/completions, or an instruct model")
        return ChatTemplate(self._chat_template_source, self._special_tokens)


def tokenizer_from_folder(folder: Path, *, bos_token_id: int | None, eos_token_ids: tuple[int, ...]) -> Tokenizer:
    """From tokenizer.json with tokenizer_config.json beside it; through transformers when there is only another kind.

    tokenizer.json alone determines the special tokens around a text: as in transformers 5, ``add_bos_token`` is ignored.

    Raises:
        ModelError: there is no tokenizer, or it cannot be read.
    """
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    backend = _read_backend(folder)
    _add_missing_tokens(backend, config)
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
        except Exception as error:  # noqa: BLE001 - the library raises no narrower type
            raise ModelError(f"{path}: cannot be read: {error}") from None
        # Some files have leftovers of training; a server must neither truncate nor pad prompts.
        backend.no_truncation()
        backend.no_padding()
        return backend
    return _convert_with_transformers(folder)


def _convert_with_transformers(folder: Path) -> Backend:
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer
    except Exception as error:  # noqa: BLE001 - the many tokenizer classes raise different types
        raise ModelError(
            f"{folder}: has no tokenizer.json, and transformers could not make one from its files: {error}"
        ) from None


def _chat_template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """A separate file has priority over the key; of several named templates, the default one is used."""
    for name in ("chat_template.jinja", "chat_template.json"):
        if (path := folder / name).is_file():
            return path.read_text() if name.endswith(".jinja") else read_json(path).get("chat_template")
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        return named.get("default") or next(iter(named.values()), None)
    return source


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and similar ones; older folders have them in a separate file."""
    older = folder / "special_tokens_map.json"
    values = {**(read_json(older) if older.is_file() else {}), **config}
    tokens: dict[str, str] = {}
    for key, value in values.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            tokens[key] = text
    return tokens


def _add_missing_tokens(backend: Backend, config: Mapping[str, Any]) -> None:
    """Add the tokens that only the configuration has; most folders have added tokens in both files."""
    for _, token in sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])):
        if backend.token_to_id(token["content"]) is None:
            backend.add_tokens([AddedToken(**token)])
