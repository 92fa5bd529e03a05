"""Parses the header of a .gguf: its keys, and the names and places of its tensors. Imports no torch.

Every length is compared with the file's before anything of that length is read, so a damaged header costs no memory.
Source: docs/gguf.md of ggml.
"""

import re
import struct
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path
from typing import Any, NamedTuple

# Formats of scalars by type number; 8 is a string, 9 an array.
_SCALARS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_VERSIONS = (2, 3)
_MAX_DIMS = 4  # of ggml
# Of keys, or tensors; models have up to 100 and 2,000. An entry takes 10 us: half a million would take seconds.
_MAX_ENTRIES = 1 << 16
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class _Value(NamedTuple):
    """Where a value is: one of type ``kind``, or an array of ``num_items`` such items."""

    kind: int
    num_items: int | None
    start: int


class TensorPlace(NamedTuple):
    """A tensor's entry in the header. ``dims``: as the file has them, columns first; ``offset``: in the file."""

    name: str
    dims: tuple[int, ...]
    kind: int
    offset: int


class GgufHeader:
    """Keys and tensors of a file's bytes; ValueError if they are not a whole header."""

    def __init__(self, data: mmap | bytes) -> None:
        self._data = data
        self._at = 0
        self._values: dict[str, _Value] = {}
        for key, value in self._keys():
            if key in self._values:
                raise ValueError(f"key {key:.60} stands in it twice")
            self._values[key] = value
        alignment = self.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & alignment - 1:
            raise ValueError(f"general.alignment must be a power of two, got {alignment!r}")
        tensors = [self._tensor() for _ in range(self._num_tensors)]
        start = -(-self._at // alignment) * alignment
        if wrong := [tensor for tensor in tensors if tensor.offset % alignment]:
            raise ValueError(f"tensor {wrong[0].name:.60} begins at {wrong[0].offset}, no multiple of {alignment}")
        self.tensors = [tensor._replace(offset=start + tensor.offset) for tensor in tensors]

    @classmethod
    def scalars(cls, data: mmap | bytes, endings: tuple[str, ...]) -> dict[str, Any]:
        """The values of keys whose part behind the first dot is in ``endings``, read up to the last of them."""
        self, found = cls.__new__(cls), dict[str, Any]()
        self._data, self._at = data, 0
        for key, value in self._keys():
            if (ending := key[key.find(".") :]) in endings:
                found[ending] = self._read(value)
            if len(found) == len(endings):
                break  # a tokenizer's long arrays come later
        return found

    def get(self, key: str, default: Any = None) -> Any:
        """Return a scalar, a string, or an array as a list; ``default`` if the key is absent."""
        value = self._values.get(key)
        return default if value is None else self._read(value)

    def _keys(self) -> Iterator[tuple[str, _Value]]:
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version = self._scalar("I")
        if version & 0xFFFF == 0:
            raise ValueError("its numbers are big-endian")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}; supported: {', '.join(map(str, _VERSIONS))}")
        self._num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        stated = f"{num_keys} keys and {self._num_tensors} tensors"
        self._check_room(12 * (self._num_tensors + num_keys), stated)
        if max(self._num_tensors, num_keys) > _MAX_ENTRIES:
            raise ValueError(f"it states {stated}; possible: at most {_MAX_ENTRIES} of each")
        for _ in range(num_keys):
            key = self._string()
            kind = self._scalar("I")
            try:
                yield key, self._value(kind)
            except ValueError as error:
                raise ValueError(f"key {key:.60}: {error}") from None

    def _value(self, kind: int) -> _Value:
        """Return the place of the value here, and go behind it."""
        count = None
        if kind == _ARRAY:
            kind, count = self._scalar("I"), self._scalar("Q")
        value = _Value(kind, count, self._at)
        if kind == _STRING:
            self._check_room(8 * (count or 0), f"an array of {count} strings")
            self._skip_strings(1 if count is None else count)
        elif kind in _SCALARS:
            self._skip(struct.calcsize(_SCALARS[kind]) * (1 if count is None else count), f"an array of {count}")
        else:
            raise ValueError("arrays of arrays are not supported" if kind == _ARRAY else f"unknown type {kind}")
        return value

    def _skip_strings(self, count: int) -> None:
        data, at = self._data, self._at
        try:
            for _ in range(count):
                at += 8 + _LENGTH.unpack_from(data, at)[0]
        except (struct.error, OverflowError):
            at = len(data) + 1
        self._skip(at - self._at, "strings")

    def _read(self, value: _Value) -> Any:
        count, at = 1 if value.num_items is None else value.num_items, value.start
        if value.kind == _STRING:
            items: list[Any] = []
            for _ in range(count):
                stop = at + 8 + _LENGTH.unpack_from(self._data, at)[0]
                items.append(self._data[at + 8 : stop].decode(errors="replace"))
                at = stop
        else:
            items = list(struct.unpack_from(f"<{count}{_SCALARS[value.kind]}", self._data, at))
        return items if value.num_items is not None else items[0]

    def _tensor(self) -> TensorPlace:
        name, num_dims = self._string(), self._scalar("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise ValueError(f"tensor {name:.60} has {num_dims} dimensions; possible: 1 to {_MAX_DIMS}")
        dims = tuple(self._scalar("Q") for _ in range(num_dims))
        return TensorPlace(name, dims, self._scalar("I"), self._scalar("Q"))

    def _scalar(self, form: str) -> Any:
        self._check_room(size := struct.calcsize(f"<{form}"), "the header")
        self._at += size
        return struct.unpack_from(f"<{form}", self._data, self._at - size)[0]

    def _string(self) -> str:
        start = self._at + 8
        self._skip(self._scalar("Q"), "a name")
        return self._data[start : self._at].decode(errors="replace")

    def _skip(self, num_bytes: int, what: str) -> None:
        self._check_room(num_bytes, what)
        self._at += num_bytes

    def _check_room(self, num_bytes: int, what: str) -> None:
        if num_bytes > len(self._data) - self._at:
            raise ValueError(f"{what} would need {num_bytes} bytes, and {len(self._data) - self._at} follow")


def split_parts(path: Path) -> list[Path]:
    """All parts of a split .gguf, by the name of any of them; only ``path`` itself if it is not named as a part."""
    match = _PART.fullmatch(path.name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        return [path]
    return [path.with_name(f"{match[1]}-{part:05d}-of-{match[3]}.gguf") for part in range(1, int(match[3]) + 1)]


def plain_stem(path: Path) -> str:
    """The file's name without its ending, and without its number as a part."""
    return path.stem if split_parts(path) == [path] else path.stem[: -len("-00001-of-00001")]
