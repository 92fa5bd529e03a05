"""Streamed text equals the tokenizer's decoding of all ids, for both kinds of decoders and any ids."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from tightwire.model.text.tokenizer import byte_characters
from tightwire.server.api.detokenize import Detokenizer, StopStrings, TokenTable


def _byte_level() -> Tokenizer:
    """All single bytes, tokens with parts of characters, special tokens, an added token with a space."""
    alphabet = byte_characters()
    texts = [bytes([byte]) for byte in range(256)]
    texts += ["🙂".encode()[:2], "🙂".encode()[2:], "你好".encode()[1:5], b" hello", "é".encode(), b"\xe4\xbd", b"\n\n"]
    vocab = {"".join(alphabet[byte] for byte in text): id_ for id_, text in enumerate(texts)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|start|>"])
    backend.add_tokens([AddedToken(text, normalized=False) for text in ("two words", "日本", "é")])
    return backend


def _sentencepiece(*, strips: bool) -> Tokenizer:
    """Byte tokens, words with a space mark before, in or after them, special tokens."""
    texts = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    texts += ["▁", "▁▁", "▁▁▁", "▁Hello", "a", "你", "好▁", "é", "▁<0x41>", "<0xZZ>"]
    backend = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(texts)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


BACKENDS = {
    "byte level": _byte_level(),
    "sentencepiece": _sentencepiece(strips=True),
    "sentencepiece without strip": _sentencepiece(strips=False),
}
NUM_IDS = max(backend.get_vocab_size() for backend in BACKENDS.values()) + 3  # some ids stand for nothing

# Random ids are mostly broken bytes; the ends of the vocabularies have the characters, words and special tokens.
_ids = st.lists(
    st.one_of(
        st.integers(0, NUM_IDS),
        st.integers(254, NUM_IDS),
        st.sampled_from([0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x99, 0x82, 0xF1, 0xBE, 0xA1]),
    ),
    max_size=14,
)


def _id(name: str, token: str) -> int:
    id_ = BACKENDS[name].token_to_id(token)
    assert id_ is not None
    return id_


def _stream(table: TokenTable, ids: list[int], **options: bool) -> list[str]:
    detokenizer = Detokenizer(table, **options)
    pieces = [detokenizer.push(id_) for id_ in ids]
    pieces.append(detokenizer.flush())
    assert detokenizer.num_chars == len("".join(pieces))
    return pieces


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=120)
@given(ids=_ids, skip=st.booleans())
def test_stream_equals_decode_for_any_ids(name: str, ids: list[int], skip: bool) -> None:
    backend = BACKENDS[name]
    text = "".join(_stream(TokenTable(backend), ids, skip_special=skip))
    assert text == backend.decode(ids, skip_special_tokens=skip)


def test_special_tokens_of_tool_calls_are_text_where_tools_may_be_called() -> None:
    backend = _byte_level()
    backend.add_special_tokens(["[TOOL_CALLS]", "[ARGS]"])
    table = TokenTable(backend)
    ids = [backend.token_to_id(token) or 0 for token in ("[TOOL_CALLS]", "a", "<|end|>", "[ARGS]")]
    assert "".join(_stream(table, ids)) == "a"
    assert "".join(_stream(table, ids, with_calls=True)) == "[TOOL_CALLS]a[ARGS]"


@pytest.mark.parametrize("name", BACKENDS)
@given(text=st.text(max_size=12))
def test_emitted_text_never_changes(name: str, text: str) -> None:
    """What was emitted so far is always a prefix of the text: no temporary U+FFFD, nothing twice."""
    first_byte = 1 if name.startswith("sentencepiece") else 0  # id of byte 0
    ids = [byte + first_byte for byte in text.encode()]
    expected = text.removeprefix(" ") if name == "sentencepiece" else text
    emitted = ""
    for piece in _stream(TokenTable(BACKENDS[name]), ids):
        emitted += piece
        assert expected.startswith(emitted)
    assert emitted == expected


def test_a_character_is_emitted_when_it_is_complete() -> None:
    ids = list("né🙂".encode())
    assert _stream(TokenTable(BACKENDS["byte level"]), ids) == ["n", "", "é", "", "", "", "🙂", ""]


def test_an_invalid_character_is_held_only_while_it_can_be_completed() -> None:
    assert _stream(TokenTable(BACKENDS["byte level"]), [0xF0, 0x9F, 0x61, 0xFF, 0xE4]) == ["", "", "�a", "�", "", "�"]


def test_a_byte_run_is_emitted_by_the_token_that_ends_it() -> None:
    backend = BACKENDS["sentencepiece"]
    run = [byte + 1 for byte in "好\n".encode()]
    assert _stream(TokenTable(backend), [*run, _id("sentencepiece", "▁Hello")]) == ["", "", "", "", "好\n Hello", ""]


def test_leading_space_is_kept_after_text() -> None:
    backend = BACKENDS["sentencepiece"]
    ids = [_id("sentencepiece", "▁Hello")] * 2
    assert "".join(_stream(TokenTable(backend), ids)) == "Hello Hello"
    assert "".join(_stream(TokenTable(backend), ids, after_text=True)) == " Hello Hello"


def test_single_tokens_are_written_as_openai_does() -> None:
    table = TokenTable(BACKENDS["byte level"])
    spaced = TokenTable(BACKENDS["sentencepiece"])
    assert [table.text_of(id_) for id_ in (0x61, 0xE4, 0x20)] == ["a", "bytes:\\xe4", " "]
    assert table.bytes_of(256) == b"\xf0\x9f"
    assert table.text_of(_id("byte level", "<|end|>")) == "<|end|>"
    assert spaced.text_of(_id("sentencepiece", "▁Hello")) == " Hello"
    assert spaced.bytes_of(0xE4 + 1) == b"\xe4"
    assert table.text_of(NUM_IDS + 100) == ""


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Metaspace()])
def test_unsupported_decoders_are_rejected_by_name(decoder: decoders.Decoder | None) -> None:
    backend = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(ValueError, match="this tokenizer's decoder has the steps"):
        TokenTable(backend)


def _filtered(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, str | None]:
    stop_strings, text = StopStrings(stops, include=include), ""
    for piece in pieces:
        text += stop_strings.push(piece)
        if stop_strings.hit is not None:
            return text, stop_strings.hit
    return text + stop_strings.flush(), None


def _reference(stops: list[str], text: str, *, include: bool) -> tuple[str, str | None]:
    """Character by character: the stop string that is complete first ends the text; of several, the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=120)
@given(
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    text=st.text("abc\n", max_size=20),
    cuts=st.integers(0, 2**30),
    include=st.booleans(),
)
def test_stop_strings_do_not_depend_on_token_boundaries(stops: list[str], text: str, cuts: int, include: bool) -> None:
    draw, pieces, rest = random.Random(cuts), [], text
    while rest:
        size = draw.randint(1, 4)
        pieces, rest = [*pieces, rest[:size]], rest[size:]
    assert _filtered(stops, pieces, include=include) == _reference(stops, text, include=include)


def test_only_a_possible_start_of_a_stop_string_is_held_back() -> None:
    stop_strings = StopStrings(["<stop>", "\n\n"])
    assert [stop_strings.push(piece) for piece in ("a<", "st", "x<<", "s\n", "b")] == ["a", "", "<stx<", "<s", "\nb"]
    assert stop_strings.flush() == ""
    assert stop_strings.push("end<sto") == "end"
    assert stop_strings.flush() == "<sto"
    assert stop_strings.hit is None


def test_cost_per_token_does_not_grow_with_the_output() -> None:
    """Cost is linear in the output: 100,000 tokens take under seconds."""
    table = TokenTable(BACKENDS["byte level"])
    for token in (0x61, 0x80):  # text, and bytes that are never a character
        assert len("".join(_stream(table, [token] * 100_000))) == 100_000
