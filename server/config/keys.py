"""Reads the file of API keys: each with a name, the key or its SHA-256, and limits."""

import hashlib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from tightwire.option_flags import doubled_key

_Limit = Annotated[int, Meta(ge=1)]


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the file. A limit that is left out does not apply."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._@-]{1,64}$")]
    key: Annotated[str, Meta(min_length=1)] | None = None
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")] | None = None
    requests_at_once: _Limit | None = None
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None  # of prompts and answers


class _KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    keys: Annotated[list[ApiKey], Meta(min_length=1)]


def read_keys(path: str | Path) -> dict[bytes, ApiKey]:
    """The keys by the SHA-256 of the key. ValueError: says what is wrong with the file, and never shows a key."""
    import yaml  # saves `--help` 20 ms

    where = f"--api-key-file {path}"
    try:
        text = Path(path).read_text(encoding="utf-8")
        content, doubled = yaml.safe_load(text), doubled_key(text)
    except OSError as error:
        raise ValueError(f"{where} cannot be read: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:  # its text quotes the line, which may hold a key
        line = f": line {error.problem_mark.line + 1} cannot be read" if error.problem_mark else ""
        raise ValueError(f"{where} is not YAML{line}") from None
    except (yaml.YAMLError, ValueError, RecursionError):  # also a date or number that does not exist
        raise ValueError(f"{where} is not YAML text in UTF-8") from None
    if doubled is not None:
        raise ValueError(f"{where}: {doubled!r} is given twice")
    try:
        entries = msgspec.convert(content, _KeyFile).keys
    except msgspec.ValidationError as error:
        fields = "name, key or sha256, and any of requests_at_once, requests_per_minute and tokens_per_minute"
        raise ValueError(f"{where}: {error}; the file holds a list `keys`, each with {fields}") from None
    return _by_digest(where, entries)


def _by_digest(where: str, entries: list[ApiKey]) -> dict[bytes, ApiKey]:
    keys: dict[bytes, ApiKey] = {}
    names: set[str] = set()
    for entry in entries:
        if entry.name in names:
            raise ValueError(f"{where}: the name {entry.name!r} is given twice")
        if (entry.key is None) == (entry.sha256 is None):
            raise ValueError(f"{where}: {entry.name!r} needs either key or sha256")
        digest = digest_of(entry.key.encode()) if entry.key is not None else bytes.fromhex(entry.sha256 or "")
        if digest in keys:
            raise ValueError(f"{where}: {keys[digest].name!r} and {entry.name!r} have the same key")
        names.add(entry.name)
        keys[digest] = entry
    return keys


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
