"""Loads one rank's weights: resident layers to the device, streamed ones to their store; computes their sizes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from tightwire.buffers import page_aligned
from tightwire.comm.codec.codec import prepare_codecs
from tightwire.comm.group.nodes import PartitionPeers
from tightwire.comm.protocols import Moved
from tightwire.kernels.packed import arrange
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.errors import ModelError, WeightsError
from tightwire.model.checkpoint.reader import CheckpointReader
from tightwire.model.layout import Shard
from tightwire.model.weights import WeightPlan, packed_layer
from tightwire.model.weights.formats import Fused, WeightFormats, layer_tensors, outer_tensors, read_tensors
from tightwire.model.weights.packed_layer import LayerFiles, LayerStore, PackedLayer, PackedModel
from tightwire.model.weights.partition_store import PartitionCut, PartitionStore
from tightwire.model.weights.source import LayerWeights, OuterWeights, ResidentWeights, WeightSource
from tightwire.model.weights.streamed import StreamedWeights

_CPU = torch.device("cpu")
Progress = Callable[[float], None]


def load_weights(
    files: LayerFiles,
    plan: WeightPlan,
    *,
    device: torch.device,
    timeout_s: float,
    peers: PartitionPeers | None = None,
    progress: Progress = lambda fraction: None,
) -> WeightSource:
    """Load the resident layers to ``device``, and the streamed layers, or this rank's part of each, to their store.

    ``files`` and ``peers`` are closed with the weights, or here if they are not needed later or loading fails.
    ``timeout_s``: longest wait for a streamed layer without receiving a byte; with ``peers`` after all ranks started to
    gather it. ``peers``: the ranks that share the layers of a plan with source partition, all of which must call this.
    Each reads the files, so loading sends no weights. ``progress``: called with the share of the bytes read so far, 0
    to 1. Raises CommError: a rank is missing; ModelError, WeightsError: a read failed. Cost: ``WeightSizes`` of the
    plan, and host memory for a layer.
    """
    loading = _Loading(files, plan, device, progress)
    store: LayerStore = files
    try:
        outer, resident = loading.load_resident()
        if peers is not None:
            store = loading.load_parts(peers)
        elif plan.origin == "host":
            store = loading.load_to_host()
        progress(1.0)
        if not plan.streamed:
            files.close()
            return ResidentWeights(outer, tuple(resident.values()))
        limited = store if plan.bytes_per_s is None else packed_layer.ThrottledStore(store, plan.bytes_per_s)
        weights = StreamedWeights(outer, resident, limited, files.model.plain, device, timeout_s=timeout_s)
    except BaseException:
        files.close()
        if peers is not None:
            peers.close()
        raise
    if store is not files:
        files.close()
    weights.start()
    return weights


def _arranged(layer: PackedLayer, memory: Tensor) -> dict[str, Any]:
    """The tensors of a layer, arranged for products but for those in memory of others, who read them too."""
    tensors = layer.tensors(memory)
    return {name: tensor if name in layer.held else arrange(tensor) for name, tensor in tensors.items()}


class _Loading:
    """Reads layers and reports progress."""

    def __init__(self, files: LayerFiles, plan: WeightPlan, device: torch.device, progress: Progress) -> None:
        self._files, self._plan, self._device, self._progress = files, plan, device, progress
        self._num_layers = len(files.model.plain)
        loaded = range(self._num_layers) if plan.origin != "disk" else plan.resident(self._num_layers)
        self._total_bytes = files.model.outer.num_bytes + sum(files.model.plain[layer].num_bytes for layer in loaded)
        self._done_bytes = 0

    def load_resident(self) -> tuple[OuterWeights, dict[int, LayerWeights]]:
        files, model = self._files, self._files.model
        outer = OuterWeights.of(_arranged(model.outer, files.read_outer(self._device, self._moved)))
        layers: dict[int, LayerWeights] = {}
        for layer in self._plan.resident(self._num_layers):
            memory = files.read_plain(layer, self._device, self._moved)
            layers[layer] = LayerWeights(**_arranged(model.plain[layer], memory))
        return outer, layers

    def load_to_host(self) -> packed_layer.HostStore:
        stored, pinned = self._files.model.stored, self._device.type == "cuda"
        layers: dict[int, Tensor] = {}
        for layer in self._plan.streamed:
            memory = page_aligned(stored[layer].num_bytes, _CPU, pinned=pinned)
            layers[layer] = self._files.read(layer, memory, self._moved)
        return packed_layer.HostStore(stored, layers)

    def load_parts(self, peers: PartitionPeers) -> PartitionStore:
        """Read each streamed layer, and keep this rank's part and the tail on the device of ``peers.inside``."""
        codec, model, device = packed_layer.weight_codec(self._plan.codec), self._files.model, peers.inside.device
        prepare_codecs(self._device, codec)  # compile now, because the other ranks would wait in a collective
        whole = page_aligned(max(model.stored[layer].num_bytes for layer in self._plan.streamed), _CPU)
        kept: dict[int, Tensor] = {}
        for layer in self._plan.streamed:
            packed_bytes = self._files.read(layer, whole[: model.stored[layer].num_bytes], self._moved)
            cut = PartitionCut(len(packed_bytes), peers.at.per_node)
            start = peers.at.place * cut.part_bytes
            pinned = device.type == "cpu" and self._device.type == "cuda"
            kept[layer] = page_aligned(cut.kept_bytes, device, pinned=pinned)
            kept[layer][: cut.part_bytes].copy_(packed_bytes[start : start + cut.part_bytes])
            kept[layer][cut.part_bytes :].copy_(packed_bytes[cut.tail_start :])
        store = PartitionStore(model, kept, peers, codec)
        peers.await_all()  # a gather has a deadline, which must not count another rank's loading
        return store

    def _moved(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        self._progress(min(1.0, self._done_bytes / self._total_bytes))


class CheckpointStore(LayerFiles):
    """``LayerFiles`` over a checkpoint. The checkpoint owns ``reader``, which stays open."""

    name = "the checkpoint's files"

    def __init__(self, reader: CheckpointReader, config: LlamaConfig, shard: Shard, model: PackedModel) -> None:
        super().__init__(model)
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
        codec = packed_layer.weight_codec("none" if plan.origin == "disk" else plan.codec)
        model = packed_layer.pack_model(config, shard, formats, dtype, codec)
        forms = enumerate(zip(model.plain, model.stored, strict=True))
        stored = tuple(encoded if layer in plan.streamed else plain for layer, (plain, encoded) in forms)
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
        end = 0
        for place in plain.places.values():
            buffer[end : place.offset].zero_()  # between tensors, which makes checksums reproducible
            end = place.offset + place.num_bytes
        buffer[end : plain.num_bytes].zero_()
        read_tensors(self._reader, {name: tensors[name] for name in plain.places}, plain.tensors(buffer), moved)
        return buffer
