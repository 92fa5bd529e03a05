"""Streams the weights of models larger than the device: some layers are resident, the others share a few buffers.

A layer is fetched while the one before is computed, so a pass takes the longer of the two times, not their sum. It is read
from its store, then copied to the device and decoded if needed; then a second thread reads the next layer at the same time.
Source: ZeRO-Inference (arXiv 2206.01861; deepspeed.ai, 2022).
"""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tightwire.buffers import BufferPool, PoolBuffer, SharedUses, make_stream
from tightwire.comm.protocols import Moved
from tightwire.model.checkpoint.errors import WeightsError
from tightwire.model.weights import NUM_BUFFERS
from tightwire.model.weights.packed_layer import LayerStore, PackedLayer
from tightwire.model.weights.source import LayerWeights, OuterWeights, WeightSource


class Flow(NamedTuple):
    """Streamed layers and bytes since the start, and the time for them."""

    num_layers: int
    num_bytes: int  # in stored form
    fetch_s: float  # time of the fetching thread, which on CUDA waits for its copies
    waited_s: float  # time that passes waited for layers
    late_s: float  # time that passes waited for other ranks to gather too; not part of the other times


class StreamedWeights(WeightSource):
    """``WeightSource`` with ``resident`` layers and ``NUM_BUFFERS`` others on the device."""

    def __init__(
        self,
        outer: OuterWeights,
        resident: Mapping[int, LayerWeights],
        store: LayerStore,
        plain: Sequence[PackedLayer],
        device: torch.device,
        *,
        timeout_s: float,
    ) -> None:
        """``store``: the store of the layers that are not in ``resident``, at least three. ``plain``: the plain form of
        each layer. ``timeout_s``: longest time that a pass waits for a layer without receiving a byte.
        """
        self.outer = outer
        self._resident, self._timeout_s = resident, timeout_s
        self._order = [layer for layer in range(len(plain)) if layer not in resident]
        if (num := len(self._order)) <= NUM_BUFFERS:
            raise ValueError(f"the {NUM_BUFFERS} buffers hold all {num} streamed layers; keep them resident")
        # Consecutive resident layers are a span, and each streamed layer is one.
        starts = [layer for layer in range(len(plain)) if not {layer - 1, layer} <= resident.keys()]
        self.spans = tuple(range(start, stop) for start, stop in pairwise((*starts, len(plain))))
        self.fetcher = LayerFetcher(store, plain, self._order, device)
        self.store, self.pool = store, self.fetcher.pool
        self.start, self.close = self.fetcher.start, self.fetcher.close
        self._layers = {
            (layer, buffer.number): LayerWeights(**plain[layer].tensors(buffer.memory))
            for layer in self._order
            for buffer in self.pool.buffers
        }
        self._uses = SharedUses(self.pool, self._take)
        self._turn = cycle(self._order)
        self._waited_s = self._late_s = 0.0

    def layer(self, index: int) -> LayerWeights:
        if index in self._resident:
            return self._resident[index]
        return self._layers[index, self._uses.use(index).number]

    def release(self, index: int) -> None:
        if index not in self._resident:
            self._uses.release(index)

    def flow(self) -> Flow:
        fetcher = self.fetcher
        return Flow(fetcher.num_layers, fetcher.num_bytes, fetcher.fetch_s, self._waited_s, self._late_s)

    def _take(self, index: int) -> PoolBuffer:
        if (due := next(self._turn)) != index:
            raise RuntimeError(f"streamed layers must be requested in order: expected {due}, got {index}")
        start_s, buffer = time.perf_counter(), None
        while buffer is None:
            try:
                buffer = self.pool.use(index, self._timeout_s)
            except TimeoutError as error:
                # Other ranks may compute for any length of time: the transport has a deadline.
                if self.store.others_late(index)[1] < math.inf:
                    raise WeightsError(f"layer {index} did not arrive from {self.store.name}: {error}") from None
        late_s = self.fetcher.late_since(index, start_s)
        self._late_s += late_s
        self._waited_s += time.perf_counter() - start_s - late_s
        return buffer


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
        self.fetch_s = 0.0  # excludes waits for other ranks
        self._moved: Moved = lambda num_bytes: self.pool.moved()
        stored_bytes = max(store.stored[layer].num_bytes for layer in order)
        encoded = any(not store.stored[layer].is_plain for layer in order)
        self._copies = store.device.type != device.type
        self._stream, read_stream = make_stream(device), make_stream(store.device)
        self._threads = [self._thread("tightwire-weights", self.pool, self._stream, self._fetch)]
        self.read_pool: BufferPool | None = None  # buffers of stored layers; None: layers are read into ``pool``
        self._arrived: dict[int, Tensor] = {}  # layer -> bytes read from the store
        self._copied: Any = None  # event of the last copy of the store's own memory
        self._decoded_from: Tensor | None = None
        if encoded and self._copies:
            self._decoded_from = torch.empty(stored_bytes, dtype=torch.uint8, device=device)
        if encoded or self._copies:
            room = 0 if store.has_memory else stored_bytes
            self.read_pool = BufferPool(NUM_BUFFERS, room, store.device, pinned=self._copies, traced=True)
            self._threads.append(self._thread("tightwire-read", self.read_pool, read_stream, self._read_ahead))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def is_full(self) -> bool:
        """True if all buffers are filled, so nothing is fetched until one is released."""
        pools = [self.pool] if self.read_pool is None else [self.pool, self.read_pool]
        return all(buffer.state == "filled" for pool in pools for buffer in pool.buffers)

    def late_since(self, layer: int, start_s: float) -> float:
        """Return the seconds since ``start_s`` that the layer's read waited for other ranks."""
        late_from_s, late_to_s = self.store.others_late(layer)
        return max(0.0, min(late_to_s, time.perf_counter()) - max(late_from_s, start_s))

    def close(self) -> None:
        """Stop the threads; layers in use stay valid. May be called twice."""
        for pool in (self.pool, self.read_pool):
            if pool is not None:
                pool.close(WeightsError("these weights are closed"))
        self.store.stop()
        threads = [thread for thread in self._threads if thread.is_alive()]
        for thread in threads:
            thread.join(_END_S)
        if not any(thread.is_alive() for thread in threads):
            self.store.close()

    def _thread(
        self, name: str, pool: BufferPool, stream: torch.cuda.Stream | None, fill: Callable[[int, PoolBuffer], object]
    ) -> threading.Thread:
        """Make a thread that calls ``fill`` for each layer of the order, cyclically, with a free buffer of ``pool``."""

        def run() -> None:
            for layer in cycle(self._order):
                fill(layer, pool.fill(layer))
                pool.filled(layer)

        return pool.thread(name, run, stream)

    def _fetch(self, layer: int, buffer: PoolBuffer) -> None:
        start_s = time.perf_counter()
        self._bring(layer, buffer)
        self.fetch_s += time.perf_counter() - start_s - self.late_since(layer, start_s)
        self.num_layers += 1
        self.num_bytes += self.store.stored[layer].num_bytes

    def _bring(self, layer: int, buffer: PoolBuffer) -> None:
        plain, stored = self._plain[layer], self.store.stored[layer]
        if self.read_pool is None:
            target = buffer.memory[: stored.num_bytes]
            source = self.store.read(layer, target, self._moved)
            if source.data_ptr() != target.data_ptr():
                target.copy_(source)
            return
        self.read_pool.use(layer, math.inf)  # no timeout here: the waiting pass has one
        source = self._arrived.pop(layer)
        if stored.is_plain:
            buffer.memory[: stored.num_bytes].copy_(source, non_blocking=True)
        else:
            if self._decoded_from is not None:
                source = self._decoded_from[: stored.num_bytes].copy_(source, non_blocking=True)
            stored.decode(source, plain, buffer.memory)
        if self._stream is not None and self._copies:
            copied: Any = self._stream.record_event()
            if self.store.has_memory:  # never overwritten: the next copy is queued while this one runs
                copied, self._copied = self._copied, copied
            if copied is not None:
                copied.synchronize()  # the next read must not overwrite a buffer that is still being copied
        self.read_pool.release(layer)

    def _read_ahead(self, layer: int, buffer: PoolBuffer) -> None:
        memory = buffer.memory[: self.store.stored[layer].num_bytes]
        self._arrived[layer] = self.store.read(layer, memory, self._moved)
