"""Weights of models larger than the device: some layers stay, the others come through a few buffers, one after the other.

A thread of its own fetches, always the next streamed layer of the order that passes take: after the last of a pass it goes on
with the first of the next. So a layer is on its way while the one before is computed, and what a pass takes is the larger of
the two, not their sum. Source: ZeRO-Inference (arXiv 2206.01861; deepspeed.ai, 2022).
"""

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle
from typing import NamedTuple

import torch

from tightwire.comm.buffers import BufferPool, Slot, page_aligned
from tightwire.model.errors import WeightsError
from tightwire.model.weights.image import Image
from tightwire.model.weights.layer_store import LayerStore, Moved
from tightwire.model.weights.source import LayerWeights, OuterWeights

NUM_SLOTS = 2


class Flow(NamedTuple):
    """What has come since the start, and what it took."""

    num_layers: int
    num_bytes: int  # as stored
    fetch_s: float  # the fetching thread's time; on CUDA until the copies were queued
    waited_s: float  # a pass's time, until the layer it asked for was there


class StreamedWeights:
    """``WeightSource`` of which only ``resident`` layers and ``NUM_SLOTS`` others are on the device.

    Cost: ``streamed_bytes``, and the stored image's bytes beside them on the host where they are not the plain ones.
    """

    def __init__(
        self,
        outer: OuterWeights,
        resident: Mapping[int, LayerWeights],
        store: LayerStore,
        images: Sequence[Image],
        device: torch.device,
        *,
        timeout_s: float,
    ) -> None:
        """
        Args:
            store: of the layers that are not in ``resident``.
            images: of each layer, plain.
            timeout_s: longest that not one byte may come, while a pass waits for a layer.
        Raises:
            ValueError: so few layers are left to be streamed that the buffers would hold them all.
        """
        self.outer = outer
        self._resident, self._store, self._timeout_s = resident, store, timeout_s
        self._order = [layer for layer in range(len(images)) if layer not in resident]
        if len(self._order) <= NUM_SLOTS:
            raise ValueError(f"{NUM_SLOTS} buffers hold all of {len(self._order)} streamed layers; keep them resident")
        self._images = images
        self.spans = _spans(len(images), resident)
        self.pool = BufferPool(NUM_SLOTS, max(images[layer].num_bytes for layer in self._order), device)
        self._tensors = {
            (layer, slot.number): LayerWeights(**images[layer].tensors(slot.buffer))  # pyright: ignore[reportArgumentType]
            for layer in self._order
            for slot in self.pool.slots
        }
        self._device = device
        self._stages = _Stages(store, images, self._order, device)
        self._users: dict[int, tuple[int, int]] = {}  # by layer in use: how many passes, and in which slot
        self._turn = cycle(self._order)
        self._num_fetched = self._num_bytes = 0
        self._fetch_s = self._waited_s = 0.0
        self._thread = threading.Thread(target=self._fetch, name="tightwire-weights", daemon=True)

    def start(self) -> None:
        """Begin to fetch. Before that ``layer`` would wait in vain."""
        self._thread.start()

    def layer(self, index: int) -> LayerWeights:
        if index in self._resident:
            return self._resident[index]
        if index in self._users:
            count, number = self._users[index]
        else:
            count, number = 0, self._take(index)
        self._users[index] = count + 1, number
        return self._tensors[index, number]

    def release(self, index: int) -> None:
        if index in self._resident:
            return
        count, number = self._users[index]
        if count > 1:
            self._users[index] = count - 1, number
        else:
            del self._users[index]
            self.pool.release(index)

    @property
    def pass_bytes(self) -> int:
        """What comes in for every pass."""
        return sum(self._store.image(layer).num_bytes for layer in self._order)

    @property
    def layers_per_pass(self) -> int:
        return len(self._order)

    def flow(self) -> Flow:
        return Flow(self._num_fetched, self._num_bytes, self._fetch_s, self._waited_s)

    def close(self) -> None:
        """End the thread; layers in use stay valid. May be called twice."""
        self.pool.close(WeightsError("these weights are closed"))
        if self._thread.is_alive():
            self._thread.join()
        self._store.close()

    def _take(self, index: int) -> int:
        if (due := next(self._turn)) != index:
            raise RuntimeError(f"streamed layers come in order: {due} is next, and {index} was asked for")
        start_s = time.perf_counter()
        try:
            slot = self.pool.use(index, self._timeout_s)
        except TimeoutError as error:
            raise WeightsError(f"layer {index} does not come from {self._store.name}: {error}") from None
        self._waited_s += time.perf_counter() - start_s
        return slot.number

    def _fetch(self) -> None:
        try:
            with torch.inference_mode(), self._stages.queue():
                for layer in cycle(self._order):
                    slot = self.pool.fill(layer)
                    start_s = time.perf_counter()
                    self._stages.bring(layer, slot, self.pool)
                    self.pool.filled(layer)
                    self._fetch_s += time.perf_counter() - start_s
                    self._num_fetched += 1
                    self._num_bytes += self._store.image(layer).num_bytes
        except BaseException as error:  # noqa: BLE001 - whoever waits for a layer raises it
            self.pool.close(error)


class _Stages:
    """A layer's way from its store into a slot: read, copied to the device, decoded; as many of the three as it takes."""

    def __init__(self, store: LayerStore, images: Sequence[Image], order: Sequence[int], device: torch.device) -> None:
        self._store, self._images = store, images
        stored_bytes = max(store.image(layer).num_bytes for layer in order)
        encoded = any(not store.image(layer).is_plain for layer in order)
        self._cuda = device.type == "cuda"
        # On CUDA the copy out of a host buffer goes on while the next layer is read into the other one.
        num_host_buffers = 2 if self._cuda else int(encoded)
        self._host = [
            page_aligned(stored_bytes, torch.device("cpu"), pinned=self._cuda) for _ in range(num_host_buffers)
        ]
        self._copied = [torch.cuda.Event() for _ in self._host] if self._cuda else []
        self._on_device = (
            torch.empty(stored_bytes, dtype=torch.uint8, device=device) if self._cuda and encoded else None
        )
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._turn = 0

    def queue(self) -> AbstractContextManager[object]:
        """What a GPU is told to do in here it does beside computing."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def bring(self, layer: int, slot: Slot, pool: BufferPool) -> None:
        plain, stored = self._images[layer], self._store.image(layer)

        def moved(num_bytes: int) -> None:
            pool.moved()

        if self._cuda:
            self._bring_to_device(layer, slot, moved, plain, stored)
        elif stored.is_plain:
            target = slot.buffer[: stored.num_bytes]
            source = self._store.read(layer, target, moved)
            if source.data_ptr() != target.data_ptr():
                target.copy_(source)
        else:
            stored.decode(self._store.read(layer, self._host[0][: stored.num_bytes], moved), plain, slot.buffer)

    def _bring_to_device(self, layer: int, slot: Slot, moved: Moved, plain: Image, stored: Image) -> None:
        self._turn = (self._turn + 1) % len(self._host)
        self._copied[self._turn].synchronize()  # the buffer's last copy
        source = self._store.read(layer, self._host[self._turn][: stored.num_bytes], moved)
        if stored.is_plain:
            slot.buffer[: stored.num_bytes].copy_(source, non_blocking=True)
        else:
            assert self._on_device is not None
            encoded = self._on_device[: stored.num_bytes].copy_(source, non_blocking=True)
            stored.decode(encoded, plain, slot.buffer)
        self._copied[self._turn].record()


def _spans(num_layers: int, resident: Mapping[int, LayerWeights]) -> tuple[range, ...]:
    """Resident neighbours together, each streamed layer for itself."""
    spans: list[range] = []
    for layer in range(num_layers):
        if spans and layer in resident and layer - 1 in resident:
            spans[-1] = range(spans[-1].start, layer + 1)
        else:
            spans.append(range(layer, layer + 1))
    return tuple(spans)
