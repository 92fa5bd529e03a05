"""Packed layers, all tensors of a layer in one contiguous buffer, which is moved as a whole, and stores of them.

A plain packed layer has the tensors as the kernels read them. An encoded one has each matrix of plain numbers in a
codec's smaller form, and must be decoded before use.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from tightwire.comm.codec.codec import Codec, parse_codec
from tightwire.comm.protocols import Moved
from tightwire.kernels.spec.gguf_blocks import PackedFormat
from tightwire.kernels.spec.packed import PackedMatrix, StackedMatrix, Weight
from tightwire.large_file import PAGE_BYTES
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.layout import Shard
from tightwire.model.weights import WEIGHT_CODECS
from tightwire.model.weights.formats import Fused, WeightFormats, layer_tensors, outer_tensors

_ALIGNMENT_BYTES = 64  # a cache line, and enough for every kernel

_PLAIN = parse_codec("none")


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor's bytes in a packed layer."""

    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    formats: tuple[tuple[int, PackedFormat], ...]  # of rows that follow each other; none: plain numbers
    codec: Codec

    def of(self, buffer: Tensor) -> Tensor:
        """Return this tensor as a view of ``buffer``."""
        return buffer[self.offset : self.offset + self.num_bytes]


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """The places of a layer's tensors, by their fields in ``LayerWeights`` (or ``OuterWeights``)."""

    places: Mapping[str, Place]
    dtype: torch.dtype  # of plain numbers
    num_bytes: int  # whole pages, as direct reads of a file of layers require
    held: Mapping[str, Weight] = field(default_factory=dict)  # further tensors, which lie in memory of others

    @property
    def is_plain(self) -> bool:
        return all(place.codec.exact for place in self.places.values())

    def tensors(self, buffer: Tensor) -> dict[str, Any]:
        """Return views of the tensors in a buffer for this layer, and those ``held``; ValueError if it is encoded."""
        if not self.is_plain:
            raise ValueError("an encoded layer has no tensors; decode it first")
        return {**self.held, **{name: self._view(place, buffer) for name, place in self.places.items()}}

    def encode(self, plain: "PackedLayer", source: Tensor, out: Tensor) -> None:
        """Encode ``source``, in the form ``plain``, to ``out`` in this form. Bytes between tensors become 0."""
        out[: self.num_bytes].zero_()
        for place, whole, own in self._pairs(plain, source, out):
            if place.codec.exact:
                own.copy_(whole)
            else:
                place.codec.encode(whole.view(self.dtype), own)

    def decode(self, source: Tensor, plain: "PackedLayer", out: Tensor) -> None:
        """Decode ``source``, in this form, to ``out`` in the form ``plain``. Allocates nothing."""
        for place, whole, own in self._pairs(plain, out, source):
            if place.codec.exact:
                whole.copy_(own)
            else:
                place.codec.decode(own, prod(place.shape), self.dtype, whole.view(self.dtype))

    def _pairs(self, plain: "PackedLayer", whole: Tensor, own: Tensor) -> Iterator[tuple[Place, Tensor, Tensor]]:
        """Yield each tensor's place in this form, its plain bytes (of ``whole``) and its bytes in this form."""
        for name, place in self.places.items():
            yield place, plain.places[name].of(whole), place.of(own)

    def _view(self, place: Place, buffer: Tensor) -> Weight:
        own = place.of(buffer)
        if place.formats:
            pieces = own.split([rows * packed.row_bytes(place.shape[1]) for rows, packed in place.formats])
            both = zip(pieces, place.formats, strict=True)
            parts = [PackedMatrix(piece.view(rows, -1), packed) for piece, (rows, packed) in both]
            return parts[0] if len(parts) == 1 else StackedMatrix(tuple(parts))
        return own.view(self.dtype).view(place.shape)


@dataclass(frozen=True, slots=True)
class PackedModel:
    """The packed layers of all tensors of one rank."""

    outer: PackedLayer  # the tensors before and after the layers
    plain: tuple[PackedLayer, ...]  # each layer, as the kernels read it
    stored: tuple[PackedLayer, ...]  # each layer, as it is stored off the device

    @property
    def blobs(self) -> tuple[PackedLayer, ...]:
        """All packed layers in the order of a prepared folder's files."""
        return self.outer, *self.stored


def pack_model(
    config: LlamaConfig, shard: Shard, formats: WeightFormats, dtype: torch.dtype, codec: Codec = _PLAIN
) -> PackedModel:
    """Return one rank's packed layers, with layers stored through ``codec``; outer tensors, which are read once, are not."""
    layers = [layer_tensors(config, shard, index) for index in range(config.num_layers)]
    plain = tuple(pack_tensors(tensors, formats, dtype) for tensors in layers)
    stored = plain if codec.exact else tuple(pack_tensors(tensors, formats, dtype, codec) for tensors in layers)
    return PackedModel(pack_tensors(outer_tensors(config, shard), formats, dtype), plain, stored)


def pack_tensors(
    tensors: Mapping[str, Fused], formats: WeightFormats, dtype: torch.dtype, codec: Codec = _PLAIN
) -> PackedLayer:
    """Assign places to ``tensors``. The codec applies to matrices of plain numbers."""
    places: dict[str, Place] = {}
    offset = 0
    for name, fused in tensors.items():
        packed = formats.of(fused)
        own = codec if not packed and fused.columns is not None else _PLAIN
        num_bytes = formats.num_bytes(fused, dtype.itemsize)
        if not own.exact:
            num_bytes = own.wire_bytes(prod(fused.shape), dtype.itemsize)
        places[name] = Place(offset, num_bytes, fused.shape, packed, own)
        offset += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return PackedLayer(places, dtype, -(-offset // PAGE_BYTES) * PAGE_BYTES)


def weight_codec(name: str) -> Codec:
    """Return the codec for a value of ``--weight-codec``."""
    return parse_codec(WEIGHT_CODECS[name])


NEVER = (0.0, 0.0)

# Size of the token bucket, in seconds: a real link keeps transferring while the waiting thread oversleeps.
_BURST_S = 0.004


class LayerStore(ABC):
    """Provides one rank's packed layers. One thread reads them cyclically, in the order of the layers.

    By default nothing waits for other ranks and nothing must be closed.
    """

    name: str  # in messages, such as ``host memory`` or a file
    stored: Sequence[PackedLayer]  # the form in which ``read`` returns each layer
    has_memory = False  # ``read`` returns the store's own memory, and ``into`` may be empty
    device = torch.device("cpu")  # of the bytes that ``read`` returns

    @abstractmethod
    def read(self, layer: int, into: Tensor, moved: Moved) -> Tensor:
        """Return the packed layer: the filled ``into``, or memory of the store that is valid until the next ``read``.

        ``into``: (packed bytes,) uint8 on ``device``, page-aligned. Raises WeightsError: the layer cannot be read, or
        is damaged; CommError: a rank that keeps a part of it is missing.
        """

    def others_late(self, layer: int) -> tuple[float, float]:
        """Return start and end (perf_counter; inf during it) of the last ``read``'s wait for other ranks to begin theirs."""
        return NEVER

    def stop(self) -> None:
        """Interrupt, from another thread, a ``read`` that waits for other ranks."""

    def close(self) -> None:
        """Free files and memory. May be called twice."""


class LayerFiles(LayerStore):
    """A ``LayerStore`` over files, read in any order; a read that fails raises ModelError or WeightsError."""

    def __init__(self, model: PackedModel) -> None:
        """``model``: the forms of the rank's tensors."""
        self.model, self.stored = model, model.stored

    @abstractmethod
    def read_outer(self, device: torch.device, moved: Moved) -> Tensor:
        """Return the outer tensors, packed, on ``device``."""

    @abstractmethod
    def read_plain(self, layer: int, device: torch.device, moved: Moved) -> Tensor:
        """Return the layer on ``device`` in its plain form."""


class HostStore(LayerStore):
    """``LayerStore`` in this process's memory; nothing is copied."""

    name = "host memory"
    has_memory = True

    def __init__(self, stored: Sequence[PackedLayer], layers: dict[int, Tensor]) -> None:
        """``layers``: the streamed layers by number."""
        self.stored, self._layers, self.close = stored, layers, layers.clear

    def read(self, layer: int, into: Tensor, moved: Moved) -> Tensor:
        moved(self._layers[layer].nbytes)
        return self._layers[layer]


class ThrottledStore(LayerStore):
    """Limits another store's rate with a token bucket, for experiments with slow sources."""

    def __init__(self, store: LayerStore, bytes_per_s: float) -> None:
        self._store, self._bytes_per_s = store, bytes_per_s
        self.stored, self.has_memory, self.device = store.stored, store.has_memory, store.device
        self.name = f"{store.name} at {bytes_per_s / 1e6:g} MB/s"
        self.others_late, self.stop, self.close = store.others_late, store.stop, store.close
        self._free_at_s = 0.0  # when the emulated link finishes all requested bytes

    def read(self, layer: int, into: Tensor, moved: Moved) -> Tensor:
        begin_s = max(self._free_at_s, time.perf_counter() - _BURST_S)
        self._free_at_s = begin_s + self.stored[layer].num_bytes / self._bytes_per_s
        result = self._store.read(layer, into, moved)
        while (left_s := self._free_at_s - time.perf_counter()) > 0:
            time.sleep(min(left_s, 0.1))
            moved(0)
        return result
