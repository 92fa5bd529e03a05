"""Weights of models larger than the device: some layers stay, the others pass through a few buffers, one after the other.

``LayerFetcher`` always fetches the next streamed layer; after the last of a pass it goes on with the first of the next. So a
layer is on its way while the one before is computed, and a pass takes the longer of the two, not their sum. Source:
ZeRO-Inference (arXiv 2206.01861; deepspeed.ai, 2022).
"""

import math
import time
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import NamedTuple

import torch

from tightwire.comm.buffers import BufferPool, Slot
from tightwire.model.checkpoint.errors import WeightsError
from tightwire.model.weights.layer_fetcher import NUM_BUFFERS, LayerFetcher
from tightwire.model.weights.layer_store import LayerStore
from tightwire.model.weights.packed_layer import PackedLayer
from tightwire.model.weights.source import LayerWeights, OuterWeights


class Flow(NamedTuple):
    """What was streamed since the start, and the time it took."""

    num_layers: int
    num_bytes: int  # as stored
    fetch_s: float  # of the fetching thread; on CUDA until the copies were queued
    waited_s: float  # of passes, for layers
    late_s: float  # of passes, until other ranks gathered the layer too; not part of the other times


class StreamedWeights:
    """``WeightSource`` with ``resident`` layers and ``NUM_BUFFERS`` others on the device.

    It knows which passes use which buffer, and how long they waited.
    """

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
            store: of the layers that are not in ``resident``.
            plain: of each layer.
            timeout_s: longest time without a byte while a pass waits for a layer.
        Raises:
            ValueError: the buffers would hold all streamed layers.
        """
        self.outer = outer
        self._resident, self._timeout_s = resident, timeout_s
        self._order = [layer for layer in range(len(plain)) if layer not in resident]
        if len(self._order) <= NUM_BUFFERS:
            raise ValueError(
                f"{NUM_BUFFERS} buffers hold all of {len(self._order)} streamed layers; keep them resident"
            )
        self.spans = _spans(len(plain), resident)
        self.fetcher = LayerFetcher(store, plain, self._order, device)
        self._layers = {
            (layer, slot.number): LayerWeights(**plain[layer].tensors(slot.buffer))  # pyright: ignore[reportArgumentType]
            for layer in self._order
            for slot in self.pool.slots
        }
        self._users: dict[int, tuple[int, int]] = {}  # by layer in use: the number of passes, and the buffer
        self._turn = cycle(self._order)
        self._waited_s = self._late_s = 0.0

    def start(self) -> None:
        """Begin to fetch; ``layer`` waits until then."""
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
    def pool(self) -> BufferPool:
        return self.fetcher.pool

    @property
    def store(self) -> LayerStore:
        """The source of streamed layers."""
        return self.fetcher.store

    @property
    def is_full(self) -> bool:
        """True when all buffers hold their layers: nothing is fetched until one is released."""
        return self.fetcher.is_full

    @property
    def pass_bytes(self) -> int:
        """Stored bytes that every pass streams."""
        return sum(self.store.packed(layer).num_bytes for layer in self._order)

    @property
    def layers_per_pass(self) -> int:
        return len(self._order)

    def flow(self) -> Flow:
        fetcher = self.fetcher
        return Flow(fetcher.num_layers, fetcher.num_bytes, fetcher.fetch_s, self._waited_s, self._late_s)

    def close(self) -> None:
        """End the threads; layers in use stay valid. May be called twice."""
        self.fetcher.close()

    def _take(self, index: int) -> int:
        if (due := next(self._turn)) != index:
            raise RuntimeError(f"streamed layers come in order: {due} is next, and {index} was asked for")
        start_s = time.perf_counter()
        slot = self._use(index)
        late_s = self.fetcher.late_since(index, start_s)
        self._late_s += late_s
        self._waited_s += time.perf_counter() - start_s - late_s
        return slot.number

    def _use(self, index: int) -> Slot:
        while True:
            try:
                return self.pool.use(index, self._timeout_s)
            except TimeoutError as error:
                # Other ranks may compute for any time: the transport has a deadline, and the server watches them.
                if self.store.others_late(index)[1] < math.inf:
                    raise WeightsError(f"layer {index} does not come from {self.store.name}: {error}") from None


def _spans(num_layers: int, resident: Mapping[int, LayerWeights]) -> tuple[range, ...]:
    """Resident neighbours together, each streamed layer by itself."""
    spans: list[range] = []
    for layer in range(num_layers):
        if spans and layer in resident and layer - 1 in resident:
            spans[-1] = range(spans[-1].start, layer + 1)
        else:
            spans.append(range(layer, layer + 1))
    return tuple(spans)
