"""Reads one rank's packed layers at load time, from a checkpoint or a prepared folder."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Protocol, Self

import torch
from torch import Tensor

from tightwire.comm.buffers import page_aligned
from tightwire.comm.protocols import Moved
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.reader import CheckpointReader
from tightwire.model.layout import Shard
from tightwire.model.weights.formats import WeightFormats
from tightwire.model.weights.fused import Fused, layer_tensors, outer_tensors, read_tensors
from tightwire.model.weights.layer_store import CheckpointStore, LayerStore
from tightwire.model.weights.packed_layer import PackedLayer, PackedModel, pack_model, weight_codec
from tightwire.model.weights.prepared.folder import Prepared
from tightwire.model.weights.residency import WeightPlan

_CPU = torch.device("cpu")


class LayerReader(Protocol):
    """Reads one rank's layers in any order. ``read_layer`` returns them in the form ``packed.stored``."""

    @property
    def packed(self) -> PackedModel: ...

    @property
    def reads_parts(self) -> bool:
        """False if a layer can only be read whole."""
        ...

    def read_outer(self, moved: Moved) -> Tensor:
        """Return the outer tensors as (packed bytes,) uint8 on the host, page-aligned.

        Raises:
            ModelError, WeightsError: they cannot be read.
        """
        ...

    def read_layer(self, layer: int, moved: Moved, *, pinned: bool = False) -> Tensor:
        """Return a layer in the same form, in pinned memory if requested."""
        ...

    def read_part(self, layer: int, start: int, into: Tensor, moved: Moved) -> None:
        """Fill ``into`` (N,) uint8 with the layer's bytes from ``start`` on. Requires ``reads_parts``.

        Raises:
            WeightsError: the bytes cannot be read.
        """
        ...

    def open_store(self) -> LayerStore:
        """Return a store that reads the streamed layers each time they are needed."""
        ...

    def close(self) -> None: ...


class CheckpointLayers:
    """``LayerReader`` that packs a checkpoint's tensors, and encodes them if ``packed.stored`` is encoded."""

    reads_parts = False  # tensors are read by rows, and encoding needs all rows of a layer

    def __init__(
        self,
        reader: CheckpointReader,
        config: LlamaConfig,
        shard: Shard,
        packed: PackedModel,
        streamed: Collection[int] = (),
    ) -> None:
        """``streamed``: the layers that ``open_store`` provides."""
        self.packed = packed
        self._reader, self._streamed = reader, streamed
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
        """Make a reader that encodes layers streamed from host memory or other ranks; all others stay plain."""
        codec = weight_codec("none" if plan.origin == "disk" else plan.codec)
        packed = pack_model(config, shard, formats, dtype, codec)
        stored = [
            encoded if layer in plan.streamed else plain
            for layer, (plain, encoded) in enumerate(zip(packed.plain, packed.stored, strict=True))
        ]
        return cls(reader, config, shard, replace(packed, stored=tuple(stored)), plan.streamed)

    def read_outer(self, moved: Moved) -> Tensor:
        return self._read(self.packed.outer, self._outer, moved, page_aligned(self.packed.outer.num_bytes, _CPU))

    def read_layer(self, layer: int, moved: Moved, *, pinned: bool = False) -> Tensor:
        plain, stored = self.packed.plain[layer], self.packed.stored[layer]
        kept = page_aligned(stored.num_bytes, _CPU, pinned=pinned)
        if stored.is_plain:
            return self._read(plain, self._layers[layer], moved, kept)
        whole = self._read(plain, self._layers[layer], moved, page_aligned(plain.num_bytes, _CPU))
        stored.encode(plain, whole, kept)
        return kept

    def _read(self, plain: PackedLayer, tensors: Mapping[str, Fused], moved: Moved, buffer: Tensor) -> Tensor:
        plain.zero_gaps(buffer)
        read_tensors(self._reader, tensors, plain.tensors(buffer), moved)
        return buffer

    def read_part(self, layer: int, start: int, into: Tensor, moved: Moved) -> None:
        raise NotImplementedError("a checkpoint's layers are read whole")

    def open_store(self) -> LayerStore:
        layers = {layer: self._layers[layer] for layer in self._streamed}
        return CheckpointStore(self._reader, self.packed.plain, layers)

    def close(self) -> None:
        """Does nothing: the checkpoint owns the reader."""


class PreparedLayers:
    """``LayerReader`` for one rank's file of a prepared folder. With ``verify`` it reads only whole layers.

    A checksum covers a whole layer.
    """

    def __init__(self, prepared: Prepared, rank: int, plan: WeightPlan, patience_s: float) -> None:
        """``patience_s``: time limit for retries of reads that fail temporarily."""
        self.packed = prepared.packed(rank)
        self.reads_parts = not plan.verify
        self._prepared, self._rank, self._verify = prepared, rank, plan.verify
        self._store = prepared.store(rank, plan.io, verify=plan.verify, patience_s=patience_s)

    def read_outer(self, moved: Moved) -> Tensor:
        return self._prepared.read_outer(self._rank, verify=self._verify, moved=moved)

    def read_layer(self, layer: int, moved: Moved, *, pinned: bool = False) -> Tensor:
        return self._store.read(layer, page_aligned(self.packed.stored[layer].num_bytes, _CPU, pinned=pinned), moved)

    def read_part(self, layer: int, start: int, into: Tensor, moved: Moved) -> None:
        self._store.read_part(layer, start, into, moved)

    def open_store(self) -> LayerStore:
        return self._store

    def close(self) -> None:
        self._store.close()
