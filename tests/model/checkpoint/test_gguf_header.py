"""The header's lengths are checked before anything is read, and its first keys can be read alone."""

import struct
from pathlib import Path

import pytest

from tightwire.model.checkpoint.gguf_header import GgufHeader, plain_stem, split_parts


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def header(*keys: bytes, num_tensors: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, len(keys)) + b"".join(keys)


def number(name: bytes, value: int) -> bytes:
    return string(name) + struct.pack("<II", 4, value)


def test_values_of_every_kind() -> None:
    data = header(
        number(b"a.size", 7),
        string(b"name") + struct.pack("<I", 8) + string("né".encode()),
        string(b"list") + struct.pack("<IIQ", 9, 6, 2) + struct.pack("<2f", 0.5, 2.0),
        string(b"words") + struct.pack("<IIQ", 9, 8, 2) + string(b"x") + string(b""),
        string(b"flag") + struct.pack("<I?", 7, True),
    )
    found = GgufHeader(data)
    assert [found.get(key) for key in ("a.size", "name", "list", "words", "flag")] == [
        7,
        "né",
        [0.5, 2.0],
        ["x", ""],
        True,
    ]
    assert found.get("other", 5) == 5


def test_the_first_keys_are_read_without_the_rest() -> None:
    data = header(number(b"llama.size", 7), string(b"tokens") + struct.pack("<IIQ", 9, 8, 1 << 40))
    assert GgufHeader.scalars(data, (".size",)) == {".size": 7}
    with pytest.raises(ValueError, match="key tokens: an array of 1099511627776 strings would need"):
        GgufHeader(data)


def test_more_entries_than_any_model_has_are_refused_before_they_are_read() -> None:
    entry = string(b"t") + struct.pack("<IQIQ", 1, 32, 0, 0)
    assert len(GgufHeader(header(num_tensors=65536) + entry * 65536).tensors) == 65536
    with pytest.raises(ValueError, match="0 keys and 65537 tensors; possible: at most 65536 of each"):
        GgufHeader(header(num_tensors=65537) + b"\xff" * 65537 * 12)


@pytest.mark.parametrize(
    ("name", "parts", "stem"),
    [
        ("m-00002-of-00002.gguf", ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"], "m"),
        ("m-00003-of-00002.gguf", ["m-00003-of-00002.gguf"], "m-00003-of-00002"),
        ("m.gguf", ["m.gguf"], "m"),
    ],
)
def test_parts_by_the_name_of_one(name: str, parts: list[str], stem: str) -> None:
    assert split_parts(Path("folder") / name) == [Path("folder") / part for part in parts]
    assert plain_stem(Path(name)) == stem
