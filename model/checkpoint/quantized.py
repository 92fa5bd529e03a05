"""Reads the quantized linear layers of other projects' safetensors (AWQ, GPTQ, compressed-tensors, FP8) as packed blocks or floats.

A weight is ``(code - zero) * scale``, with one scale and zero for some neighbouring columns of a row. Packed formats have one for
every 32 columns, so a larger group's are repeated, and nothing is rounded again but what ``QuantizedReader.describe`` says.

Sources: AutoAWQ awq/utils/packing_utils.py; GPTQModel nn_modules/qlinear; compressed-tensors compressors/pack_quantized; DeepSeek-V3
inference/fp8_cast_bf16.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tightwire.kernels.spec.gguf_blocks import GROUP_ELEMS, Q4_0, Q4_1, Q8_0, PackedFormat
from tightwire.kernels.spec.packed import Matrix, PackedMatrix
from tightwire.model.checkpoint.errors import ModelError, naming
from tightwire.model.checkpoint.quantization import Quantization
from tightwire.model.checkpoint.reader import growth_of, row_chunks, store_rows
from tightwire.model.checkpoint.safetensors import SafetensorsReader

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in an int32 of each of eight neighbouring columns
_CODES = {"awq": ".qweight", "gptq": ".qweight", "packed": ".weight_packed", "plain": ".weight"}
_INDICES = (".g_idx", ".weight_g_idx")
_DAMAGED = "its codes, scales, zeros and groups do not belong together"
_ROUNDED = "rounded again, by at most 1/254 of the largest of 32 numbers"
_Read = Callable[[str], Tensor]  # whole tensors of the files


@dataclass(frozen=True, slots=True)
class _Codes:
    """Some rows of a matrix. The group of a column chooses its scale and zero."""

    codes_OD: Tensor  # uint8, int8 or float8
    scale_OG: Tensor  # float32
    zero_OG: Tensor  # float32
    group_D: Tensor

    def numbers(self) -> Tensor:
        """(O, D) float32, rounded once by the product."""
        zero_OD, scale_OD = self.zero_OG[:, self.group_D], self.scale_OG[:, self.group_D]
        return (self.codes_OD.float() - zero_OD) * scale_OD

    def blocks(self, packed: PackedFormat) -> Tensor:
        """The blocks of a packed matrix with these codes: (O, bytes). ModelError: its scales do not fit into float16."""
        group_B = self.group_D[::GROUP_ELEMS]
        scale_OB1, zero_OB1 = self.scale_OG[:, group_B, None], self.zero_OG[:, group_B, None]
        header = [scale_OB1.half()]
        if packed.has_minimum:
            header.append((-zero_OB1 * scale_OB1).half())
        if not all(bool(part.isfinite().all()) for part in header):
            raise ModelError("its scales are too large for float16; use --quantization none")
        codes_OBN = self.codes_OD.unflatten(1, (-1, GROUP_ELEMS))
        if packed.bits == 8:
            bytes_OBN = (codes_OBN.float() - zero_OB1).to(torch.int8).view(torch.uint8)
        else:
            bytes_OBN = codes_OBN[..., : GROUP_ELEMS // 2] | codes_OBN[..., GROUP_ELEMS // 2 :] << 4
        return torch.cat([*(part.view(torch.uint8) for part in header), bytes_OBN], -1).flatten(1)


class QuantizedReader:
    """``CheckpointReader`` of a folder whose linear layers are quantized; its other tensors are read as they are."""

    def __init__(self, plain: SafetensorsReader, quantization: Quantization) -> None:
        self._plain, self._quantization = plain, quantization
        self._names = frozenset(plain.names())
        self._orders: dict[str, bool] = {}

    def describe(self) -> str:
        """The quantization, the format it is kept in, and what that rounds."""
        indexed = (name.rsplit(".", 1)[0] for name in self._names if name.endswith(_INDICES))
        in_order = all(self._in_order(f"{module}.weight") for module in indexed)
        own, packed = self._quantization, self._format(in_order=in_order)
        exact = "kept; minima are rounded to float16, by at most 1/136 of a step" if packed.has_minimum else "kept"
        cost = _ROUNDED if self._is_rounded(packed, in_order=in_order) else exact
        return f"{own.name}{'' if in_order else ', act-order'}; in memory {packed.name}: {cost}"

    def shape(self, name: str) -> tuple[int, ...]:
        if not self._is_quantized(name):
            return self._plain.shape(name)
        layout, per_int = self._quantization.layout, 32 // self._quantization.bits
        rows, columns = self._plain.shape_in_file(self._of(name, _CODES[layout]))
        if layout == "packed" and (stated := self._of(name, ".weight_shape")) in self._names:
            return rows, int(self._plain.whole(stated)[1])
        if layout == "awq":
            return columns * per_int, rows
        if layout == "gptq":
            return columns, rows * per_int
        return rows, columns * per_int if layout == "packed" else columns

    def stored_as(self, name: str) -> str:
        if not self._is_quantized(name):
            return self._plain.stored_as(name)
        packed = None if self.shape(name)[1] % GROUP_ELEMS else self._format(in_order=self._in_order(name))
        return self._quantization.name if packed is None else packed.name

    def read_into(self, out: Matrix, name: str, *, rows: range, columns: range | None = None) -> None:
        if not self._is_quantized(name):
            self._plain.read_into(out, name, rows=rows, columns=columns)
            return
        with naming(f"tensor {name}", _DAMAGED, IndexError, RuntimeError):
            columns = range(self.shape(name)[1]) if columns is None else columns
            read, blocks = cache(self._plain.whole), None
            if isinstance(out, PackedMatrix) and not self._is_rounded(out.format, in_order=self._in_order(name)):
                blocks = out
            # Codes are unpacked piece by piece: all of a matrix would take several times its bytes.
            for chunk in row_chunks(rows, 4 * len(columns) * (growth_of(out) if blocks is None else 1), multiple_of=8):
                part, start = self._codes(name, chunk, columns, read), chunk.start - rows.start
                if blocks is not None:
                    blocks.rows(start, start + len(chunk)).blocks_OB.copy_(part.blocks(blocks.format))
                else:
                    store_rows(out, start, part.numbers(), name)

    def _is_quantized(self, name: str) -> bool:
        layout = self._quantization.layout
        if not name.endswith(".weight"):
            return False
        codes = self._of(name, _CODES[layout])
        return codes in self._names and (layout != "plain" or self._scale_name(name) is not None)

    def _format(self, *, in_order: bool) -> PackedFormat:
        """The packed format that matrices are kept in."""
        own = self._quantization
        if own.bits == 8 or not in_order:
            return Q8_0
        return Q4_0 if own.symmetric else Q4_1

    def _is_rounded(self, packed: PackedFormat, *, in_order: bool) -> bool:
        """Return True unless ``packed`` holds the codes themselves."""
        own = self._quantization
        if own.is_float or not in_order or packed.bits != own.bits:
            return True
        return packed.has_minimum == own.symmetric if own.bits == 4 else not own.symmetric

    def _in_order(self, name: str) -> bool:
        """Return True if each 32 neighbouring columns have one scale."""
        if name not in self._orders:
            index_D = self._index(name)
            firsts_D = index_D[::GROUP_ELEMS].repeat_interleave(GROUP_ELEMS)
            self._orders[name] = torch.equal(index_D, firsts_D[: len(index_D)])
        return self._orders[name]

    def _index(self, name: str) -> Tensor:
        """The stored group of each column; empty: groups are neighbouring columns. Keys of config.json do not say which."""
        stored = next((found for each in _INDICES if (found := self._of(name, each)) in self._names), None)
        index_D = torch.empty(0) if stored is None else self._plain.whole(stored)
        return index_D if bool((index_D >= 0).all()) else index_D[:0]  # compressed-tensors fills unused ones with -1

    def _groups(self, name: str, columns: range) -> Tensor:
        """The group of each column."""
        if len(index_D := self._index(name)):
            return index_D.long()[columns.start : columns.stop]
        size = self._quantization.group_elems or (self._quantization.block_elems or (0, self.shape(name)[1]))[1]
        return torch.arange(columns.start, columns.stop) // size

    def _codes(self, name: str, rows: range, columns: range, read: _Read) -> _Codes:
        own = self._quantization
        raw = read(self._of(name, _CODES[own.layout]))
        if own.layout == "plain" and raw.dtype not in (torch.int8, torch.float8_e4m3fn):
            raise ModelError(f"it has a scale, and numbers in {raw.dtype}; supported: int8 or float8_e4m3fn")
        out, inputs = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
        if own.layout in ("awq", "gptq"):
            per_int, order = 32 // own.bits, _AWQ_ORDER if own.layout == "awq" else None
            ints, first = slice(rows.start // per_int, -(-rows.stop // per_int)), rows.start % per_int
            in_ints = slice(first, first + len(rows))
            if order:
                codes_OD = _unpack(raw[inputs, ints], own.bits, 1, order)[:, in_ints].t()
            else:
                codes_OD = _unpack(raw[:, out], own.bits, 0)[inputs].t()
            scale_OG = read(self._of(name, ".scales"))[:, out].float().t()
            zero_OG = _unpack(read(self._of(name, ".qzeros"))[:, ints], own.bits, 1, order)[:, in_ints].t()
            # 0 is stored as the highest code by the version that stores zero - 1.
            zero_OG = (zero_OG + own.stored_zero_offset) & (1 << own.bits) - 1
        else:
            codes_OD = (_unpack(raw[out], own.bits, 1) if own.layout == "packed" else raw[out])[:, inputs]
            scale_OG = self._scales(name, rows, read)
            zero_OG = self._zeros(name, rows, scale_OG, read)
        if own.layout == "gptq" and own.symmetric and bool((zero_OG != 1 << own.bits - 1).any()):
            raise ModelError('its zeros are not those of "sym": true in config.json; is "checkpoint_format" right?')
        num_groups = 1 + int(self._groups(name, range(self.shape(name)[1])).max())
        if {scale_OG.shape, zero_OG.shape} != {(len(rows), num_groups)}:
            found = f"{scale_OG.shape[1]} scales and {zero_OG.shape[1]} zeros a row"
            raise ModelError(f"{found}, and {own.name} need {num_groups} each; is its config.json another model's?")
        return _Codes(codes_OD.contiguous(), scale_OG, zero_OG.float(), self._groups(name, columns))

    def _scales(self, name: str, rows: range, read: _Read) -> Tensor:
        """Scales of rows, (O, G): stored for the tensor, each row, groups of columns, or blocks of rows and columns."""
        stored = self._scale_name(name)
        if stored is None:
            raise ModelError(f"tensor {self._of(name, '.weight_scale')} is missing")
        scale = read(stored).float()
        if scale.numel() == 1:
            return scale.reshape(1, 1).expand(len(rows), 1)
        row_O = torch.arange(rows.start, rows.stop)
        if self._quantization.block_elems is not None:
            row_O = row_O // self._quantization.block_elems[0]
        return scale.reshape(len(scale), -1)[row_O]

    def _zeros(self, name: str, rows: range, scale_OG: Tensor, read: _Read) -> Tensor:
        own, stored = self._quantization, self._of(name, ".weight_zero_point")
        if own.symmetric or stored not in self._names:
            return torch.full_like(scale_OG, 1 << own.bits - 1 if own.layout == "packed" else 0)
        zero = _unpack(read(stored), own.bits, 0) if own.layout == "packed" else read(stored)
        own_rows = slice(rows.start, rows.stop) if zero.numel() > 1 else slice(None)  # one zero may be that of all rows
        return zero.float().reshape(len(zero), -1)[own_rows].expand_as(scale_OG)

    def _scale_name(self, name: str) -> str | None:
        candidates = (self._of(name, ending) for ending in (".weight_scale", ".weight_scale_inv"))
        return next((candidate for candidate in candidates if candidate in self._names), None)

    def _of(self, name: str, ending: str) -> str:
        return name.removesuffix(".weight") + ending


def _unpack(ints: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """The codes in int32s as uint8, next to each other along ``dim``; ``order``: the place of each in its int32."""
    shifts = [bits * place for place in order or range(32 // bits)]
    parts = [(ints >> shift & (1 << bits) - 1).to(torch.uint8) for shift in shifts]
    return torch.stack(parts, dim + 1).flatten(dim, dim + 1)
