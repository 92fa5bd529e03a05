"""The seam between streamed layers and where they are kept while they are not on the device."""

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tightwire.comm.protocols import Moved
from tightwire.model.checkpoint.errors import ModelError, WeightsError
from tightwire.model.weights.fill import fill
from tightwire.model.weights.fused import Fused
from tightwire.model.weights.image import Image
from tightwire.model.weights.source import CheckpointReader

NEVER = (0.0, 0.0)

# The bucket's size, in time. A wire carries on while the thread that waits for it sleeps a little too long; without this
# an emulated one would stop meanwhile, and on busy cores be up to a quarter slower than its rate.
_BURST_S = 0.004


class LayerStore(Protocol):
    """Gives one rank's layers as images. One thread reads, in the order of the layers, over and over."""

    @property
    def name(self) -> str:
        """For people, such as ``host memory`` or a file."""
        ...

    @property
    def has_memory(self) -> bool:
        """Whether ``read`` gives memory of its own, and ``into`` may be of no bytes."""
        ...

    def image(self, layer: int) -> Image:
        """How this layer comes."""
        ...

    @property
    def device(self) -> torch.device:
        """Where images come to: the host, or the device that computes."""
        ...

    def read(self, layer: int, into: Tensor, moved: Moved) -> Tensor:
        """The layer's image: ``into``, filled, or memory of the store's own that stays as it is until the next ``read``.

        Args:
            into: (image bytes,) uint8 on ``device``, whole pages at the address of one.
        Raises:
            WeightsError: it cannot be had, or is not what was stored.
            CommError: other ranks have parts of it, and one of them is missing.
        """
        ...

    def others_late(self, layer: int) -> tuple[float, float]:
        """From when to when the last ``read`` of the layer waited for other ranks to begin theirs (perf_counter; the end is inf
        while it does): that is their computing, and no fault of what the bytes come over."""
        ...

    def stop(self) -> None:
        """Have a ``read`` end that waits for other ranks; called by another thread, before ``close``."""
        ...

    def close(self) -> None: ...


class LocalStore:
    """What stores have in common that read to the host and wait for nobody."""

    device = torch.device("cpu")

    def others_late(self, layer: int) -> tuple[float, float]:
        return NEVER

    def stop(self) -> None:
        """A read ends by itself."""


class HostStore(LocalStore):
    """Images in this process's memory; nothing is copied."""

    has_memory = True

    def __init__(self, images: Sequence[Image], layers: dict[int, Tensor]) -> None:
        """``layers``: the streamed ones, by their number."""
        self._images, self._layers = images, layers

    @property
    def name(self) -> str:
        return "host memory"

    def image(self, layer: int) -> Image:
        return self._images[layer]

    def read(self, layer: int, into: Tensor, moved: Moved) -> Tensor:
        moved(self._layers[layer].nbytes)
        return self._layers[layer]

    def close(self) -> None:
        self._layers.clear()


class CheckpointStore(LocalStore):
    """A checkpoint as it was published: each time a layer comes, its parts are looked up, cut and converted."""

    has_memory = False

    def __init__(
        self, reader: CheckpointReader, images: Sequence[Image], layers: Mapping[int, Mapping[str, Fused]]
    ) -> None:
        """``images``: plain. ``layers``: what the streamed ones are made of."""
        self._reader, self._images, self._layers = reader, images, layers

    @property
    def name(self) -> str:
        return "the checkpoint's files"

    def image(self, layer: int) -> Image:
        return self._images[layer]

    def read(self, layer: int, into: Tensor, moved: Moved) -> Tensor:
        try:
            fill(self._reader, self._layers[layer], self._images[layer].tensors(into), moved)
        except ModelError as error:
            raise WeightsError(f"layer {layer} cannot be read: {error}") from None
        return into

    def close(self) -> None:
        """The reader is the checkpoint's."""


class ThrottledStore:
    """Another store made slow, by a token bucket: bytes come at a rate, after a pause some of them at once.

    For trying what a slow source does.
    """

    def __init__(self, store: LayerStore, bytes_per_s: float) -> None:
        self._store, self._bytes_per_s = store, bytes_per_s
        self.has_memory = store.has_memory
        self._free_at_s = 0.0  # when the emulated wire has carried all that was asked of it

    @property
    def name(self) -> str:
        return f"{self._store.name} at {self._bytes_per_s / 1e6:g} MB/s"

    def image(self, layer: int) -> Image:
        return self._store.image(layer)

    @property
    def device(self) -> torch.device:
        return self._store.device

    def read(self, layer: int, into: Tensor, moved: Moved) -> Tensor:
        begin_s = max(self._free_at_s, time.perf_counter() - _BURST_S)
        self._free_at_s = begin_s + self._store.image(layer).num_bytes / self._bytes_per_s
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
