"""Weights of models larger than the device: some layers stay, the others come through a few buffers, one after the other.

A thread of its own fetches, always the next streamed layer of the order that passes take: after the last of a pass it goes on
with the first of the next. (What has to be decoded too is read by a second one, a layer ahead.) So a layer is on its way
while the one before is computed, and what a pass takes is the larger of the two, not their sum. Source: ZeRO-Inference
(arXiv 2206.01861; deepspeed.ai, 2022).
"""

import math
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor

from tightwire.comm.buffers import BufferPool, Slot
from tightwire.model.checkpoint.errors import WeightsError
from tightwire.model.weights.image import Image
from tightwire.model.weights.layer_store import LayerStore, Moved
from tightwire.model.weights.source import LayerWeights, OuterWeights

NUM_SLOTS = 2

# Gloo lets nothing end its waits before their deadline: who waits there then is left behind.
_END_S = 5.0


class Flow(NamedTuple):
    """What has come since the start, and what it took."""

    num_layers: int
    num_bytes: int  # as stored
    fetch_s: float  # the fetching thread's time; on CUDA until the copies were queued
    waited_s: float  # a pass's time, until the layer it asked for was there
    late_s: float  # a pass's time, until other ranks wanted the layer too; in neither of the others


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
        self.pool = BufferPool(NUM_SLOTS, max(images[layer].num_bytes for layer in self._order), device, traced=True)
        self._tensors = {
            (layer, slot.number): LayerWeights(**images[layer].tensors(slot.buffer))  # pyright: ignore[reportArgumentType]
            for layer in self._order
            for slot in self.pool.slots
        }
        self._device = device
        self._stages = _Stages(store, images, self._order, device, lambda num_bytes: self.pool.moved())
        self._users: dict[int, tuple[int, int]] = {}  # by layer in use: how many passes, and in which slot
        self._turn = cycle(self._order)
        self._num_fetched = self._num_bytes = 0
        self._fetch_s = self._waited_s = self._late_s = 0.0
        self._thread = threading.Thread(target=self._fetch, name="tightwire-weights", daemon=True)

    def start(self) -> None:
        """Begin to fetch. Before that ``layer`` would wait in vain."""
        self._stages.start()
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
    def store(self) -> LayerStore:
        """Where streamed layers come from."""
        return self._store

    @property
    def pass_bytes(self) -> int:
        """What comes in for every pass."""
        return sum(self._store.image(layer).num_bytes for layer in self._order)

    @property
    def layers_per_pass(self) -> int:
        return len(self._order)

    def flow(self) -> Flow:
        return Flow(self._num_fetched, self._num_bytes, self._fetch_s, self._waited_s, self._late_s)

    @property
    def is_full(self) -> bool:
        """Whether all buffers have their layers: nothing comes until one is released."""
        return _all_filled(self.pool) and self._stages.is_full

    def close(self) -> None:
        """End the threads; layers in use stay valid. May be called twice."""
        self.pool.close(_closed())
        self._stages.stop()
        self._store.stop()
        threads = [thread for thread in (self._thread, self._stages.thread) if thread is not None and thread.is_alive()]
        for thread in threads:
            thread.join(_END_S)
        if not any(thread.is_alive() for thread in threads):
            self._store.close()

    def _take(self, index: int) -> int:
        if (due := next(self._turn)) != index:
            raise RuntimeError(f"streamed layers come in order: {due} is next, and {index} was asked for")
        start_s = time.perf_counter()
        slot = self._use(index)
        late_s = self._late_since(index, start_s)
        self._late_s += late_s
        self._waited_s += time.perf_counter() - start_s - late_s
        return slot.number

    def _use(self, index: int) -> Slot:
        while True:
            try:
                return self.pool.use(index, self._timeout_s)
            except TimeoutError as error:
                # Others compute for as long as they like: their transport has a deadline, and whoever runs them watches.
                if self._store.others_late(index)[1] < math.inf:
                    raise WeightsError(f"layer {index} does not come from {self._store.name}: {error}") from None

    def _late_since(self, index: int, start_s: float) -> float:
        """How long of the time since then the layer's reading waited for other ranks."""
        late_from_s, late_to_s = self._store.others_late(index)
        return max(0.0, min(late_to_s, time.perf_counter()) - max(late_from_s, start_s))

    def _fetch(self) -> None:
        try:
            with torch.inference_mode(), self._stages.queue():
                for layer in cycle(self._order):
                    slot = self.pool.fill(layer)
                    start_s = time.perf_counter()
                    self._stages.bring(layer, slot)
                    self.pool.filled(layer)
                    self._fetch_s += time.perf_counter() - start_s - self._late_since(layer, start_s)
                    self._num_fetched += 1
                    self._num_bytes += self._store.image(layer).num_bytes
        except BaseException as error:  # noqa: BLE001 - whoever waits for a layer raises it
            self.pool.close(error)


class _Stages:
    """A layer's way from its store into a slot: read, copied to the device, decoded; as many of the three as it takes.

    Where it takes more than reading, a thread of its own reads the next layer into another buffer meanwhile.
    """

    def __init__(
        self, store: LayerStore, images: Sequence[Image], order: Sequence[int], device: torch.device, moved: Moved
    ) -> None:
        self._store, self._images, self._order, self._moved = store, images, order, moved
        stored_bytes = max(store.image(layer).num_bytes for layer in order)
        encoded = any(not store.image(layer).is_plain for layer in order)
        self._is_here = store.device.type == device.type
        self._came: dict[int, Tensor] = {}  # by layer, what the store gave for it
        self._read: BufferPool | None = None
        self.thread: threading.Thread | None = None
        if encoded or not self._is_here:
            room = 0 if store.has_memory else stored_bytes
            self._read = BufferPool(NUM_SLOTS, room, store.device, pinned=not self._is_here, traced=True)
            self.thread = threading.Thread(target=self._read_ahead, name="tightwire-read", daemon=True)
        self._on_device = (
            torch.empty(stored_bytes, dtype=torch.uint8, device=device) if encoded and not self._is_here else None
        )
        self._stream = _make_stream(device)
        self._read_stream = _make_stream(store.device)

    @property
    def is_full(self) -> bool:
        return self._read is None or _all_filled(self._read)

    def queue(self) -> AbstractContextManager[object]:
        """What a GPU is told to do in here it does beside computing."""
        return _queue(self._stream)

    def start(self) -> None:
        if self.thread is not None:
            self.thread.start()

    def bring(self, layer: int, slot: Slot) -> None:
        plain, stored = self._images[layer], self._store.image(layer)
        if self._read is None:
            target = slot.buffer[: stored.num_bytes]
            source = self._store.read(layer, target, self._moved)
            if source.data_ptr() != target.data_ptr():
                target.copy_(source)
            return
        self._read.use(layer, math.inf)  # whoever waits for the slot has a deadline
        source = self._came.pop(layer)
        if stored.is_plain:
            slot.buffer[: stored.num_bytes].copy_(source, non_blocking=True)
        elif self._on_device is not None:
            stored.decode(self._on_device[: stored.num_bytes].copy_(source, non_blocking=True), plain, slot.buffer)
        else:
            stored.decode(source, plain, slot.buffer)
        if self._stream is not None and not self._is_here:
            self._stream.synchronize()  # or the buffer would be read into before it was copied from
        self._read.release(layer)

    def stop(self) -> None:
        """Have the threads end; not a ``read`` that is under way."""
        if self._read is not None:
            self._read.close(_closed())

    def _read_ahead(self) -> None:
        assert self._read is not None
        try:
            with torch.inference_mode(), _queue(self._read_stream):
                for layer in cycle(self._order):
                    buffer = self._read.fill(layer).buffer[: self._store.image(layer).num_bytes]
                    self._came[layer] = self._store.read(layer, buffer, self._moved)
                    self._read.filled(layer)
        except BaseException as error:  # noqa: BLE001 - whoever waits for a layer raises it
            self._read.close(error)


def _make_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def _queue(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _all_filled(pool: BufferPool) -> bool:
    return all(slot.state == "filled" for slot in pool.slots)


def _closed() -> WeightsError:
    return WeightsError("these weights are closed")


def _spans(num_layers: int, resident: Mapping[int, LayerWeights]) -> tuple[range, ...]:
    """Resident neighbours together, each streamed layer for itself."""
    spans: list[range] = []
    for layer in range(num_layers):
        if spans and layer in resident and layer - 1 in resident:
            spans[-1] = range(spans[-1].start, layer + 1)
        else:
            spans.append(range(layer, layer + 1))
    return tuple(spans)
