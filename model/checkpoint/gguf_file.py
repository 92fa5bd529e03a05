"""Parses the header of a .gguf file: metadata and the table of tensors.

Arrays are decoded only on request. ``gguf.GGUFReader`` decodes every token and merge of the vocabulary, which takes two
seconds for SmolLM2 on every rank.

Source: ggml/docs/gguf.md of ggml-org; the tests compare with ``gguf.GGUFReader``.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.reader import WeightFile

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMPY = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's place in the file. ``shape`` is row-major: (rows, columns), the reverse of the file's order."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class _Array:
    item_type: int
    count: int
    offset: int


class GgufFile:
    """A .gguf file and its parsed header."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.file = WeightFile(path)
        except OSError as error:
            raise ModelError(f"{path}: cannot be opened: {error.strerror}") from None
        self._data = self.file.data
        self._values: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self._check_start()
        try:
            self._parse()
        except ModelError:
            raise
        except (struct.error, ValueError, TypeError, ArithmeticError, MemoryError) as error:
            raise ModelError(f"{path}: truncated or damaged within its header: {error}") from None
        if int(self.get("split.count", 1)) > 1:
            raise ModelError(f"{path}: is one of several parts; join them first with llama-gguf-split --merge")

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        """Return a scalar, a string, or an array as a list; ``default`` if the key is absent."""
        value = self._values.get(key, default)
        return self._decode(value) if isinstance(value, _Array) else value

    def _check_start(self) -> None:
        if bytes(self._data[:4]) != _MAGIC:
            raise ModelError(f"{self.path}: not a GGUF file (it does not begin with {_MAGIC.decode()})")
        version = int.from_bytes(self._data[4:8], "little")
        if version not in _VERSIONS:
            raise ModelError(f"{self.path}: GGUF version {version} is not supported; supported: 2 and 3, little-endian")

    def _parse(self) -> None:
        num_tensors, num_values = struct.unpack_from("<QQ", self._data, 8)
        offset = 24
        for _ in range(num_values):
            key, offset = self._string(offset)
            (type_id,) = _U32.unpack_from(self._data, offset)
            self._values[key], offset = self._value(type_id, offset + 4)
        infos: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(num_tensors):
            name, offset = self._string(offset)
            (num_dims,) = _U32.unpack_from(self._data, offset)
            dims = struct.unpack_from(f"<{num_dims}Q", self._data, offset + 4)
            type_id, start = struct.unpack_from("<IQ", self._data, offset + 4 + 8 * num_dims)
            offset += 16 + 8 * num_dims
            infos.append((name, tuple(reversed(dims)), type_id, start))
        alignment = int(self.get("general.alignment", 32))
        data_start = math.ceil(offset / alignment) * alignment
        for name, shape, type_id, start in infos:
            self.tensors[name] = GgufTensor(name, shape, type_id, data_start + start)

    def _string(self, offset: int) -> tuple[str, int]:
        (length,) = _U64.unpack_from(self._data, offset)
        start, stop = offset + 8, offset + 8 + length
        if stop > self.file.size:
            raise struct.error("a string reaches beyond the end of the file")
        return bytes(self._data[start:stop]).decode(), stop

    def _value(self, type_id: int, offset: int) -> tuple[Any, int]:
        if type_id == _STRING:
            return self._string(offset)
        if type_id == _ARRAY:
            item_type, count = struct.unpack_from("<IQ", self._data, offset)
            array = _Array(item_type, count, offset + 12)
            return array, self._end_of(array)
        if type_id not in _NUMPY:
            raise struct.error(f"unknown value type {type_id}")
        dtype = np.dtype(_NUMPY[type_id])
        if offset + dtype.itemsize > self.file.size:
            raise struct.error("a value reaches beyond the end of the file")
        return np.frombuffer(self._data, dtype, 1, offset)[0].item(), offset + dtype.itemsize

    def _end_of(self, array: _Array) -> int:
        if array.item_type == _STRING:
            offset, data, unpack = array.offset, self._data, _U64.unpack_from
            for _ in range(array.count):
                offset += 8 + unpack(data, offset)[0]
            return offset
        if array.item_type not in _NUMPY:
            raise struct.error(f"unsupported array of value type {array.item_type}")
        return array.offset + array.count * np.dtype(_NUMPY[array.item_type]).itemsize

    def _decode(self, array: _Array) -> Sequence[Any]:
        if array.item_type != _STRING:
            return np.frombuffer(self._data, _NUMPY[array.item_type], array.count, array.offset).tolist()
        strings, offset, data, unpack = [], array.offset, self._data, _U64.unpack_from
        for _ in range(array.count):
            stop = offset + 8 + unpack(data, offset)[0]
            strings.append(data[offset + 8 : stop].decode(errors="replace"))
            offset = stop
        return strings
