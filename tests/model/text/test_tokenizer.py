"""Tokenizers of folders: against transformers, and what their configuration files change."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny
from tokenizers import processors
from transformers import AutoTokenizer

from tightwire.model.checkpoint.errors import ChatTemplateError, ModelError
from tightwire.model.open import open_checkpoint
from tightwire.model.text.tokenizer import (
    BOS,
    BOS_ID,
    END_OF_TURN_ID,
    START_OF_TURN_ID,
    Tokenizer,
    byte_backend,
    tokenizer_from_folder,
)

TEXTS = ["", " ", "Hello, world", "naïve café", "世界 🎉👨‍👩‍👧", "a\n\n\tb  c", "<|start|>user", "\x00\x7f"]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <b>'there'</b> & \"you\""},
    {"role": "assistant", "content": "Hello 世界"},
    {"role": "user", "content": "Bye"},
]


def configured(folder: Path, **values: Any) -> Path:
    """The folder with keys of its tokenizer_config.json set."""
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


def add_bos(folder: Path) -> None:
    """Make tokenizer.json put a BOS before every text, as Llama 3's does."""
    backend = byte_backend(304)
    backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    backend.save(str(folder / "tokenizer.json"))


def tokenizer_of(folder: Path) -> Tokenizer:
    return open_checkpoint(str(folder)).tokenizer()


def test_agrees_with_transformers(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    ours, theirs = tokenizer_of(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids, skip_special_tokens=False) == text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.vocab_size == len(theirs) == 304
    assert (ours.bos_token_id, ours.eos_token_ids) == (BOS_ID, (END_OF_TURN_ID,))


def test_incomplete_characters_and_ids_without_a_token(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(make_tiny(tmp_path / "m"))
    assert tokenizer.decode([0xF0, 0x9F]) == "\ufffd"
    assert tokenizer.decode([ord("a"), 100_000, ord("b")]) == "ab"
    assert tokenizer.decode([ord("a"), 300]) == "a w300"


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("in_config", [True, False, None])
def test_the_tokenizer_file_determines_bos(tmp_path: Path, in_file: bool, in_config: bool | None) -> None:
    folder = configured(make_tiny(tmp_path / "m"), **({} if in_config is None else {"add_bos_token": in_config}))
    if in_file:
        add_bos(folder)
    ours = tokenizer_of(folder)
    assert ours.encode("x") == ([BOS_ID, ord("x")] if in_file else [ord("x")])
    assert AutoTokenizer.from_pretrained(folder)("x")["input_ids"] == ours.encode("x")
    assert ours.encode("x", add_special_tokens=False) == [ord("x")]


def test_chat_prompts_have_one_bos(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    add_bos(folder)
    tokenizer = tokenizer_of(folder)
    assert tokenizer.encode("") == [BOS_ID]
    ids = tokenizer.encode_chat(MESSAGES[1:2])
    assert ids.count(BOS_ID) == 1
    assert ids[:2] == [BOS_ID, START_OF_TURN_ID]
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.render_chat(MESSAGES[1:2])
    assert tokenizer.render_chat(MESSAGES[1:2]).endswith("<|end|><|start|>assistant\n")
    assert tokenizer.render_chat(MESSAGES[1:2], add_generation_prompt=False).endswith("<|end|>")


TEMPLATES = {
    "whitespace": "{% for m in messages %}\n  {% if loop.first %}\n[{{ m.role }}]\n  {% endif %}\n{{ m['content'] }}\n{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "loopcontrols": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "variables": "{{ bos_token }}{{ eos_token }}{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}{{ extra }}",
    "strftime": "{{ strftime_now('%Y') | length }}",
    "undefined": "{% if custom is defined %}x{% else %}y{% endif %}{{ messages[0].name }}",
}


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_templates_render_as_in_transformers(tmp_path: Path, name: str) -> None:
    folder = configured(make_tiny(tmp_path / "m"), chat_template=TEMPLATES[name])
    theirs = AutoTokenizer.from_pretrained(folder)
    want = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True, extra="E")
    assert tokenizer_of(folder).render_chat(MESSAGES, extra="E") == want


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("{{ raise_exception('roles must alternate') }}", "rejects these messages: roles must alternate"),
        ("{{ messages[0].content + 1 }}", "fails on these messages"),
        ("{{ messages.append(1) }}", "rejects these messages"),
        ("{{ ''.__class__.__mro__ }}", "rejects these messages"),
        ("{% for %}", "tokenizer_config.json: line 1 of the chat template cannot be compiled: Expected"),
    ],
)
def test_a_template_that_refuses_messages(tmp_path: Path, template: str, named: str) -> None:
    tokenizer = tokenizer_of(configured(make_tiny(tmp_path / "m"), chat_template=template))
    with pytest.raises(ChatTemplateError, match=named):
        tokenizer.render_chat(MESSAGES)


TRIMMING = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}</>{% endfor %}"
PLAIN = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"


@pytest.mark.parametrize("template", [TRIMMING, PLAIN])
@pytest.mark.parametrize("text", ["The wire", "The wire ", "  The wire\n", "<b> CONTINUE_FINAL_MESSAGE_TAG x", "né 🎉"])
def test_the_last_message_is_continued_as_in_transformers(tmp_path: Path, template: str, text: str) -> None:
    folder = configured(make_tiny(tmp_path), chat_template=template)
    messages = [MESSAGES[1], {"role": "assistant", "content": text}]
    want = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, tokenize=False, continue_final_message=True
    )
    tokenizer = tokenizer_of(folder)
    assert tokenizer.render_chat(messages, continue_final_message=True) == want
    assert tokenizer.encode_chat(messages, continue_final_message=True) == tokenizer.encode(want, False)


@pytest.mark.parametrize("template", ["{{ messages[0]['content'] }}", "{{ messages[-1]['content'] | upper }}"])
def test_a_template_that_changes_the_last_message_cannot_be_continued(tmp_path: Path, template: str) -> None:
    tokenizer = tokenizer_of(configured(make_tiny(tmp_path), chat_template=template))
    with pytest.raises(ChatTemplateError, match="does not print the last message as it is"):
        tokenizer.render_chat(MESSAGES, continue_final_message=True)


def test_no_chat_template(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(make_tiny(tmp_path / "m", chat=False))
    assert tokenizer.chat_template is None
    with pytest.raises(ChatTemplateError, match="has no chat template"):
        tokenizer.encode_chat(MESSAGES)


def test_a_template_file_wins_and_of_named_ones_the_default(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    folder = configured(make_tiny(tmp_path / "m"), chat_template=named)
    assert tokenizer_of(folder).render_chat(MESSAGES) == "plain"
    (folder / "chat_template.jinja").write_text("from the file")
    assert tokenizer_of(folder).render_chat(MESSAGES) == "from the file"


def test_a_template_file_without_text_and_damaged_tokens_of_the_configuration_are_named(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    (folder / "chat_template.json").write_text('{"chat_template": ["plain"]}')
    with pytest.raises(ModelError, match=r"chat_template\.json: .*\['plain'\], and should be text"):
        tokenizer_of(folder)
    (folder / "chat_template.json").unlink()
    for damaged in ({"x": {"content": "a"}}, {"304": {"text": "a"}}, ["a"]):
        configured(folder, added_tokens_decoder=damaged)
        with pytest.raises(ModelError, match=r"tokenizer_config\.json: its added_tokens_decoder is damaged"):
            tokenizer_of(folder)


@pytest.mark.parametrize("in_files", [False, True])
def test_a_conversation_with_tools_has_the_template_for_tools_as_in_transformers(
    tmp_path: Path, in_files: bool
) -> None:
    """Hermes 2 and 3 have two templates."""
    named = {"tool_use": "tools {{ tools | length }}{{ add_generation_prompt }}", "default": "plain"}
    listed = [{"name": name, "template": template} for name, template in named.items()]
    folder = configured(make_tiny(tmp_path / "m", chat=False), **({} if in_files else {"chat_template": listed}))
    if in_files:
        (folder / "chat_template.jinja").write_text(named["default"])
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(named["tool_use"])
    tokenizer, theirs = tokenizer_of(folder), AutoTokenizer.from_pretrained(folder)
    tools = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
    for given in (None, tools):
        want = theirs.apply_chat_template(MESSAGES, tools=given, tokenize=False, add_generation_prompt=True)
        assert tokenizer.render_chat(MESSAGES, tools=given) == want == ("plain" if given is None else "tools 1True")
    tokenizer.save(tmp_path)
    assert tokenizer_from_folder(tmp_path, None, ()).render_chat(MESSAGES, tools=tools) == "tools 1True"
    tokenizer = tokenizer_of(folder)
    tokenizer.use_template("from the flag", "--chat-template FILE")
    assert tokenizer.render_chat(MESSAGES, tools=tools) == "from the flag"


def test_tokens_known_to_the_configuration_only(tmp_path: Path) -> None:
    token = {"content": "<|tool|>", "special": True, "normalized": False, "lstrip": False, "rstrip": False}
    token["single_word"] = False
    folder = configured(make_tiny(tmp_path / "m"), added_tokens_decoder={"304": token})
    assert tokenizer_of(folder).encode("a<|tool|>") == [ord("a"), 304]


def test_truncation_left_in_the_file_is_off(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    backend = byte_backend(304)
    backend.enable_truncation(4)
    backend.enable_padding(length=20)
    backend.save(str(folder / "tokenizer.json"))
    assert len(tokenizer_of(folder).encode("more than four")) == 14


def test_older_special_tokens_file(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m", chat=False)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ bos_token }}|{{ eos_token }}"}))
    tokens = {"bos_token": {"content": "<|bos|>", "special": True}, "eos_token": "<|eos|>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(tokens))
    assert tokenizer_of(folder).render_chat(MESSAGES) == "<|bos|>|<|eos|>"


def test_damaged_or_missing_tokenizer(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be read"):
        tokenizer_of(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer\.json, and transformers could not"):
        tokenizer_of(folder)
    configured(
        folder, tokenizer_class="GemmaTokenizer"
    )  # of which transformers makes one of five tokens without any file
    with pytest.raises(ModelError, match="from its files: there is none with a vocabulary"):
        tokenizer_of(folder)


def test_byte_tokenizer_needs_260_ids() -> None:
    with pytest.raises(ModelError, match="at least 260, got 100"):
        byte_backend(100)
