"""Reads a .gguf file: metadata, the table of tensors, and slices of tensors as packed blocks or dequantized.

Arrays of the metadata are decoded only on request. ``gguf.GGUFReader`` decodes every token and merge of the vocabulary,
which takes two seconds for SmolLM2 on every rank.

Source: ggml/docs/gguf.md of ggml-org; the tests compare with ``gguf.GGUFReader``.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from tightwire.kernels.spec.packed import Matrix, PackedMatrix
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.names import gguf_name
from tightwire.model.checkpoint.reader import WeightFile, growth_of, row_chunks, store_rows

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_NUMPY = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_QUANTIZED = (
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.Q6_K,
)
# Bytes of memory that dequantization needs per quantized byte, temporaries included; limits the size of a piece.
_DEQUANTIZED_GROWTH = 16


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


class GgufReader:
    """``CheckpointReader`` for a .gguf of architecture ``llama``; checks that the file contains every tensor."""

    def __init__(self, file: GgufFile, config: LlamaConfig) -> None:
        self._file = file
        self._head_dim = config.head_dim
        for tensor in file.tensors.values():
            self._check_extent(tensor)

    def shape(self, name: str) -> tuple[int, ...]:
        tensor = self._tensor(name)
        self._supported_type(tensor)
        return tensor.shape

    def stored_as(self, name: str) -> str:
        return self._supported_type(self._tensor(name)).name

    def read_into(self, out: Matrix, name: str, *, rows: range, columns: range | None = None) -> None:
        tensor = self._tensor(name)
        kind = self._supported_type(tensor)
        own_blocks = out if isinstance(out, PackedMatrix) and out.format.name == kind.name else None
        # llama.cpp interleaves the two halves of each query and key head, which is undone one head at a time.
        unit = self._head_dim if ".q_proj." in name or ".k_proj." in name else 1
        aligned = range(rows.start // unit * unit, -(-rows.stop // unit) * unit)
        row_bytes = self._bytes_per_row(tensor)
        growth = 1 if own_blocks else growth_of(out) if kind in _PLAIN else _DEQUANTIZED_GROWTH
        for chunk in row_chunks(aligned, row_bytes * growth, multiple_of=unit):
            piece = self._read_blocks(tensor, chunk, columns) if own_blocks else self._read_rows(tensor, chunk, columns)
            if unit > 1:
                piece = _undo_interleave(piece, unit)
            wanted = range(max(chunk.start, rows.start), min(chunk.stop, rows.stop))
            piece = piece[wanted.start - chunk.start : wanted.stop - chunk.start]
            start = wanted.start - rows.start
            if own_blocks:
                own_blocks.rows(start, start + len(piece)).blocks_OB.copy_(piece)
            else:
                store_rows(out, start, piece, name)

    def _read_rows(self, tensor: GgufTensor, rows: range, columns: range | None) -> Tensor:
        """Return these rows of a matrix, or elements of a vector, in the file's order."""
        kind = self._supported_type(tensor)
        if kind in _PLAIN:
            row_shape, dtype = tensor.shape[1:], _PLAIN[kind]
            start = tensor.offset + rows.start * int(np.prod(row_shape)) * dtype.itemsize
            piece = self._file.file.numbers(start, (len(rows), *row_shape), dtype)
            return piece if columns is None else piece[:, columns.start : columns.stop]
        return _dequantize(self._raw_rows(tensor, rows), kind, columns)

    def _read_blocks(self, tensor: GgufTensor, rows: range, columns: range | None) -> Tensor:
        """Return the bytes of these rows in the file's order; ``columns`` must be whole blocks."""
        blocks = torch.from_numpy(self._raw_rows(tensor, rows))
        if columns is None:
            return blocks
        block_elems, block_bytes = GGML_QUANT_SIZES[self._supported_type(tensor)]
        return blocks[:, columns.start // block_elems * block_bytes : columns.stop // block_elems * block_bytes]

    def _raw_rows(self, tensor: GgufTensor, rows: range) -> npt.NDArray[np.uint8]:
        row_bytes = self._bytes_per_row(tensor)
        return self._file.file.rows(tensor.offset + rows.start * row_bytes, len(rows), row_bytes)

    def _tensor(self, name: str) -> GgufTensor:
        own_name = gguf_name(name)
        tensor = self._file.tensors.get(own_name or "")
        if tensor is None:
            raise ModelError(f"{self._file.path}: tensor {own_name or name} is missing")
        return tensor

    def _supported_type(self, tensor: GgufTensor) -> GGMLQuantizationType:
        kind = _type_of(tensor)
        if kind is None or (kind not in _PLAIN and kind not in _QUANTIZED):
            found = f"number {tensor.type_id}" if kind is None else kind.name
            supported = ", ".join(known.name for known in (*_PLAIN, *_QUANTIZED))
            raise ModelError(
                f"{self._file.path}: tensor {tensor.name} has quantization type {found}, which is not supported; "
                f"supported: {supported}"
            )
        return kind

    def _bytes_per_row(self, tensor: GgufTensor) -> int:
        block_elems, block_bytes = GGML_QUANT_SIZES[self._supported_type(tensor)]
        return tensor.shape[-1] // block_elems * block_bytes if len(tensor.shape) > 1 else block_bytes

    def _check_extent(self, tensor: GgufTensor) -> None:
        kind = _type_of(tensor)
        if kind is None:
            return  # unknown size; reading it raises
        block_elems, block_bytes = GGML_QUANT_SIZES[kind]
        stop = tensor.offset + int(np.prod(tensor.shape)) // block_elems * block_bytes
        if stop > self._file.file.size:
            raise ModelError(
                f"{self._file.path}: truncated: {self._file.file.size} bytes, but tensor {tensor.name} ends at {stop}; "
                "download it again"
            )


def _type_of(tensor: GgufTensor) -> GGMLQuantizationType | None:
    try:
        return GGMLQuantizationType(tensor.type_id)
    except ValueError:
        return None


def _dequantize(raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType, columns: range | None) -> Tensor:
    """Dequantize rows; only blocks with requested columns are decoded."""
    if columns is None:
        return torch.from_numpy(dequantize(raw, kind))
    block_elems, block_bytes = GGML_QUANT_SIZES[kind]
    first, last = columns.start // block_elems, -(-columns.stop // block_elems)
    blocks = np.ascontiguousarray(raw[:, first * block_bytes : last * block_bytes])
    skip = columns.start - first * block_elems
    return torch.from_numpy(dequantize(blocks, kind))[:, skip : skip + len(columns)]


def _undo_interleave(x: Tensor, head_dim: int) -> Tensor:
    """Reorder rows of whole heads from llama.cpp's x0 y0 x1 y1 ... to Hugging Face's x0 x1 ... y0 y1 ..."""
    pairs = x.view(-1, head_dim // 2, 2, *x.shape[1:])
    return pairs.transpose(1, 2).reshape(x.shape)
