"""Reads slices of tensors from a .gguf file by their Hugging Face names, as packed blocks or dequantized."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from tightwire.kernels.spec.packed import Matrix, PackedMatrix
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.gguf_file import GgufFile, GgufTensor
from tightwire.model.checkpoint.names import gguf_name, hf_name
from tightwire.model.checkpoint.reader import growth_of, row_chunks, store_rows

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


class GgufReader:
    """``CheckpointReader`` for a .gguf of architecture ``llama``; checks that the file contains every tensor."""

    def __init__(self, file: GgufFile, config: LlamaConfig) -> None:
        self._file = file
        self._head_dim = config.head_dim
        for tensor in file.tensors.values():
            self._check_extent(tensor)

    def names(self) -> Iterator[str]:
        return (name for tensor in self._file.tensors if (name := hf_name(tensor)) is not None)

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
                "fetch it again"
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
