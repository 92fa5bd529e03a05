"""Reads slices of tensors from .safetensors files, whose headers the library checks, without a memory map."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from tightwire.kernels.spec.packed import Matrix
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.header import read_json
from tightwire.model.checkpoint.reader import WeightFile, check_finite, growth_of, row_chunks, store_rows

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_CODES = {"I32": torch.int32, "I64": torch.int64, "I8": torch.int8, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class _Entry:
    file: WeightFile
    dtype: str
    shape: tuple[int, ...]
    offset: int


class SafetensorsReader:
    """``CheckpointReader`` for a Hugging Face folder. Opens every file of the index and checks its size."""

    def __init__(self, folder: Path, files: Sequence[Path] | None = None) -> None:
        """``files``: only these; None: those of the folder's index."""
        self._folder, self._entries = folder, dict[str, _Entry]()
        for path in _files(folder) if files is None else files:
            self._entries.update(_read_header(path))
        self.names = self._entries.keys  # of all tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def shape_in_file(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor of any type."""
        return self._found(name).shape

    def dtype_name(self, name: str) -> str:
        """The tensor's type in the file, such as ``bfloat16``."""
        return str(_DTYPES[self._entry(name).dtype]).removeprefix("torch.")

    def stored_as(self, name: str) -> str:
        return self._entry(name).dtype

    def whole(self, name: str) -> Tensor:
        """Return a tensor of any type that floats or quantized weights have."""
        entry = self._found(name)
        dtype = (_DTYPES | _CODES).get(entry.dtype)
        if dtype is None:
            raise ModelError(f"{entry.file.path}: tensor {name} is stored as {entry.dtype}, which is not supported")
        numbers = entry.file.numbers(entry.offset, entry.shape or (1,), dtype).clone()
        if entry.dtype in _DTYPES:
            check_finite(numbers, entry.file.path, name)
        return numbers

    def read_into(self, out: Matrix, name: str, *, rows: range, columns: range | None = None) -> None:
        entry = self._entry(name)
        dtype, row_shape = _DTYPES[entry.dtype], entry.shape[1:]
        row_bytes = math.prod(row_shape) * dtype.itemsize
        if (
            isinstance(out, Tensor)
            and out.dtype == dtype
            and out.shape == (len(rows), *row_shape)
            and out.device.type == "cpu"
            and out.is_contiguous()
            and (columns is None or columns == range(row_shape[0]))
        ):  # whole rows, without conversion
            out_B = out.view(-1).view(torch.uint8).numpy()
            entry.file.read_into(out_B, entry.offset + rows.start * row_bytes)
            if out.dim() == 1:
                check_finite(out, entry.file.path, name)
            return
        for chunk in row_chunks(rows, row_bytes * growth_of(out)):
            part = entry.file.numbers(entry.offset + chunk.start * row_bytes, (len(chunk), *row_shape), dtype)
            if columns is not None:
                part = part[:, columns.start : columns.stop]
            if part.dim() == 1:
                check_finite(part, entry.file.path, name)
            store_rows(out, chunk.start - rows.start, part, name)

    def _found(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise ModelError(f"tensor {name} is missing from the safetensors files in {self._folder}")
        return entry

    def _entry(self, name: str) -> _Entry:
        entry = self._found(name)
        if entry.dtype not in _DTYPES:
            raise ModelError(f"{entry.file.path}: tensor {name} is {entry.dtype}; supported: {', '.join(_DTYPES)}")
        return entry


def _files(folder: Path) -> list[Path]:
    if (single := folder / _SINGLE).is_file():  # before the index, as in transformers
        return [single]
    if (index := folder / _INDEX).is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index}: has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        if elsewhere := [name for name in names if Path(name).name != name]:
            raise ModelError(f"{index}: its weight_map names files outside the folder: {', '.join(elsewhere[:3])}")
        paths = [folder / name for name in names]
        missing = [path.name for path in paths if not os.path.isfile(path)]
        if missing:
            raise ModelError(f"{folder}: {len(missing)} of {len(paths)} shards are missing: {', '.join(missing[:9])}")
        return paths
    other = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    found = f"it has {', '.join(other[:3])}, which must be converted to safetensors" if other else "found neither"
    raise ModelError(f"{folder}: needs {_SINGLE} or {_INDEX}; {found}")


def _read_header(path: Path) -> dict[str, _Entry]:
    file = WeightFile(path)
    try:
        with safe_open(path, framework="pt"):  # checks the header against the file
            start = 8 + int.from_bytes(file.data[:8], "little")
            infos = json.loads(bytes(file.data[8:start]))
    except Exception as error:  # noqa: BLE001 - the library raises no narrower type
        raise ModelError(f"{path}: truncated, or its header is damaged: {error}; download it again") from None
    return {
        name: _Entry(file, info["dtype"], tuple(info["shape"]), start + info["data_offsets"][0])
        for name, info in infos.items()
        if name != "__metadata__"
    }
