"""Loads one rank's weights: resident layers to the device, streamed layers to their store."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tightwire.comm.buffers import page_aligned
from tightwire.comm.collectives.collectives import prepare_codecs
from tightwire.comm.group.partition_groups import PartitionPeers
from tightwire.comm.ledger.ledger import GATHERING
from tightwire.kernels.spec.packed import Matrix, empty_packed
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.reader import CheckpointReader
from tightwire.model.layout import Shard
from tightwire.model.weights.formats import WeightFormats, weight_bytes
from tightwire.model.weights.fused import Fused, layer_tensors, outer_tensors, read_tensors
from tightwire.model.weights.layer_reader import LayerReader
from tightwire.model.weights.layer_store import HostStore, LayerStore, ThrottledStore
from tightwire.model.weights.packed_layer import layer_on_device, weight_codec
from tightwire.model.weights.partition_store import Kept, PartitionCut, PartitionStore
from tightwire.model.weights.residency import WeightPlan
from tightwire.model.weights.source import LayerWeights, OuterWeights, WeightSource
from tightwire.model.weights.streamed import StreamedWeights

_CPU = torch.device("cpu")
Progress = Callable[[float], None]


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
        """Does nothing: all layers stay on the device."""

    def close(self) -> None:
        """Does nothing: there are no threads."""


def load_resident(
    reader: CheckpointReader,
    config: LlamaConfig,
    shard: Shard,
    *,
    dtype: torch.dtype,
    device: torch.device,
    formats: WeightFormats | None = None,
    progress: Progress = lambda fraction: None,
) -> ResidentWeights:
    """Read this rank's part of the checkpoint.

    Host memory grows by a few MiB, and on CPU by the tensors themselves.

    Args:
        formats: formats of matrices; default: all plain.
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


def load_streamed(
    reader: LayerReader,
    plan: WeightPlan,
    *,
    device: torch.device,
    timeout_s: float,
    progress: Progress = lambda fraction: None,
) -> WeightSource:
    """Load the resident layers to ``device``, and streamed layers to the host if that is their origin.

    The reader is closed with the weights, or here if nothing is read later.

    Args:
        plan: a plan with or without streamed layers.
        timeout_s: longest wait for a streamed layer without receiving a byte.
        progress: called with the share of the bytes read so far, 0 to 1.
    Raises:
        ModelError, WeightsError: a read failed.
    Cost: ``WeightSizes`` of the plan; during loading one more layer on the host.
    """
    loading = _Loading(reader, plan, device, progress, on_host=plan.streamed if plan.origin == "host" else ())
    outer, resident = loading.load_resident()
    if not plan.streamed:
        reader.close()
        return ResidentWeights(outer=outer, layers=tuple(resident.values()))
    if plan.origin == "host":
        pinned = device.type == "cuda"
        store: LayerStore = HostStore(
            reader.packed.stored, {layer: loading.read(layer, pinned=pinned) for layer in plan.streamed}
        )
        reader.close()
    else:
        store = reader.open_store()
    progress(1.0)
    return _start(outer, resident, store, plan, reader, device, timeout_s)


def load_partitioned(
    reader: LayerReader,
    plan: WeightPlan,
    peers: PartitionPeers,
    *,
    device: torch.device,
    timeout_s: float,
    progress: Progress = lambda fraction: None,
) -> StreamedWeights:
    """Load the resident layers, and this rank's part of each streamed layer.

    Parts are on the device of ``peers.inside``. Every node has the files, and each rank reads the bytes that it keeps.
    A layer that cannot be read in parts is read whole by every rank. Loading sends no weights. All ranks of the shard
    must call this. The reader is closed here; ``peers`` are closed with the weights.

    Args:
        timeout_s: longest wait for a streamed layer without receiving a byte, after all ranks started to gather it.
    Raises:
        CommError: a rank is missing.
        ModelError, WeightsError: a read failed.
    """
    codec = weight_codec(plan.codec)
    prepare_codecs(device, codec)  # compile now, because the other ranks would wait in a collective
    loading = _Loading(reader, plan, device, progress, on_host=plan.streamed)
    try:
        outer, resident = loading.load_resident()
        kept = {layer: loading.read_kept(layer, peers) for layer in plan.streamed}
        store = PartitionStore(reader.packed.stored, reader.packed.plain, kept, peers, codec)
        peers.meet()  # a gather has a deadline, which must not count another rank's loading
        peers.count_as(GATHERING)
        progress(1.0)
        return _start(outer, resident, store, plan, reader, device, timeout_s)
    except BaseException:
        peers.close()
        raise
    finally:
        reader.close()


def _start(
    outer: OuterWeights,
    resident: dict[int, LayerWeights],
    store: LayerStore,
    plan: WeightPlan,
    reader: LayerReader,
    device: torch.device,
    timeout_s: float,
) -> StreamedWeights:
    if plan.bytes_per_s is not None:
        store = ThrottledStore(store, plan.bytes_per_s)
    weights = StreamedWeights(outer, resident, store, reader.packed.plain, device, timeout_s=timeout_s)
    weights.start()
    return weights


class _Loading:
    """Reads layers and reports progress. ``on_host``: layers that are loaded now and stay on the host."""

    def __init__(
        self,
        reader: LayerReader,
        plan: WeightPlan,
        device: torch.device,
        progress: Progress,
        *,
        on_host: Iterable[int],
    ) -> None:
        self._reader, self._device, self._progress = reader, device, progress
        packed = reader.packed
        self._resident = plan.resident(len(packed.plain))
        self._total_bytes = packed.outer.num_bytes
        self._total_bytes += sum(packed.plain[layer].num_bytes for layer in (*self._resident, *on_host))
        self._done_bytes = 0

    def load_resident(self) -> tuple[OuterWeights, dict[int, LayerWeights]]:
        packed, device = self._reader.packed, self._device
        buffer = self._reader.read_outer(self._moved)
        outer = OuterWeights.of(packed.outer.tensors(buffer.to(device)))
        layers = {
            layer: layer_on_device(packed.stored[layer], packed.plain[layer], self.read(layer), device)
            for layer in self._resident
        }
        return outer, layers

    def read(self, layer: int, *, pinned: bool = False) -> Tensor:
        return self._reader.read_layer(layer, self._moved, pinned=pinned)

    def read_kept(self, layer: int, peers: PartitionPeers) -> Kept:
        """Read this rank's part of a layer and its tail to the device of ``peers.inside``."""
        device = peers.inside.device
        cut = PartitionCut(self._reader.packed.stored[layer].num_bytes, peers.at.per_node)
        pinned = device.type == "cpu" and self._device.type == "cuda"
        kept = Kept(cut, page_aligned(cut.kept_bytes, device, pinned=pinned))
        places = ((peers.at.place * cut.part_bytes, kept.part), (cut.tail_start, kept.tail))
        if not self._reader.reads_parts:
            whole = self.read(layer)
            for start, target in places:
                target.copy_(whole[start : start + len(target)])
            return kept
        for start, target in places:
            host = target if device.type == "cpu" else torch.empty(target.shape, dtype=torch.uint8)
            self._reader.read_part(layer, start, host, self._moved)
            target.copy_(host)
        return kept

    def _moved(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        self._progress(min(1.0, self._done_bytes / self._total_bytes))


def _empty(fused: Fused, formats: WeightFormats, dtype: torch.dtype, device: torch.device) -> Matrix:
    packed = formats.of(fused)
    if packed is None:
        return torch.empty(fused.shape, dtype=dtype, device=device)
    return empty_packed(fused.shape[0], fused.shape[1], packed, device)
