"""Reads one rank's layers from an unmodified checkpoint: finds, cuts, converts and encodes the tensors."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from tightwire.comm.buffers import page_aligned
from tightwire.comm.protocols import Moved
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.errors import ModelError, WeightsError
from tightwire.model.checkpoint.reader import CheckpointReader
from tightwire.model.layout import Shard
from tightwire.model.weights import WeightPlan
from tightwire.model.weights.formats import WeightFormats
from tightwire.model.weights.fused import Fused, layer_tensors, outer_tensors, read_tensors
from tightwire.model.weights.layer_store import LayerFiles
from tightwire.model.weights.packed_layer import PackedLayer, PackedModel, pack_model, weight_codec

_CPU = torch.device("cpu")


class CheckpointStore(LayerFiles):
    """``LayerFiles`` over a checkpoint. The checkpoint owns ``reader``, which stays open."""

    name = "the checkpoint's files"

    def __init__(self, reader: CheckpointReader, config: LlamaConfig, shard: Shard, model: PackedModel) -> None:
        self.model = model
        self._reader = reader
        self._outer = outer_tensors(config, shard)
        self._layers = [layer_tensors(config, shard, layer) for layer in range(config.num_layers)]

    @classmethod
    def for_plan(
        cls,
        reader: CheckpointReader,
        config: LlamaConfig,
        shard: Shard,
        plan: WeightPlan,
        dtype: torch.dtype,
        formats: WeightFormats,
    ) -> Self:
        """Make a store that encodes layers streamed from host memory or other ranks; all others stay plain."""
        codec = weight_codec("none" if plan.origin == "disk" else plan.codec)
        model = pack_model(config, shard, formats, dtype, codec)
        forms = (model.stored if layer in plan.streamed else model.plain for layer in range(config.num_layers))
        stored = tuple(form[layer] for layer, form in enumerate(forms))
        return cls(reader, config, shard, replace(model, stored=stored))

    def read_outer(self, device: torch.device, moved: Moved) -> Tensor:
        packed = self.model.outer
        return self._read(packed, self._outer, page_aligned(packed.num_bytes, device), moved)

    def read_plain(self, layer: int, device: torch.device, moved: Moved) -> Tensor:
        plain = self.model.plain[layer]
        return self._read(plain, self._layers[layer], page_aligned(plain.num_bytes, device), moved)

    def read(self, layer: int, into: Tensor, moved: Moved) -> Tensor:
        try:
            return self.pack(layer, into, moved)
        except ModelError as error:
            raise WeightsError(f"layer {layer} cannot be read: {error}") from None

    def pack(self, layer: int, into: Tensor, moved: Moved) -> Tensor:
        """Do what ``read`` does, but raise ModelError."""
        plain, stored = self.model.plain[layer], self.model.stored[layer]
        if stored.is_plain:
            return self._read(plain, self._layers[layer], into, moved)
        stored.encode(plain, self.read_plain(layer, _CPU, moved), into)
        return into

    def _read(self, plain: PackedLayer, tensors: Mapping[str, Fused], buffer: Tensor, moved: Moved) -> Tensor:
        plain.zero_gaps(buffer)
        read_tensors(self._reader, tensors, plain.tensors(buffer), moved)
        return buffer
