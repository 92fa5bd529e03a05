"""Whence a rank's images come when they are loaded: a checkpoint's tensors, or a prepared folder's file."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tightwire.comm.buffers import page_aligned
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.layout import Shard
from tightwire.model.weights.fill import fill
from tightwire.model.weights.formats import WeightFormats
from tightwire.model.weights.fused import layer_tensors, outer_tensors
from tightwire.model.weights.image import Image, make_image
from tightwire.model.weights.layer_store import Moved
from tightwire.model.weights.prepared.folder import Prepared
from tightwire.model.weights.residency import WeightPlan, layer_images
from tightwire.model.weights.source import CheckpointReader

_CPU = torch.device("cpu")


class PartReader(Protocol):
    """Parts of a layer's stored image, without the rest."""

    def read_part(self, layer: int, start: int, into: Tensor, moved: Moved) -> None:
        """The bytes from ``start`` on, as many as ``into`` (N,) uint8 has.

        Raises:
            WeightsError: they cannot be had.
        """
        ...


class ImageReader(Protocol):
    """One shard's images. ``stored``: each layer as ``read_layer`` gives it; ``plain``: as it is computed with."""

    @property
    def outer(self) -> Image: ...

    @property
    def plain(self) -> Sequence[Image]: ...

    @property
    def stored(self) -> Sequence[Image]: ...

    @property
    def parts(self) -> PartReader | None:
        """None where a layer's image can only be had whole."""
        ...

    def read_outer(self, moved: Moved) -> Tensor:
        """(image bytes,) uint8 on the host, whole pages at the address of one.

        Raises:
            ModelError, WeightsError: it cannot be had.
        """
        ...

    def read_layer(self, layer: int, moved: Moved) -> Tensor:
        """The same, as stored."""
        ...

    def close(self) -> None: ...


class CheckpointImages:
    """Made of a checkpoint's tensors. What streams is encoded when it is read; what stays is plain."""

    parts = None  # tensors are read by rows, and a codec's bytes of a layer are of all of its rows

    def __init__(
        self,
        reader: CheckpointReader,
        config: LlamaConfig,
        shard: Shard,
        plan: WeightPlan,
        dtype: torch.dtype,
        formats: WeightFormats,
    ) -> None:
        self._reader = reader
        self._outer = outer_tensors(config, shard)
        self._layers = [layer_tensors(config, shard, layer) for layer in range(config.num_layers)]
        self.outer = make_image(self._outer, formats, dtype)
        self.plain = layer_images(config, shard, formats, dtype)
        encoded = layer_images(config, shard, formats, dtype, plan.codec)
        self.stored = [
            encoded[layer] if layer in plan.streamed else self.plain[layer] for layer in range(config.num_layers)
        ]

    def read_outer(self, moved: Moved) -> Tensor:
        buffer = page_aligned(self.outer.num_bytes, _CPU)
        fill(self._reader, self._outer, self.outer.tensors(buffer), moved)
        return buffer

    def read_layer(self, layer: int, moved: Moved) -> Tensor:
        plain, stored = self.plain[layer], self.stored[layer]
        buffer = page_aligned(plain.num_bytes, _CPU)
        fill(self._reader, self._layers[layer], plain.tensors(buffer), moved)
        if stored.is_plain:
            return buffer
        encoded = page_aligned(stored.num_bytes, _CPU)
        stored.encode(plain, buffer, encoded)
        return encoded

    def close(self) -> None:
        """The reader is the checkpoint's."""


class PreparedImages:
    """A prepared folder's, as they lie in one rank's file. A checksum is of a whole image, so who verifies reads no parts."""

    def __init__(self, prepared: Prepared, rank: int, plan: WeightPlan) -> None:
        images = prepared.images(rank)
        self.outer, self.plain, self.stored = images.outer, images.plain, images.stored
        self._prepared, self._rank, self._verify = prepared, rank, plan.verify
        self._store = prepared.store(rank, plan.io, verify=plan.verify)
        self.parts = None if plan.verify else self._store

    def read_outer(self, moved: Moved) -> Tensor:
        return self._prepared.read_outer(self._rank, verify=self._verify, moved=moved)

    def read_layer(self, layer: int, moved: Moved) -> Tensor:
        return self._store.read(layer, page_aligned(self.stored[layer].num_bytes, _CPU), moved)

    def close(self) -> None:
        self._store.close()
