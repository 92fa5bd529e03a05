"""Tokenizers from GGUF metadata: SmolLM2's against transformers and known ids, SentencePiece against its algorithm."""

import itertools
from pathlib import Path

import gguf
import pytest
from helpers.model.tiny_gguf import make_tiny_gguf
from transformers import AutoTokenizer

from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.gguf import GgufFile
from tightwire.model.open import open_checkpoint
from tightwire.model.text.gguf_tokenizer import tokenizer_from_gguf
from tightwire.model.text.tokenizer import Tokenizer

TEXTS = [
    "Hello world",
    "def f(x):\n    return x**2  # 12345\n",
    "I'm sure you're 3.14159 years old, aren't you?",
    "你好，世界！",
    "🎉👨‍👩‍👧 naïve",
    "  two  spaces\t\tand tabs\n\n\nlines ",
    "<|im_start|>user\nhi<|im_end|>",
    " ",
]
CONFIG = LlamaConfig(
    num_layers=1, hidden_size=4, num_heads=1, num_kv_heads=1, head_dim=4, mlp_size=4, vocab_size=300, max_positions=4
)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return open_checkpoint(str(smollm2_path)).tokenizer()


def test_smollm2_known_ids(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.encode("Hello world") == [19556, 905]
    assert smollm2.encode("<|im_start|><|im_end|><|endoftext|>") == [1, 2, 0]
    assert smollm2.encode("12") == [*smollm2.encode("1"), *smollm2.encode("2")]
    assert smollm2.decode([1, 19556, 905, 2]) == "Hello world"
    assert (smollm2.bos_token_id, smollm2.eos_token_ids) == (1, (2, 0))


def test_smollm2_text_round_trips(smollm2: Tokenizer) -> None:
    for text in TEXTS:
        assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


def test_smollm2_chat_prompt(smollm2: Tokenizer) -> None:
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    messages = [{"role": "user", "content": "Hi"}]
    want = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert smollm2.render_chat(messages) == want
    assert smollm2.encode_chat(messages)[:2] == [1, 9690]  # one <|im_start|>, then "system"


@pytest.mark.slow
def test_smollm2_agrees_with_transformers(smollm2: Tokenizer, smollm2_path: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    for text in TEXTS:
        assert smollm2.encode(text) == theirs(text)["input_ids"], text
    messages = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    want = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert smollm2.render_chat(messages) == want


def test_the_tiny_models_tokenizer_round_trips_through_gguf(tmp_path: Path) -> None:
    tokenizer = open_checkpoint(str(make_tiny_gguf(tmp_path / "m.gguf"))).tokenizer()
    assert tokenizer.encode("hé<|end|>") == [*"hé".encode(), 259]
    assert tokenizer.decode([104, 259]) == "h"
    assert tokenizer.chat_template is not None


# A SentencePiece vocabulary in the order of real ones: specials, bytes, pieces by falling score, single characters.
WORDS = ["▁h", "▁he", "ll", "▁hell", "▁hello", "lo", "▁w", "or", "ld", "▁wor", "▁world", "▁▁", "<tag>"]
LETTERS = [*"▁helowrd!"]
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *WORDS, *LETTERS]
FIRST_WORD = 3 + 256


def types_and_scores() -> tuple[list[int], list[float]]:
    kinds = gguf.TokenType
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL] + [kinds.BYTE] * 256
    types += [kinds.USER_DEFINED if piece == "<tag>" else kinds.NORMAL for piece in (*WORDS, *LETTERS)]
    scores = [0.0] * FIRST_WORD + [-float(i) for i in range(len(WORDS) + len(LETTERS))]
    return [int(kind) for kind in types], scores


def write_metadata(
    path: Path, model: str, *, pre: str | None = None, space: bool | None = None, arch: str = "llama"
) -> GgufFile:
    writer = gguf.GGUFWriter(path, arch)
    types, scores = types_and_scores()
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if space is not None:
        writer.add_add_space_prefix(space)
    writer.add_token_list(PIECES)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template([{"name": name, "template": name} for name in ("default", "tool_use")])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GgufFile(path)


def sentencepiece(text: str) -> list[int]:
    """The algorithm itself: join the neighbours whose joined piece scores best, leftmost first, until none is left."""
    _, scores = types_and_scores()
    vocab = {piece: i for i, piece in enumerate(PIECES)}
    pieces = list(text.replace(" ", "▁"))
    while True:
        pairs = [(left + right) for left, right in itertools.pairwise(pieces)]
        known = [(-scores[vocab[pair]], i) for i, pair in enumerate(pairs) if pair in vocab and pair != "<tag>"]
        if not known:
            break
        _, at = min(known)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    ids = [[vocab[p]] if p in vocab else [vocab[f"<0x{byte:02X}>"] for byte in p.encode()] for p in pieces]
    return [token_id for group in ids for token_id in group]


@pytest.mark.parametrize("text", ["hello world", "hello  world!", "wow", "é hello 世", "llo hell", "", "a"])
def test_sentencepiece_joins_by_score(tmp_path: Path, text: str) -> None:
    tokenizer = tokenizer_from_gguf(write_metadata(tmp_path / "m.gguf", "llama"), CONFIG)
    want = sentencepiece(" " + text) if text else []
    assert tokenizer.encode(text) == [1, *want]
    assert tokenizer.encode(text, add_special_tokens=False) == want
    assert tokenizer.decode(want) == text


def test_sentencepiece_without_leading_space(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_gguf(write_metadata(tmp_path / "m.gguf", "llama", space=False), CONFIG)
    ids = tokenizer.encode("hello world", add_special_tokens=False)
    assert ids == sentencepiece("hello world")
    assert tokenizer.decode(ids) == "hello world"


def test_sentencepiece_special_tokens(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_gguf(write_metadata(tmp_path / "m.gguf", "llama"), CONFIG)
    tag = PIECES.index("<tag>")
    ids = tokenizer.encode("hello</s><tag> world", add_special_tokens=False)
    assert ids == [*sentencepiece(" hello"), 2, tag, *sentencepiece("  world")]
    assert tokenizer.decode(ids, skip_special_tokens=True).startswith("hello<tag>")
    assert tokenizer.decode([0, 1, 2]) == ""


def test_of_two_chat_templates_one_is_for_tools(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_gguf(write_metadata(tmp_path / "m.gguf", "llama"), CONFIG)
    assert [tokenizer.render_chat([], tools=tools) for tools in (None, [])] == ["default", "tool_use"]


def test_phi3_strips_spaces_after_special_tokens(tmp_path: Path) -> None:
    """Its files do not say so, and its chat template writes a line break after each."""
    tokenizer = tokenizer_from_gguf(write_metadata(tmp_path / "m.gguf", "llama", arch="phi3"), CONFIG)
    after_end, after_start = (tokenizer.encode(f"{token}\n hello", False) for token in ("</s>", "<s>"))
    assert after_end == [2, *sentencepiece(" hello")]
    assert after_start == [1, *sentencepiece(" \n hello")]


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("qwen2", ["I", "'M", "Ġ", "1", "2", "Ġx", "=y", ";ĊĊ", "Ġ", "Ġok", "CamelCase"]),
        ("dbrx", ["I", "'M", "Ġ", "12", "Ġx", "=y", ";ĊĊ", "Ġ", "Ġok", "CamelCase"]),
        ("tekken", ["I", "'M", "Ġ", "1", "2", "Ġx", "=y", ";ĊĊ", "Ġ", "Ġok", "Camel", "Case"]),
        ("gpt-4o", ["I'M", "Ġ", "12", "Ġx", "=y", ";ĊĊ", "Ġ", "Ġok", "Camel", "Case"]),
        ("refact", ["I", "'", "M", "Ġ", "1", "2", "Ġx", "=", "y", ";", "ĊĊĠ", "Ġok", "CamelCase"]),
    ],
)
def test_word_cutting_of_families(pre: str, words: list[str], tmp_path: Path) -> None:
    tokenizer = tokenizer_from_gguf(write_metadata(tmp_path / "m.gguf", "gpt2", pre=pre), CONFIG)
    assert tokenizer.backend.pre_tokenizer is not None
    texts = "I'M 12 x=y;\n\n  ok", "CamelCase"
    cut = [word for text in texts for word, _ in tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)]
    assert cut == words
    # llama.cpp's defaults of files that leave add_bos_token out.
    assert tokenizer.encode("") == ([1] if pre == "tekken" else [])


@pytest.mark.parametrize("pre", ["llama-bpe", "pixtral", "falcon3"])
def test_llama3_word_cutting(pre: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_from_gguf(write_metadata(tmp_path / "m.gguf", "gpt2", pre=pre), CONFIG)
    assert tokenizer.backend.pre_tokenizer is not None
    words = [word for word, _ in tokenizer.backend.pre_tokenizer.pre_tokenize_str("I'M 12345 x=y;\n\n  ok")]
    assert words == ["I", "'M", "Ġ", "123", "45", "Ġx", "=y", ";ĊĊ", "Ġ", "Ġok"]
    assert tokenizer.encode("", add_special_tokens=True) == [1]  # Llama 3 files leave add_bos_token out


@pytest.mark.parametrize("pre", ["llama-bpe", "smaug-bpe", "tekken"])  # smaug-bpe: SmolLM3, and Llama 3 without a BOS
def test_a_word_that_is_a_token_stays_whole(pre: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_from_gguf(write_metadata(tmp_path / "m.gguf", "gpt2", pre=pre), CONFIG)
    assert tokenizer.encode("ll", add_special_tokens=False) == [PIECES.index("ll")]  # no merge makes it


@pytest.mark.parametrize(
    ("model", "pre", "named"),
    [
        ("gpt2", "falcon", "pre-tokenizer 'falcon' is not supported; supported: dbrx, deepseek-r1-qwen, default"),
        ("t5", None, "tokenizer model 't5' is not supported; supported: gpt2, llama"),
    ],
)
def test_unsupported_kinds_are_named(tmp_path: Path, model: str, pre: str | None, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        tokenizer_from_gguf(write_metadata(tmp_path / "m.gguf", model, pre=pre), CONFIG)
