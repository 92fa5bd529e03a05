"""From a checkpoint and a plan to streamed weights: what stays is read onto the device, what waits on the host there."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tightwire.comm.buffers import page_aligned
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.layout import Shard
from tightwire.model.weights.fill import empty_matrix, fill
from tightwire.model.weights.formats import WeightFormats, weight_bytes
from tightwire.model.weights.fused import Fused, layer_tensors, outer_tensors
from tightwire.model.weights.image import Image
from tightwire.model.weights.layer_store import CheckpointStore, HostStore, LayerStore, Moved, ThrottledStore
from tightwire.model.weights.prepared.folder import Prepared, load_layer
from tightwire.model.weights.residency import WeightPlan, layer_images
from tightwire.model.weights.resident import ResidentWeights
from tightwire.model.weights.source import CheckpointReader, LayerWeights, OuterWeights, WeightSource
from tightwire.model.weights.streamed import StreamedWeights

_PATIENCE_SHARE = 0.75


def load_streamed(
    reader: CheckpointReader,
    config: LlamaConfig,
    shard: Shard,
    plan: WeightPlan,
    *,
    dtype: torch.dtype,
    device: torch.device,
    formats: WeightFormats,
    timeout_s: float,
    progress: Callable[[float], None] = lambda fraction: None,
) -> StreamedWeights:
    """Read what stays on the device, and what is to wait on the host.

    Host memory grows by what is to be there and a few MiB for the piece in hand.

    Args:
        plan: with layers to stream.
        timeout_s: longest that not one byte of a streamed layer may come.
        progress: called with the share of the bytes read so far, 0 to 1, after each part of a tensor.
    Cost: ``WeightSizes`` of the plan.
    """
    return _Loading(reader, config, shard, plan, dtype, device, formats, progress).load(timeout_s)


def load_prepared(
    prepared: Prepared,
    rank: int,
    plan: WeightPlan,
    *,
    device: torch.device,
    timeout_s: float,
    progress: Callable[[float], None] = lambda fraction: None,
) -> WeightSource:
    """The same out of a prepared folder: what stays is read once, what streams each time its turn comes.

    Args:
        plan: with layers to stream, or without.
        timeout_s: longest that not one byte of a streamed layer may come; what may pass is tried again for most of it.
    Raises:
        WeightsError: a file cannot be read, or with ``plan.verify`` is not what was written.
    """
    images = prepared.images(rank)
    # Its reason is to be heard before that of the pass that waits for the layer, which has ``timeout_s``.
    patience_s = _PATIENCE_SHARE * timeout_s
    store: LayerStore = prepared.store(rank, plan.io, verify=plan.verify, patience_s=patience_s)
    num_layers = prepared.config.num_layers
    from_disk = plan.origin == "disk"
    now = [layer for layer in range(num_layers) if not (from_disk and layer in plan.streamed)]
    total_bytes = images.outer.num_bytes + sum(images.stored[layer].num_bytes for layer in now)
    done_bytes = 0

    def moved(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        progress(min(1.0, done_bytes / total_bytes))

    outer = prepared.load_outer(rank, device, verify=plan.verify, moved=moved)
    resident = {
        layer: load_layer(store, layer, images.plain[layer], device, moved) for layer in plan.resident(num_layers)
    }
    if not plan.streamed:
        store.close()
        return ResidentWeights(outer=outer, layers=tuple(resident.values()))
    if not from_disk:
        disk, store = (
            store,
            HostStore(images.stored, {layer: _kept(store, layer, device, moved) for layer in plan.streamed}),
        )
        disk.close()
    return start_streaming(outer, resident, store, images.plain, plan, device, timeout_s)


def _kept(store: LayerStore, layer: int, device: torch.device, moved: Moved) -> Tensor:
    buffer = page_aligned(store.image(layer).num_bytes, torch.device("cpu"), pinned=device.type == "cuda")
    return store.read(layer, buffer, moved)


def start_streaming(
    outer: OuterWeights,
    resident: Mapping[int, LayerWeights],
    store: LayerStore,
    images: Sequence[Image],
    plan: WeightPlan,
    device: torch.device,
    timeout_s: float,
) -> StreamedWeights:
    """Weights of which ``store`` has the streamed layers, on their way."""
    if plan.bytes_per_s is not None:
        store = ThrottledStore(store, plan.bytes_per_s)
    weights = StreamedWeights(outer, resident, store, images, device, timeout_s=timeout_s)
    weights.start()
    return weights


class _Loading:
    def __init__(
        self,
        reader: CheckpointReader,
        config: LlamaConfig,
        shard: Shard,
        plan: WeightPlan,
        dtype: torch.dtype,
        device: torch.device,
        formats: WeightFormats,
        progress: Callable[[float], None],
    ) -> None:
        self._reader, self._config, self._shard, self._plan = reader, config, shard, plan
        self._dtype, self._device, self._formats, self._progress = dtype, device, formats, progress
        self._images = layer_images(config, shard, formats, dtype)
        self._done_bytes = 0
        skipped = [] if plan.origin == "host" else plan.streamed  # they are read when their turn comes
        self._total_bytes = weight_bytes(config, shard, formats, dtype.itemsize)
        self._total_bytes -= sum(self._images[layer].num_bytes for layer in skipped)

    def load(self, timeout_s: float) -> StreamedWeights:
        plan, num_layers = self._plan, self._config.num_layers
        outer = OuterWeights.of(self._resident(outer_tensors(self._config, self._shard)))
        resident = {layer: LayerWeights(**self._resident(self._tensors(layer))) for layer in plan.resident(num_layers)}
        store = self._host_store() if plan.origin == "host" else self._checkpoint_store()
        return start_streaming(outer, resident, store, self._images, plan, self._device, timeout_s)

    def _resident(self, tensors: Mapping[str, Fused]) -> dict[str, Any]:
        into = {
            field: empty_matrix(fused, self._formats, self._dtype, self._device) for field, fused in tensors.items()
        }
        fill(self._reader, tensors, into, self._moved)
        return into

    def _host_store(self) -> LayerStore:
        stored = layer_images(self._config, self._shard, self._formats, self._dtype, self._plan.codec)
        return HostStore(stored, {layer: self._on_host(layer, stored[layer]) for layer in self._plan.streamed})

    def _on_host(self, layer: int, stored: Image) -> Tensor:
        plain, host, pinned = self._images[layer], torch.device("cpu"), self._device.type == "cuda"
        kept = page_aligned(stored.num_bytes, host, pinned=pinned)
        whole = kept if stored.is_plain else page_aligned(plain.num_bytes, host)
        fill(self._reader, self._tensors(layer), plain.tensors(whole), self._moved)
        if whole is not kept:
            stored.encode(plain, whole, kept)
        return kept

    def _checkpoint_store(self) -> LayerStore:
        return CheckpointStore(
            self._reader, self._images, {layer: self._tensors(layer) for layer in self._plan.streamed}
        )

    def _tensors(self, layer: int) -> dict[str, Fused]:
        return layer_tensors(self._config, self._shard, layer)

    def _moved(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        self._progress(min(1.0, self._done_bytes / self._total_bytes))
