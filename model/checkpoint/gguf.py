"""Reads a .gguf file: metadata, the table of tensors, and slices of tensors as packed blocks or dequantized."""

import math
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
from tightwire.model.checkpoint.config import LlamaConfig, RopeScaling
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.reader import WeightFile, gguf_name, growth_of, row_chunks, store_rows

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
    """``CheckpointReader`` for a .gguf of architecture ``llama``."""

    def __init__(self, file: GgufFile, config: LlamaConfig) -> None:
        self._file = file
        self._head_dim = config.head_dim

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def stored_as(self, name: str) -> str:
        return self._tensor(name).kind.name

    def read_into(self, out: Matrix, name: str, *, rows: range, columns: range | None = None) -> None:
        tensor = self._tensor(name)
        kind = tensor.kind
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
        own_name = gguf_name(name)
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


_DTYPES = {"F32": "float32", "F16": "float16"}  # other types are served as bfloat16
# End-of-turn tokens of known chat formats. Older files list only the end-of-document token.
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end_of_text|>")
_ROPE_FREQS = "rope_freqs.weight"


def config_from_gguf(file: GgufFile) -> LlamaConfig:
    """Read sizes, rope and token ids; raises ModelError for anything that is missing or not supported."""
    try:
        return _config_from_gguf(file)
    except ModelError:
        raise
    except (TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise ModelError(f"{file.path}: its metadata is damaged: {error}") from None


def _config_from_gguf(file: GgufFile) -> LlamaConfig:
    arch = file.get("general.architecture")
    if arch != "llama":
        raise ModelError(f"{file.path}: architecture {arch!r} is not supported; supported: llama")
    if int(file.get("llama.expert_count", 0)):
        raise ModelError(f"{file.path}: mixture-of-experts models are not supported; supported: dense llama")
    heads, hidden = _size(file, "attention.head_count"), _size(file, "embedding_length")
    embedding, query = (file.tensors.get(name) for name in ("token_embd.weight", "blk.0.attn_q.weight"))
    if embedding is None:
        raise ModelError(f"{file.path}: tensor token_embd.weight is missing")
    head_dim = _size(file, "attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if _size(file, key, head_dim) != head_dim:
            raise ModelError(f"{file.path}: llama.{key}={file.get('llama.' + key)} differs from head size {head_dim}")
    return LlamaConfig(
        num_layers=_size(file, "block_count"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=_size(file, "attention.head_count_kv", heads),
        head_dim=head_dim,
        mlp_size=_size(file, "feed_forward_length"),
        vocab_size=embedding.shape[0],  # some files' own count omits the padding
        max_positions=_size(file, "context_length"),
        norm_eps=_shortest_float(file.get("llama.attention.layer_norm_rms_epsilon", 1e-5)),
        rope_theta=float(file.get("llama.rope.freq_base", 10000.0)),
        rope_scaling=_rope_scaling(file, head_dim),
        tied_embeddings="output.weight" not in file.tensors,
        attention_bias=_has_bias(file, "attn_q", "attn_k", "attn_v", "attn_output"),
        mlp_bias=_has_bias(file, "ffn_gate", "ffn_up", "ffn_down"),
        dtype=_DTYPES.get(query.kind.name if query else "", "bfloat16"),
        bos_token_id=file.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_eos_token_ids(file),
    )


def _size(file: GgufFile, key: str, default: int | None = None) -> int:
    value: Any = file.get(f"llama.{key}", default)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise ModelError(f"{file.path}: llama.{key} differs between layers, which is not supported: {value}")
        value = value[0]
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{file.path}: llama.{key} is {'missing' if value is None else f'{value!r}'}")
    return value


def _shortest_float(value: float) -> float:
    """Return the shortest decimal that rounds to this float32, such as 1e-5 for 9.999999747378752e-06."""
    return float(f"{value:.6g}")


def _has_bias(file: GgufFile, *names: str) -> bool:
    present = [name for name in names if f"blk.0.{name}.bias" in file.tensors]
    if present and len(present) != len(names):
        raise ModelError(f"{file.path}: only {', '.join(present)} have a bias; supported: all of {', '.join(names)}")
    return bool(present)


def _eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [file.get(f"tokenizer.ggml.{key}") for key in keys]
    tokens = file.get("tokenizer.ggml.tokens", [])
    ids += [tokens.index(token) for token in _END_OF_TURN if token in tokens]
    return tuple(dict.fromkeys(int(i) for i in ids if i is not None))


def _rope_scaling(file: GgufFile, head_dim: int) -> RopeScaling:
    """Read scaling from the keys, or from the frequency divisors that llama.cpp stores for Llama 3.1 and later."""
    kind = file.get("llama.rope.scaling.type")
    factor = float(file.get("llama.rope.scaling.factor", 0) or file.get("llama.rope.scale_linear", 0) or 1)
    if kind not in (None, "none", "linear"):
        raise ModelError(f"{file.path}: rope scaling {kind!r} is not supported; supported: none, linear, llama3")
    if _ROPE_FREQS in file.tensors:
        if factor != 1.0:
            raise ModelError(f"{file.path}: {_ROPE_FREQS} together with a scaling factor of {factor} is not supported")
        return _llama3_scaling(file, head_dim)
    if kind == "none" or factor == 1.0:
        return RopeScaling()
    return RopeScaling(kind="linear", factor=factor)


def _llama3_scaling(file: GgufFile, head_dim: int) -> RopeScaling:
    """Recover Llama 3's scaling: the largest divisor is the factor, the others must match the released values."""
    tensor = file.tensors[_ROPE_FREQS]
    if tensor.kind.name != "F32" or tensor.shape != (head_dim // 2,):
        raise ModelError(f"{file.path}: {_ROPE_FREQS} has an unexpected type or shape {tensor.shape}")
    divisors = file.file.numbers(tensor.offset, tensor.shape, torch.float32).tolist()
    if all(divisor == 1.0 for divisor in divisors):
        return RopeScaling()
    theta = float(file.get("llama.rope.freq_base", 10000.0))
    scaling = RopeScaling(kind="llama3", factor=_shortest_float(max(divisors)))
    want = [llama3_divisor(scaling, 2 * math.pi * theta ** (2 * i / head_dim)) for i in range(head_dim // 2)]
    if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(divisors, want, strict=True)):
        raise ModelError(
            f"{file.path}: the rope divisors in {_ROPE_FREQS} are not those of Llama 3 "
            f"(low_freq_factor {scaling.low_freq_factor}, high_freq_factor {scaling.high_freq_factor}, trained context "
            f"{scaling.original_max_positions}); other long-context scalings are not supported"
        )
    return scaling


def llama3_divisor(scaling: RopeScaling, wavelength: float) -> float:
    """The divisor that Llama 3's scaling applies to the frequency with this wavelength, in positions."""
    turns = scaling.original_max_positions / wavelength
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept_share = min(max(share, 0.0), 1.0)
    return 1 / ((1 - kept_share) / scaling.factor + kept_share)
