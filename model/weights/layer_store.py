"""Stores of streamed layers: the protocol, and stores in host memory, in a checkpoint, and slowed down."""

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tightwire.comm.protocols import Moved
from tightwire.model.checkpoint.errors import ModelError, WeightsError
from tightwire.model.checkpoint.reader import CheckpointReader
from tightwire.model.weights.fused import Fused, read_tensors
from tightwire.model.weights.packed_layer import PackedLayer

NEVER = (0.0, 0.0)

# The bucket's size, in time. A real wire carries on while the thread that waits for it oversleeps; without this allowance
# an emulated one would stop meanwhile, and on busy cores be up to a quarter slower than its rate.
_BURST_S = 0.004


class LayerStore(Protocol):
    """Provides one rank's packed layers. One thread reads, in the order of the layers, over and over."""

    @property
    def name(self) -> str:
        """For messages, such as ``host memory`` or a file."""
        ...

    @property
    def has_memory(self) -> bool:
        """True when ``read`` returns memory of its own; ``into`` may then be empty."""
        ...

    def packed(self, layer: int) -> PackedLayer:
        """The layer's form in ``read``."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of the bytes that ``read`` returns: the host, or the one that computes."""
        ...

    def read(self, layer: int, into: Tensor, moved: Moved) -> Tensor:
        """The packed layer: ``into``, filled, or memory of the store's own that does not change until the next ``read``.

        Args:
            into: (packed bytes,) uint8 on ``device``, page-aligned.
        Raises:
            WeightsError: it cannot be read, or is damaged.
            CommError: a rank that keeps a part of it is missing.
        """
        ...

    def others_late(self, layer: int) -> tuple[float, float]:
        """Start and end (perf_counter) of the last ``read``'s wait for other ranks to begin theirs; the end is inf meanwhile.

        During that time they compute, and the source of the bytes is not slow.
        """
        ...

    def stop(self) -> None:
        """End a ``read`` that waits for other ranks; called by another thread, before ``close``."""
        ...

    def close(self) -> None: ...


class LocalStore:
    """Base of stores that read to the host and do not wait for other ranks."""

    device = torch.device("cpu")

    def others_late(self, layer: int) -> tuple[float, float]:
        return NEVER

    def stop(self) -> None:
        """No read waits for other ranks."""


class HostStore(LocalStore):
    """Layers in this process's memory; nothing is copied."""

    has_memory = True

    def __init__(self, stored: Sequence[PackedLayer], layers: dict[int, Tensor]) -> None:
        """``layers``: the streamed ones, by number."""
        self._stored, self._layers = stored, layers

    @property
    def name(self) -> str:
        return "host memory"

    def packed(self, layer: int) -> PackedLayer:
        return self._stored[layer]

    def read(self, layer: int, into: Tensor, moved: Moved) -> Tensor:
        moved(self._layers[layer].nbytes)
        return self._layers[layer]

    def close(self) -> None:
        self._layers.clear()


class CheckpointStore(LocalStore):
    """A checkpoint as published: each time a layer is read, its tensors are found, cut and converted."""

    has_memory = False

    def __init__(
        self, reader: CheckpointReader, plain: Sequence[PackedLayer], layers: Mapping[int, Mapping[str, Fused]]
    ) -> None:
        """``layers``: the tensors of the streamed ones."""
        self._reader, self._plain, self._layers = reader, plain, layers

    @property
    def name(self) -> str:
        return "the checkpoint's files"

    def packed(self, layer: int) -> PackedLayer:
        return self._plain[layer]

    def read(self, layer: int, into: Tensor, moved: Moved) -> Tensor:
        try:
            read_tensors(self._reader, self._layers[layer], self._plain[layer].tensors(into), moved)
        except ModelError as error:
            raise WeightsError(f"layer {layer} cannot be read: {error}") from None
        return into

    def close(self) -> None:
        """The reader belongs to the checkpoint."""


class ThrottledStore:
    """Slows another store down to a rate with a token bucket, for experiments with slow sources."""

    def __init__(self, store: LayerStore, bytes_per_s: float) -> None:
        self._store, self._bytes_per_s = store, bytes_per_s
        self.has_memory = store.has_memory
        self._free_at_s = 0.0  # when the emulated wire has carried everything requested

    @property
    def name(self) -> str:
        return f"{self._store.name} at {self._bytes_per_s / 1e6:g} MB/s"

    def packed(self, layer: int) -> PackedLayer:
        return self._store.packed(layer)

    @property
    def device(self) -> torch.device:
        return self._store.device

    def read(self, layer: int, into: Tensor, moved: Moved) -> Tensor:
        begin_s = max(self._free_at_s, time.perf_counter() - _BURST_S)
        self._free_at_s = begin_s + self._store.packed(layer).num_bytes / self._bytes_per_s
        result = self._store.read(layer, into, moved)
        while (left_s := self._free_at_s - time.perf_counter()) > 0:
            time.sleep(min(left_s, 0.1))
            moved(0)
        return result

    def others_late(self, layer: int) -> tuple[float, float]:
        return self._store.others_late(layer)

    def stop(self) -> None:
        self._store.stop()

    def close(self) -> None:
        self._store.close()
