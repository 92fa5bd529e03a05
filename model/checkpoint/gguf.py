"""Reads a .gguf file: metadata, the table of tensors, and slices of tensors as packed blocks or dequantized."""

import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.gguf_reader import GGUFReader
from gguf.quants import dequantize
from torch import Tensor

from tightwire.kernels.spec.packed import Matrix, PackedMatrix
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.reader import WeightFile, growth_of, row_chunks, store_rows
from tightwire.model.checkpoint.tensors import gguf_name

_STRINGS = [GGUFValueType.ARRAY, GGUFValueType.STRING]
_LENGTH = struct.Struct("<Q")
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


class GgufTensor(NamedTuple):
    """A tensor's place in the file. ``shape`` is row-major: (rows, columns), the reverse of the file's order."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int


class _Header(GGUFReader):
    """The library's reader, except that arrays are not decoded: SmolLM2's tokens and merges take it two seconds."""

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[npt.NDArray[Any]], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        data = self.data.data
        item_type, count = struct.unpack_from("<IQ", data, orig_offs)
        kind, start = GGUFValueType(item_type), orig_offs + 12
        if kind == GGUFValueType.STRING:
            end = start
            for _ in range(count):
                end += 8 + _LENGTH.unpack_from(data, end)[0]
            items = self.data[start:end]
        else:
            items = self._get(start, self.gguf_scalar_to_np[kind], count)
            end = start + count * items.itemsize
        if end > len(self.data):
            raise ValueError("an array reaches beyond the end of the file")
        return end - orig_offs, [items], [0], [GGUFValueType.ARRAY, kind]


class GgufFile:
    """A .gguf file and its parsed header."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.file = WeightFile(path)
            with np.errstate(all="raise"):
                self._header = _Header(path)
            if self._header.byte_order != "I":
                raise ValueError("its numbers are big-endian")
        except OSError as error:
            raise ModelError(f"{path}: cannot be opened: {error.strerror}") from None
        except (struct.error, ValueError, TypeError, LookupError, ArithmeticError, MemoryError) as error:
            raise ModelError(f"{path}: not a GGUF file, or truncated or damaged: {error}; download it again") from None
        self.tensors = {
            tensor.name: GgufTensor(
                tensor.name, tuple(reversed(tensor.shape.tolist())), tensor.tensor_type, tensor.data_offset
            )
            for tensor in self._header.tensors
        }
        if int(self.get("split.count", 1)) > 1:
            raise ModelError(f"{path}: is one of several parts; join them first with llama-gguf-split --merge")

    def get(self, key: str, default: Any = None) -> Any:
        """Return a scalar, a string, or an array as a list; ``default`` if the key is absent."""
        field = self._header.fields.get(key)
        if field is None:
            return default
        if field.types != _STRINGS:
            return field.contents()
        data, strings, start = field.parts[field.data[0]].tobytes(), [], 0
        while start < len(data):
            stop = start + 8 + _LENGTH.unpack_from(data, start)[0]
            strings.append(data[start + 8 : stop].decode(errors="replace"))
            start = stop
        return strings


class GgufReader:
    """``CheckpointReader`` for a .gguf of any family."""

    def __init__(self, file: GgufFile, config: LlamaConfig) -> None:
        self._file = file
        self._config = config

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def stored_as(self, name: str) -> str:
        return self._tensor(name).kind.name

    def read_into(self, out: Matrix, name: str, *, rows: range, columns: range | None = None) -> None:
        tensor = self._tensor(name)
        kind = tensor.kind
        own_blocks = out if isinstance(out, PackedMatrix) and out.format.name == kind.name else None
        # llama.cpp interleaves some families' two halves of each query and key head, which is undone one head at a time.
        permuted = self._config.entry.gguf_permuted and (".q_proj." in name or ".k_proj." in name)
        unit = self._config.head_dim if permuted else 1
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
            if name.endswith("norm.weight") and self._config.norm_offset:
                piece = piece - self._config.norm_offset  # llama.cpp adds it
            if own_blocks:
                own_blocks.rows(start, start + len(piece)).blocks_OB.copy_(piece)
            else:
                store_rows(out, start, piece, name)

    def _read_rows(self, tensor: GgufTensor, rows: range, columns: range | None) -> Tensor:
        """Return these rows of a matrix, or elements of a vector, in the file's order."""
        kind = tensor.kind
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
        block_elems, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        return blocks[:, columns.start // block_elems * block_bytes : columns.stop // block_elems * block_bytes]

    def _raw_rows(self, tensor: GgufTensor, rows: range) -> npt.NDArray[np.uint8]:
        row_bytes = self._bytes_per_row(tensor)
        return self._file.file.rows(tensor.offset + rows.start * row_bytes, len(rows), row_bytes)

    def _tensor(self, name: str) -> GgufTensor:
        own_name = gguf_name(name, self._config.norms)
        tensor = self._file.tensors.get(own_name or "")
        if tensor is None:
            raise ModelError(f"{self._file.path}: tensor {own_name or name} is missing")
        if tensor.kind not in _PLAIN and tensor.kind not in _QUANTIZED:
            supported = ", ".join(known.name for known in (*_PLAIN, *_QUANTIZED))
            raise ModelError(
                f"{self._file.path}: tensor {tensor.name} has quantization type {tensor.kind.name}, which is not supported; "
                f"supported: {supported}"
            )
        return tensor

    def _bytes_per_row(self, tensor: GgufTensor) -> int:
        block_elems, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        return tensor.shape[-1] // block_elems * block_bytes if len(tensor.shape) > 1 else block_bytes


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
