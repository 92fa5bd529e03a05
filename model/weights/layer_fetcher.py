"""Fetches streamed layers into two device buffers on a separate thread, in the order of passes.

A layer is read from its store, then copied to the device and decoded if needed; then a second thread reads the next
layer into another pair of buffers at the same time.
"""

import math
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle

import torch
from torch import Tensor

from tightwire.comm.buffers import BufferPool, PoolBuffer
from tightwire.comm.protocols import Moved
from tightwire.model.checkpoint.errors import WeightsError
from tightwire.model.weights.layer_store import LayerStore
from tightwire.model.weights.packed_layer import PackedLayer

NUM_BUFFERS = 2

# Gloo cannot interrupt a wait before its deadline, so ``close`` does not wait longer than this for a thread.
_END_S = 5.0


class LayerFetcher:
    """Fetches the layers of ``order`` cyclically, each as soon as a buffer of ``pool`` is free.

    Cost: ``NUM_BUFFERS`` plain layers on ``device``; if layers are copied or decoded, also ``NUM_BUFFERS`` stored ones
    on the store's device; if both, also one stored layer on ``device``.
    """

    def __init__(
        self, store: LayerStore, plain: Sequence[PackedLayer], order: Sequence[int], device: torch.device
    ) -> None:
        """``plain``: the plain form of every layer of the model."""
        self.store, self._plain, self._order = store, plain, order
        self.pool = BufferPool(NUM_BUFFERS, max(plain[layer].num_bytes for layer in order), device, traced=True)
        self.num_layers = self.num_bytes = 0  # fetched since the start; bytes as stored
        self.fetch_s = 0.0  # excludes waits for other ranks; on CUDA ends when the copies are queued
        self._stages = _Stages(store, plain, order, device, lambda num_bytes: self.pool.moved())
        self._thread = threading.Thread(target=self._fetch, name="tightwire-weights", daemon=True)

    def start(self) -> None:
        self._stages.start()
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """True if all buffers are filled, so nothing is fetched until one is released."""
        return _all_filled(self.pool) and self._stages.is_full

    @property
    def read_pool(self) -> BufferPool | None:
        """Buffers of stored layers; None if layers are read directly into ``pool``."""
        return self._stages.pool

    def late_since(self, layer: int, start_s: float) -> float:
        """Return the seconds since ``start_s`` that the layer's read waited for other ranks."""
        late_from_s, late_to_s = self.store.others_late(layer)
        return max(0.0, min(late_to_s, time.perf_counter()) - max(late_from_s, start_s))

    def close(self) -> None:
        """Stop the threads; layers in use stay valid. May be called twice."""
        self.pool.close(_closed())
        self._stages.stop()
        self.store.stop()
        threads = [thread for thread in (self._thread, self._stages.thread) if thread is not None and thread.is_alive()]
        for thread in threads:
            thread.join(_END_S)
        if not any(thread.is_alive() for thread in threads):
            self.store.close()

    def _fetch(self) -> None:
        try:
            with torch.inference_mode(), self._stages.queue():
                for layer in cycle(self._order):
                    buffer = self.pool.fill(layer)
                    start_s = time.perf_counter()
                    self._stages.bring(layer, buffer)
                    self.pool.filled(layer)
                    self.fetch_s += time.perf_counter() - start_s - self.late_since(layer, start_s)
                    self.num_layers += 1
                    self.num_bytes += self.store.packed(layer).num_bytes
        except BaseException as error:  # noqa: BLE001 - raised in the pass that waits for a layer
            self.pool.close(error)


class _Stages:
    """The stages of fetching a layer: read, copy to the device, decode."""

    def __init__(
        self, store: LayerStore, plain: Sequence[PackedLayer], order: Sequence[int], device: torch.device, moved: Moved
    ) -> None:
        self._store, self._plain, self._order, self._moved = store, plain, order, moved
        stored_bytes = max(store.packed(layer).num_bytes for layer in order)
        encoded = any(not store.packed(layer).is_plain for layer in order)
        self._same_device = store.device.type == device.type
        self._arrived: dict[int, Tensor] = {}  # layer -> bytes read from the store
        self.pool: BufferPool | None = None
        self.thread: threading.Thread | None = None
        if encoded or not self._same_device:
            room = 0 if store.has_memory else stored_bytes
            self.pool = BufferPool(NUM_BUFFERS, room, store.device, pinned=not self._same_device, traced=True)
            self.thread = threading.Thread(target=self._read_ahead, name="tightwire-read", daemon=True)
        self.on_device = (
            torch.empty(stored_bytes, dtype=torch.uint8, device=device) if encoded and not self._same_device else None
        )
        self._stream = _make_stream(device)
        self._read_stream = _make_stream(store.device)

    @property
    def is_full(self) -> bool:
        return self.pool is None or _all_filled(self.pool)

    def queue(self) -> AbstractContextManager[object]:
        """Run GPU work of the ``with`` block concurrently with the computation."""
        return _queue(self._stream)

    def start(self) -> None:
        if self.thread is not None:
            self.thread.start()

    def bring(self, layer: int, buffer: PoolBuffer) -> None:
        plain, stored = self._plain[layer], self._store.packed(layer)
        if self.pool is None:
            target = buffer.memory[: stored.num_bytes]
            source = self._store.read(layer, target, self._moved)
            if source.data_ptr() != target.data_ptr():
                target.copy_(source)
            return
        self.pool.use(layer, math.inf)  # no timeout here: the waiting pass has one
        source = self._arrived.pop(layer)
        if stored.is_plain:
            buffer.memory[: stored.num_bytes].copy_(source, non_blocking=True)
        elif self.on_device is not None:
            stored.decode(self.on_device[: stored.num_bytes].copy_(source, non_blocking=True), plain, buffer.memory)
        else:
            stored.decode(source, plain, buffer.memory)
        if self._stream is not None and not self._same_device:
            self._stream.synchronize()  # the next read must not overwrite a buffer that is still being copied
        self.pool.release(layer)

    def stop(self) -> None:
        """Stop the reading thread after its current ``read``."""
        if self.pool is not None:
            self.pool.close(_closed())

    def _read_ahead(self) -> None:
        assert self.pool is not None
        try:
            with torch.inference_mode(), _queue(self._read_stream):
                for layer in cycle(self._order):
                    buffer = self.pool.fill(layer).memory[: self._store.packed(layer).num_bytes]
                    self._arrived[layer] = self._store.read(layer, buffer, self._moved)
                    self.pool.filled(layer)
        except BaseException as error:  # noqa: BLE001 - raised in the pass that waits for a layer
            self.pool.close(error)


def _make_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def _queue(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _all_filled(pool: BufferPool) -> bool:
    return all(buffer.state == "filled" for buffer in pool.buffers)


def _closed() -> WeightsError:
    return WeightsError("these weights are closed")
