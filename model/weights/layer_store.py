"""Stores of packed layers: the base classes, the store in host memory, and a bandwidth limit."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from tightwire.comm.protocols import Moved
from tightwire.model.weights.packed_layer import PackedLayer, PackedModel

NEVER = (0.0, 0.0)

# Size of the token bucket, in seconds: a real link keeps transferring while the waiting thread oversleeps.
_BURST_S = 0.004


class LayerStore:
    """Provides one rank's packed layers. One thread reads them cyclically, in the order of the layers.

    By default nothing waits for other ranks and nothing must be closed.
    """

    name: str  # in messages, such as ``host memory`` or a file
    has_memory = False  # ``read`` returns the store's own memory, and ``into`` may be empty
    device = torch.device("cpu")  # of the bytes that ``read`` returns

    def packed(self, layer: int) -> PackedLayer:
        """Return the form in which ``read`` returns the layer."""
        raise NotImplementedError

    def read(self, layer: int, into: Tensor, moved: Moved) -> Tensor:
        """Return the packed layer: the filled ``into``, or memory of the store that is valid until the next ``read``.

        Args:
            into: (packed bytes,) uint8 on ``device``, page-aligned.
        Raises:
            WeightsError: the layer cannot be read, or is damaged.
            CommError: a rank that keeps a part of it is missing.
        """
        raise NotImplementedError

    def others_late(self, layer: int) -> tuple[float, float]:
        """Return start and end (perf_counter; inf during it) of the last ``read``'s wait for other ranks to begin theirs."""
        return NEVER

    def stop(self) -> None:
        """Interrupt, from another thread, a ``read`` that waits for other ranks."""

    def close(self) -> None:
        """Free files and memory. May be called twice."""


class LayerFiles(LayerStore):
    """A ``LayerStore`` over files, from which all weights of a rank are loaded, in any order.

    Every read raises ModelError or WeightsError if it fails.
    """

    model: PackedModel  # the forms of the rank's tensors

    def packed(self, layer: int) -> PackedLayer:
        return self.model.stored[layer]

    def read_outer(self, device: torch.device, moved: Moved) -> Tensor:
        """Return the outer tensors, packed, on ``device``."""
        raise NotImplementedError

    def read_plain(self, layer: int, device: torch.device, moved: Moved) -> Tensor:
        """Return the layer on ``device`` in its plain form."""
        raise NotImplementedError


class HostStore(LayerStore):
    """``LayerStore`` in this process's memory; nothing is copied."""

    name = "host memory"
    has_memory = True

    def __init__(self, stored: Sequence[PackedLayer], layers: dict[int, Tensor]) -> None:
        """``layers``: the streamed layers by number."""
        self._stored, self._layers = stored, layers

    def packed(self, layer: int) -> PackedLayer:
        return self._stored[layer]

    def read(self, layer: int, into: Tensor, moved: Moved) -> Tensor:
        moved(self._layers[layer].nbytes)
        return self._layers[layer]

    def close(self) -> None:
        self._layers.clear()


class ThrottledStore(LayerStore):
    """Limits another store's rate with a token bucket, for experiments with slow sources."""

    def __init__(self, store: LayerStore, bytes_per_s: float) -> None:
        self._store, self._bytes_per_s = store, bytes_per_s
        self.has_memory, self.device = store.has_memory, store.device
        self.name = f"{store.name} at {bytes_per_s / 1e6:g} MB/s"
        self.packed, self.others_late = store.packed, store.others_late
        self.stop, self.close = store.stop, store.close
        self._free_at_s = 0.0  # when the emulated link finishes all requested bytes

    def read(self, layer: int, into: Tensor, moved: Moved) -> Tensor:
        begin_s = max(self._free_at_s, time.perf_counter() - _BURST_S)
        self._free_at_s = begin_s + self._store.packed(layer).num_bytes / self._bytes_per_s
        result = self._store.read(layer, into, moved)
        while (left_s := self._free_at_s - time.perf_counter()) > 0:
            time.sleep(min(left_s, 0.1))
            moved(0)
        return result
