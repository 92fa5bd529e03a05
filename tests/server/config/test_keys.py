"""The file of API keys: what it may hold, and errors that name the entry and never show a key."""

import hashlib
from pathlib import Path

import pytest

from tightwire.server.config.keys import digest_of, read_keys


def write(folder: Path, text: str) -> Path:
    path = folder / "keys.yaml"
    path.write_text(text)
    return path


def test_keys_and_digests(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"b-secret").hexdigest()
    text = f"keys:\n- {{name: a, key: a-secret, requests_at_once: 2}}\n- {{name: b, sha256: {digest}}}\n"
    keys = read_keys(write(tmp_path, text))
    assert [keys[digest_of(given)].name for given in (b"a-secret", b"b-secret")] == ["a", "b"]
    assert keys[digest_of(b"a-secret")].requests_at_once == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expected `object`, got `null`"),
        ("keys: []", "length >= 1"),
        ("keys: {a: secret1}", "Expected `array`, got `object`"),
        ("keys: [{name: a, key: secret1}, {name: a, key: secret2}]", "the name 'a' is given twice"),
        ("keys: [{name: a, key: secret1}, {name: b, key: secret1}]", "'a' and 'b' have the same key"),
        ("keys: [{name: a}]", "'a' needs either key or sha256"),
        ("keys: [{name: a, key: ''}]", r"length >= 1 - at `\$.keys\[0\].key`"),
        ("keys: [{name: a, key: 12}]", r"at `\$.keys\[0\].key`"),
        ("keys: [{name: a b, key: secret1}]", r"at `\$.keys\[0\].name`"),
        ("keys: [{name: a, sha256: secret1}]", r"at `\$.keys\[0\].sha256`"),
        ("keys: [{name: a, key: secret1, requests_at_once: 0}]", "requests_at_once"),
        ("keys: [{name: a, key: secret1, request_per_minute: 5}]", "unknown field `request_per_minute`"),
        ("keys:\n- name: a\n  key: *secret1\n", "is not YAML: line 3 cannot be read"),
        ("keys:\n\t- name: secret1", "is not YAML: line 2 cannot be read"),
        ("keys: [{name: a, key: 2024-99-01}]", "not YAML text"),
        pytest.param("keys: " + "[" * 3000, "not YAML text", id="deep"),
        ("keys: [{name: a, key: secret1}]\nkeys: [{name: b, key: secret2}]", "'keys' is given twice"),
        (
            "keys: [{name: a, key: secret1, tokens_per_minute: 5, tokens_per_minute: 9}]",
            "'tokens_per_minute' is given twice",
        ),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        read_keys(write(tmp_path, text))
    assert str(error.value).startswith(f"--api-key-file {tmp_path}") and "secret" not in str(error.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file or directory"):
        read_keys(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read_keys(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    with pytest.raises(ValueError, match="not YAML text in UTF-8"):
        read_keys(tmp_path / "binary")
