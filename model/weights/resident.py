"""Weights that stay on the device: each rank's slices, read straight into the fused tensors the layers use."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tightwire.kernels.packed import Matrix, PackedMatrix, empty_packed
from tightwire.model.config import LlamaConfig
from tightwire.model.layout import Shard
from tightwire.model.weights.formats import WeightFormats, weight_bytes
from tightwire.model.weights.fused import Fused, layer_tensors, outer_tensors
from tightwire.model.weights.source import CheckpointReader, LayerWeights, OuterWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidentWeights:
    """``WeightSource`` that has everything in memory from the start; ``release`` keeps it there."""

    outer: OuterWeights
    layers: tuple[LayerWeights, ...]

    def layer(self, index: int) -> LayerWeights:
        return self.layers[index]

    def release(self, index: int) -> None:
        """Nothing to give back."""


def load_resident(
    reader: CheckpointReader,
    config: LlamaConfig,
    shard: Shard,
    *,
    dtype: torch.dtype,
    device: torch.device,
    formats: WeightFormats | None = None,
    progress: Callable[[float], None] = lambda fraction: None,
) -> ResidentWeights:
    """Read this rank's part of the checkpoint.

    Host memory grows by the rank's share (on CPU: the tensors themselves) and a few MiB for the piece in hand.

    Args:
        formats: how matrices are kept; default: all as plain numbers.
        progress: called with the share of the rank's bytes read so far, 0 to 1, after each tensor.
    Cost: ``weight_bytes`` of the formats on the device.
    """
    formats = formats or WeightFormats()
    total_bytes = weight_bytes(config, shard, formats, dtype.itemsize)
    filler = _Filler(reader, dtype, device, formats, total_bytes, progress)
    outer = filler.fill_all(outer_tensors(config, shard))
    layers = tuple(
        LayerWeights(**filler.fill_all(layer_tensors(config, shard, index))) for index in range(config.num_layers)
    )
    return ResidentWeights(outer=OuterWeights(**{"head": outer["embedding"], **outer}), layers=layers)


class _Filler:
    """Allocates a tensor and fills it from parts of the checkpoint's; keeps count for the progress bar."""

    def __init__(
        self,
        reader: CheckpointReader,
        dtype: torch.dtype,
        device: torch.device,
        formats: WeightFormats,
        total_bytes: int,
        progress: Callable[[float], None],
    ) -> None:
        self._reader = reader
        self._dtype = dtype
        self._device = device
        self._formats = formats
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._progress = progress

    def fill_all(self, tensors: Mapping[str, Fused]) -> dict[str, Any]:
        """A tensor or packed matrix for each field."""
        return {field: self._fill(fused) for field, fused in tensors.items()}

    def _fill(self, fused: Fused) -> Matrix:
        packed = self._formats.of(fused)
        if packed is None:
            out = torch.empty(fused.shape, dtype=self._dtype, device=self._device)
        else:
            out = empty_packed(fused.shape[0], fused.shape[1], packed, self._device)
        start = 0
        for name, rows in fused.parts:
            stop = start + len(rows)
            part = out.rows(start, stop) if isinstance(out, PackedMatrix) else out[start:stop]
            self._reader.read_into(part, name, rows=rows, columns=fused.columns)
            start = stop
        self._done_bytes += out.nbytes
        self._progress(self._done_bytes / self._total_bytes)
        return out
