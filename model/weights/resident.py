"""Weights that stay on the device: each rank's slices, read directly into the fused tensors that the layers use."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tightwire.kernels.spec.packed import Matrix, empty_packed
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.reader import CheckpointReader
from tightwire.model.layout import Shard
from tightwire.model.weights.formats import WeightFormats, weight_bytes
from tightwire.model.weights.fused import Fused, layer_tensors, outer_tensors, read_tensors
from tightwire.model.weights.source import LayerWeights, OuterWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidentWeights:
    """``WeightSource`` with all layers on the device."""

    outer: OuterWeights
    layers: tuple[LayerWeights, ...]

    @property
    def spans(self) -> tuple[range, ...]:
        return (range(len(self.layers)),)

    def layer(self, index: int) -> LayerWeights:
        return self.layers[index]

    def release(self, index: int) -> None:
        """Layers stay."""

    def close(self) -> None:
        """There are no threads."""


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

    Host memory grows by a few MiB, and on CPU by the tensors themselves.

    Args:
        formats: of matrices; default: all plain.
        progress: called with the share of the rank's bytes read so far, 0 to 1, after each part of a tensor.
    Cost: ``weight_bytes`` of the formats on the device.
    """
    formats = formats or WeightFormats()
    total_bytes = weight_bytes(config, shard, formats, dtype.itemsize)
    done_bytes = 0

    def moved(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        progress(done_bytes / total_bytes)

    def load(tensors: Mapping[str, Fused]) -> dict[str, Any]:
        loaded = {field: _empty(fused, formats, dtype, device) for field, fused in tensors.items()}
        read_tensors(reader, tensors, loaded, moved)
        return loaded

    outer = load(outer_tensors(config, shard))
    layers = tuple(LayerWeights(**load(layer_tensors(config, shard, index))) for index in range(config.num_layers))
    return ResidentWeights(outer=OuterWeights.of(outer), layers=layers)


def _empty(fused: Fused, formats: WeightFormats, dtype: torch.dtype, device: torch.device) -> Matrix:
    packed = formats.of(fused)
    if packed is None:
        return torch.empty(fused.shape, dtype=dtype, device=device)
    return empty_packed(fused.shape[0], fused.shape[1], packed, device)
