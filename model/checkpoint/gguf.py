"""Reads a .gguf file: metadata, the table of tensors, and slices of tensors as packed blocks or dequantized."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from tightwire.kernels.spec.gguf_blocks import PACKED_FORMATS
from tightwire.kernels.spec.packed import Matrix, PackedMatrix
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.gguf_header import GgufHeader, split_parts
from tightwire.model.checkpoint.reader import WeightFile, check_finite, growth_of, row_chunks, store_rows
from tightwire.model.checkpoint.tensors import gguf_name

_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_QUANTIZED = tuple(GGMLQuantizationType[name] for name in PACKED_FORMATS)
# Bytes of memory that dequantization needs per quantized byte, temporaries included; limits the size of a piece.
_DEQUANTIZED_GROWTH = 32


class GgufTensor(NamedTuple):
    """A tensor's place in one file. ``shape`` is row-major: (rows, columns), the reverse of the file's order."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    file: WeightFile


class GgufFile:
    """A .gguf file with its parsed header, or all parts of a split one. ``path``: the file, or its first part."""

    def __init__(self, path: Path) -> None:
        """``path``: the file, or any of the parts."""
        parts = split_parts(path)
        self.path = parts[0]
        absent = [part.name for part in parts if not part.is_file()]
        if absent and len(parts) > 1:
            raise ModelError(f"{path}: {len(absent)} of its {len(parts)} parts are missing: {', '.join(absent[:9])}")
        self.tensors: dict[str, GgufTensor] = {}
        headers = [self._read_part(part, len(parts)) for part in parts]
        self.get = headers[0].get
        stated = self.get("split.tensors.count")
        if stated is not None and stated != len(self.tensors):
            raise ModelError(f"{self.path}: its parts have {len(self.tensors)} tensors, and it states {stated}")

    @property
    def arch(self) -> str:
        """The architecture, with which the model's own keys begin."""
        return str(self.get("general.architecture"))

    def own(self, key: str, default: Any = None) -> Any:
        """``get`` of one of the model's own keys."""
        return self.get(f"{self.arch}.{key}", default)

    def size(self, key: str, default: int | None = None, *, most: int = 1 << 31) -> int:
        """Return an own key's whole number from 1 to ``most``, the same for all layers; else ModelError."""
        value: Any = self.own(key, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ModelError(f"{self.arch}.{key} differs between layers, which is not supported: {value[:9]}")
            value = value[0]
        if not isinstance(value, int) or not 1 <= value <= most:
            found = "missing" if value is None else f"{value!r}; possible: 1 to {most}"
            raise ModelError(f"{self.arch}.{key} is {found}")
        return value

    def _read_part(self, path: Path, num_parts: int) -> GgufHeader:
        """Add a file's tensors."""
        file = WeightFile(path)
        try:
            header = GgufHeader(file.data)
            for tensor in _checked_places(header, file):
                if tensor.name in self.tensors:
                    raise ValueError(f"tensor {tensor.name:.60} stands in it twice")
                self.tensors[tensor.name] = tensor
        except ValueError as error:
            raise ModelError(f"{path}: not a GGUF file, or truncated or damaged: {error}; download it again") from None
        count = header.get("split.count", 1) or 1
        if count != num_parts:
            raise ModelError(
                f"{path}: states split.count {count}, and by its name it is one of {num_parts}; parts are named "
                "NAME-00001-of-00003.gguf, and all must be of one model"
            )
        return header


def _checked_places(header: GgufHeader, file: WeightFile) -> list[GgufTensor]:
    """Return the tensors in the order in which they lie in the file; ValueError unless each has bytes of its own."""
    found: list[GgufTensor] = []
    end = 0
    for place in sorted(header.tensors, key=lambda place: place.offset):
        try:
            kind = GGMLQuantizationType(place.kind)
        except ValueError:
            raise ValueError(f"tensor {place.name} has the unknown type {place.kind}") from None
        block_elems, block_bytes = GGML_QUANT_SIZES[kind]
        if 0 in place.dims or place.dims[0] % block_elems:
            raise ValueError(f"tensor {place.name} has rows of {place.dims[0]} numbers in {kind.name}, of {place.dims}")
        if place.offset < end:
            raise ValueError(f"tensor {place.name} overlaps {found[-1].name}")
        end = place.offset + math.prod(place.dims) // block_elems * block_bytes
        if end > file.size:
            raise ValueError(f"tensor {place.name} should end at {end}, and the file ends at {file.size}")
        found.append(GgufTensor(place.name, tuple(reversed(place.dims)), kind, place.offset, file))
    return found


class GgufReader:
    """``CheckpointReader`` for a .gguf of any family."""

    def __init__(self, file: GgufFile, config: LlamaConfig) -> None:
        self._file, self._config = file, config
        self._checked: set[tuple[str, range]] = set()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def stored_as(self, name: str) -> str:
        return self._tensor(name).kind.name

    def read_into(self, out: Matrix, name: str, *, rows: range, columns: range | None = None) -> None:
        tensor = self._tensor(name)
        kind = tensor.kind
        own_blocks = out if isinstance(out, PackedMatrix) and out.format.name == kind.name else None
        read = self._read_rows if own_blocks is None else self._read_blocks
        # llama.cpp interleaves some families' two halves of each query and key head, which is undone one head at a time.
        permuted = self._config.entry.gguf_permuted and (".q_proj." in name or ".k_proj." in name)
        unit = self._config.head_dim if permuted else 1
        aligned = range(rows.start // unit * unit, -(-rows.stop // unit) * unit)
        row_bytes = self._bytes_per_row(tensor)
        growth = growth_of(out) if kind in _PLAIN else _DEQUANTIZED_GROWTH
        if own_blocks is not None:
            growth = 1
        for chunk in row_chunks(aligned, row_bytes * growth, multiple_of=unit):
            piece = torch.as_tensor(read(tensor, chunk, columns))
            if unit > 1:  # x0 y0 x1 y1 ... becomes Hugging Face's x0 x1 ... y0 y1 ...
                piece = piece.view(-1, unit // 2, 2, *piece.shape[1:]).transpose(1, 2).reshape(piece.shape)
            wanted = range(max(chunk.start, rows.start), min(chunk.stop, rows.stop))
            piece = piece[wanted.start - chunk.start : wanted.stop - chunk.start]
            start = wanted.start - rows.start
            if piece.dim() == 1:
                check_finite(piece, tensor.file.path, tensor.name)
            if name.endswith("norm.weight") and self._config.norm_offset:
                piece = piece - self._config.norm_offset  # llama.cpp adds it
            if own_blocks is not None:
                own_blocks.rows(start, start + len(piece)).blocks_OB.copy_(piece)
            else:
                store_rows(out, start, piece, name)

    def _read_rows(self, tensor: GgufTensor, rows: range, columns: range | None) -> Tensor:
        """Return these rows of a matrix, or elements of a vector, in the file's order."""
        kind = tensor.kind
        if kind in _PLAIN:
            row_shape, dtype = tensor.shape[1:], _PLAIN[kind]
            start = tensor.offset + rows.start * int(np.prod(row_shape)) * dtype.itemsize
            piece = tensor.file.numbers(start, (len(rows), *row_shape), dtype)
            return piece if columns is None else piece[:, columns.start : columns.stop]
        numbers = torch.from_numpy(dequantize(np.ascontiguousarray(self._read_blocks(tensor, rows, columns)), kind))
        if columns is None:
            return numbers
        skip = columns.start % GGML_QUANT_SIZES[kind][0]
        return numbers[:, skip : skip + len(columns)]

    def _read_blocks(self, tensor: GgufTensor, rows: range, columns: range | None) -> npt.NDArray[np.uint8]:
        """Return the bytes of these rows in the file's order, of all blocks with requested columns."""
        row_bytes = self._bytes_per_row(tensor)
        raw = tensor.file.rows(tensor.offset + rows.start * row_bytes, len(rows), row_bytes)
        packed = PACKED_FORMATS[tensor.kind.name]
        # Streamed layers are read again and again; MXFP4 has exponents, which are all finite.
        if packed.name != "MXFP4" and (tensor.name, rows) not in self._checked:
            blocks_NB = raw.reshape(-1, packed.block_bytes)[:, packed.floats_at :]
            scales = np.ascontiguousarray(blocks_NB[:, : 2 + 2 * packed.has_minimum]).view(np.float16)
            check_finite(torch.from_numpy(scales), tensor.file.path, tensor.name)
            self._checked.add((tensor.name, rows))
        if columns is None:
            return raw
        block_elems, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        return raw[:, columns.start // block_elems * block_bytes : -(-columns.stop // block_elems) * block_bytes]

    def _tensor(self, name: str) -> GgufTensor:
        own_name = gguf_name(name, self._config.norms)
        tensor = self._file.tensors.get(own_name or "")
        if tensor is None:
            raise ModelError(f"tensor {own_name or name} is missing")
        if tensor.kind not in _PLAIN and tensor.kind not in _QUANTIZED:
            supported = ", ".join(known.name for known in (*_PLAIN, *_QUANTIZED))
            raise ModelError(
                f"tensor {tensor.name} has quantization type {tensor.kind.name}, which is not supported; "
                f"supported: {supported}"
            )
        if tensor.kind not in _PLAIN and len(tensor.shape) == 1:
            raise ModelError(f"vector {tensor.name} is quantized as {tensor.kind.name}; supported: floats")
        return tensor

    def _bytes_per_row(self, tensor: GgufTensor) -> int:
        block_elems, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        return tensor.shape[-1] // block_elems * block_bytes if len(tensor.shape) > 1 else block_bytes
