"""Streams the weights of models larger than the device: some layers are resident, the others share a few buffers.

A layer is fetched while the one before is computed, so a pass takes the longer of the two times, not their sum.
Source: ZeRO-Inference (arXiv 2206.01861; deepspeed.ai, 2022).
"""

import math
import time
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import NamedTuple

import torch

from tightwire.comm.buffers import PoolBuffer
from tightwire.model.checkpoint.errors import WeightsError
from tightwire.model.weights.layer_fetcher import NUM_BUFFERS, LayerFetcher
from tightwire.model.weights.layer_store import LayerStore
from tightwire.model.weights.packed_layer import PackedLayer
from tightwire.model.weights.source import LayerWeights, OuterWeights, WeightSource


class Flow(NamedTuple):
    """Streamed layers and bytes since the start, and the time for them."""

    num_layers: int
    num_bytes: int  # in stored form
    fetch_s: float  # time of the fetching thread; on CUDA until the copies were queued
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
        """
        Args:
            store: the store of the layers that are not in ``resident``, at least three.
            plain: the plain form of each layer.
            timeout_s: longest time that a pass waits for a layer without receiving a byte.
        """
        self.outer = outer
        self._resident, self._timeout_s = resident, timeout_s
        self._order = [layer for layer in range(len(plain)) if layer not in resident]
        if len(self._order) <= NUM_BUFFERS:
            raise ValueError(
                f"the {NUM_BUFFERS} buffers hold all {len(self._order)} streamed layers; keep them resident"
            )
        self.spans = _spans(len(plain), resident)
        self.fetcher = LayerFetcher(store, plain, self._order, device)
        self.store, self.pool = store, self.fetcher.pool
        self._layers = {
            (layer, buffer.number): LayerWeights.of(plain[layer].tensors(buffer.memory))
            for layer in self._order
            for buffer in self.pool.buffers
        }
        self._users: dict[int, tuple[int, int]] = {}  # layer in use -> number of passes, buffer
        self._turn = cycle(self._order)
        self._waited_s = self._late_s = 0.0

    def start(self) -> None:
        self.fetcher.start()

    def layer(self, index: int) -> LayerWeights:
        if index in self._resident:
            return self._resident[index]
        count, number = self._users.get(index) or (0, self._take(index))
        self._users[index] = count + 1, number
        return self._layers[index, number]

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
    def is_full(self) -> bool:
        return self.fetcher.is_full

    @property
    def pass_bytes(self) -> int:
        """Stored bytes streamed in every pass."""
        return sum(self.store.packed(layer).num_bytes for layer in self._order)

    @property
    def layers_per_pass(self) -> int:
        return len(self._order)

    def flow(self) -> Flow:
        fetcher = self.fetcher
        return Flow(fetcher.num_layers, fetcher.num_bytes, fetcher.fetch_s, self._waited_s, self._late_s)

    def close(self) -> None:
        """Stop the threads; layers in use stay valid. May be called twice."""
        self.fetcher.close()

    def _take(self, index: int) -> int:
        if (due := next(self._turn)) != index:
            raise RuntimeError(f"streamed layers must be requested in order: expected {due}, got {index}")
        start_s = time.perf_counter()
        buffer = self._use(index)
        late_s = self.fetcher.late_since(index, start_s)
        self._late_s += late_s
        self._waited_s += time.perf_counter() - start_s - late_s
        return buffer.number

    def _use(self, index: int) -> PoolBuffer:
        while True:
            try:
                return self.pool.use(index, self._timeout_s)
            except TimeoutError as error:
                # Other ranks may compute for any length of time: the transport has a deadline.
                if self.store.others_late(index)[1] < math.inf:
                    raise WeightsError(f"layer {index} did not arrive from {self.store.name}: {error}") from None


def _spans(num_layers: int, resident: Mapping[int, LayerWeights]) -> tuple[range, ...]:
    """Return spans of consecutive resident layers, and a span of one for each streamed layer."""
    spans: list[range] = []
    for layer in range(num_layers):
        if spans and layer in resident and layer - 1 in resident:
            spans[-1] = range(spans[-1].start, layer + 1)
        else:
            spans.append(range(layer, layer + 1))
    return tuple(spans)
