"""Converts text to token ids and back, and messages to a prompt, for every kind of checkpoint.

Random weights and tiny test models have one token per byte of UTF-8 (``byte_backend``): ids 0 to 255 are the bytes, followed
by four special tokens. Encoding never produces larger ids, but a random model samples them, so each has a text (`` w300``).

Only folders without a tokenizer.json need transformers, whose import takes two seconds and 200 MB.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tightwire.model.checkpoint.errors import ChatTemplateError, ModelError, naming
from tightwire.model.checkpoint.header import read_json

TOKENIZER_CLASS = "PreTrainedTokenizerFast"
Chat = Sequence[Mapping[str, Any]]  # messages, each with its role and content


@dataclass(eq=False, repr=False)
class Tokenizer:
    """One model's tokenizer and chat template. Thread-safe."""

    backend: Backend  # the library's tokenizer
    _: KW_ONLY
    chat_template: str | None  # its source; None: there is none
    tool_template: str | None = None  # that of conversations with tools; None: the same
    template_origin: str = "the model"  # the file or flag that gave it
    special_tokens: Mapping[str, str]  # texts by their name in chat templates, such as ``{"bos_token": "<s>"}``
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus one. The model's vocabulary may be larger because of padding."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode ``text``, by default with the special tokens that the model expects around a prompt (often a BOS)."""
        # This method does not record each token's position in the text, and takes a third less time.
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode ``ids``; incomplete UTF-8 becomes U+FFFD, and ids without a token are omitted."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def use_template(self, source: str, origin: str) -> None:
        """Render all conversations with ``source``; call it before the first one."""
        self.chat_template, self.tool_template, self.template_origin = source, None, origin

    @cached_property
    def template_writes_tools(self) -> bool:
        """True if the template of conversations with tools puts the variable ``tools`` into the prompt."""
        name = "tool_that_no_prompt_has"
        function = {"name": name, "description": "", "parameters": {"type": "object", "properties": {}}}
        tools = [{"type": "function", "function": function}]
        try:
            return name in self.render_chat([{"role": "user", "content": "Hi"}], tools=tools)
        except ChatTemplateError:
            return False

    def render_chat(
        self, messages: Chat, add_generation_prompt: bool = True, continue_final_message: bool = False, **variables: Any
    ) -> str:
        """Render the prompt for ``messages`` (``{"role", "content"}``); the template gets all further variables.

        ``continue_final_message``: end in the last message's text, which the answer continues. Raises
        ChatTemplateError: there is no chat template, or it rejects these messages.
        """
        template = self.templates[variables.get("tools") is not None]
        if continue_final_message:
            return template.render_open(messages, **variables)
        return template.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    def encode_chat(self, messages: Chat, add_generation_prompt: bool = True, **variables: Any) -> list[int]:
        """Render and encode ``messages``. No special tokens are added, because the template writes a BOS if needed."""
        return self.encode(self.render_chat(messages, add_generation_prompt, **variables), add_special_tokens=False)

    def save(self, folder: Path) -> None:
        """Write the files that ``tokenizer_from_folder`` opens. The ids of BOS and EOS belong to config.json."""
        config: dict[str, Any] = {"tokenizer_class": TOKENIZER_CLASS, **self.special_tokens}
        named = {"default": self.chat_template, "tool_use": self.tool_template}
        if self.chat_template is not None:
            listed = [{"name": name, "template": source} for name, source in named.items()]
            config["chat_template"] = listed if self.tool_template else self.chat_template
        (folder / "tokenizer.json").write_text(self.backend.to_str(), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")

    @cached_property
    def templates(self) -> "list[ChatTemplate]":
        """Those of conversations without and with tools, compiled. ChatTemplateError: there are none, or one is damaged."""
        if self.chat_template is None:
            raise ChatTemplateError("this model has no chat template; use /v1/completions, or an instruct model")
        sources = self.chat_template, self.tool_template or self.chat_template
        return [ChatTemplate(source, self.special_tokens, self.template_origin) for source in sources]


def tokenizer_from_folder(folder: Path, bos_token_id: int | None, eos_token_ids: tuple[int, ...]) -> Tokenizer:
    """Open tokenizer.json and tokenizer_config.json, or another kind of tokenizer through transformers, else ModelError.

    tokenizer.json alone determines the special tokens around a text, as in transformers 5.
    """
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    backend = _read_backend(folder)
    # Tokens that are only in the configuration; most folders have added tokens in both files.
    with naming(path, "its added_tokens_decoder is damaged", AttributeError, KeyError, TypeError, ValueError):
        for _, token in sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])):
            if backend.token_to_id(token["content"]) is None:
                backend.add_tokens([AddedToken(**token)])
    template, tool_template, template_path = _chat_templates(folder, config)
    return Tokenizer(
        backend,
        chat_template=template,
        tool_template=tool_template,
        template_origin=str(template_path),
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
        # Some files keep truncation and padding settings from training, which must not change a server's prompts.
        backend.no_truncation()
        backend.no_padding()
        return backend
    vocabularies = (path for form in ("*.model", "vocab.*", "*.tiktoken", "tekken.json") for path in folder.glob(form))
    try:
        if not any(vocabularies):  # for some families transformers makes one of five tokens
            raise FileNotFoundError("there is none with a vocabulary")
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer
    except Exception as error:  # noqa: BLE001 - the many tokenizer classes raise different types
        raise ModelError(
            f"{folder}: has no tokenizer.json, and transformers could not make one from its files: {' '.join(str(error).split())}"
        ) from None


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> tuple[str | None, str | None, Path]:
    """Return the default template, that for tools, and the file of both: a separate file has priority over the key."""
    files = "chat_template.jinja", "chat_template.json"
    path = next((folder / name for name in files if (folder / name).is_file()), folder / "tokenizer_config.json")
    if path.name in files:
        tools = folder / "additional_chat_templates" / "tool_use.jinja"
        with naming(path, "cannot be read", UnicodeDecodeError):
            template = path.read_text("utf-8") if path.suffix == ".jinja" else read_json(path).get("chat_template")
            tool_template = tools.read_text("utf-8") if tools.is_file() else None
    else:
        template, named = config.get("chat_template"), dict[Any, Any]()
        if isinstance(template, list):
            named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
            template = named.get("default") or next(iter(named.values()), None)
        tool_template = named.get("tool_use")
    if wrong := [each for each in (template, tool_template) if not isinstance(each, str | None)]:
        raise ModelError(f"{path}: its chat_template is {wrong[0]!r:.60}, and should be text")
    return template, tool_template, path


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return ``bos_token`` and similar tokens; older folders have them in a separate file."""
    older = folder / "special_tokens_map.json"
    values = {**(read_json(older) if older.is_file() else {}), **config}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in values.items()}
    return {key: text for key, text in texts.items() if key.endswith("_token") and isinstance(text, str)}


_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # marks the end of the last message; the space shows whether a template trims


class ChatTemplate:
    """A compiled template and its special tokens (``bos_token``, ``eos_token``, ...)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            told = f"{origin}: line {error.lineno} of the chat template cannot be compiled: {error.message}"
            raise ChatTemplateError(f"{told} Mend it, or give another with --chat-template FILE") from None
        self._special_tokens = dict(special_tokens)

    def render_open(self, messages: Chat, **variables: Any) -> str:
        """Render up to the end of the last text, which an answer continues; ChatTemplateError if impossible."""
        *before, last = messages
        marked = {**last, "content": last["content"] + _MARK}
        text = self.render([*before, marked], add_generation_prompt=False, **variables)
        end = text.rfind(_MARK.strip())
        if end < 0 or last["content"].strip() not in text:
            raise ChatTemplateError("the model's chat template does not print the last message as it is")
        return text[:end] if text.startswith(_MARK, end) else text[:end].rstrip()  # this template trims messages

    def render(self, messages: Chat, *, add_generation_prompt: bool, **variables: Any) -> str:
        """Render messages; raises ChatTemplateError with the template's message if it rejects them."""
        values = {"tools": None, "documents": None, **self._special_tokens, **variables}
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **values)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template rejects these messages: {error}") from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
            raise ChatTemplateError(f"the model's chat template fails on these messages: {error!r}") from None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    # Jinja's own filter escapes HTML characters.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}``: prints its body."""

    tags = {"generation"}  # noqa: RUF012 - the type that jinja2 requires

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


BOS, EOS, START_OF_TURN, END_OF_TURN = "<|bos|>", "<|eos|>", "<|start|>", "<|end|>"
SPECIAL = (BOS, EOS, START_OF_TURN, END_OF_TURN)
BOS_ID, EOS_ID, START_OF_TURN_ID, END_OF_TURN_ID = 256, 257, 258, 259
SPECIAL_IDS: dict[str, Any] = {"bos_token_id": BOS_ID, "eos_token_ids": (EOS_ID, END_OF_TURN_ID)}
MIN_VOCAB_SIZE = 260

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def byte_backend(vocab_size: int) -> Backend:
    """Return a backend with exactly ``vocab_size`` tokens; ModelError: fewer than 260, the bytes and special tokens."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise ModelError(f"a byte tokenizer needs a vocab_size of at least {MIN_VOCAB_SIZE}, got {vocab_size}")
    texts = [*byte_characters(), *SPECIAL, *(f"\u0120w{i}" for i in range(MIN_VOCAB_SIZE, vocab_size))]
    backend = Backend(models.BPE(vocab={text: index for index, text in enumerate(texts)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return backend


def with_template(backend: Backend) -> Tokenizer:
    """Add the byte tokenizer's chat template to a backend with the same special tokens, under any ids."""
    bos_id, *end_ids = (backend.token_to_id(token) for token in (BOS, EOS, END_OF_TURN))
    return Tokenizer(
        backend,
        chat_template=CHAT_TEMPLATE,
        special_tokens={"bos_token": BOS, "eos_token": EOS},
        bos_token_id=bos_id,
        eos_token_ids=tuple(token for token in end_ids if token is not None),
    )


def byte_characters() -> list[str]:
    """Return the printable character for each byte in byte-level vocabularies (``bytes_to_unicode`` of openai/gpt-2)."""
    others = iter(range(256, 512))  # U+0100 and up
    return [chr(byte if chr(byte).isprintable() and byte != ord(" ") else next(others)) for byte in range(256)]
