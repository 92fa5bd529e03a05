"""Layers of which each rank keeps a part: put together from all of a node's ranks before they are used, pass after pass.

A node has each image once, and not once per rank. Parts are of the image as stored, so what was encoded travels encoded (qwZ),
and is decoded by whoever uses it. Source: ZeRO++ (arXiv 2306.10209), ZeRO-Inference (arXiv 2206.01861).

All ranks of a group fetch the same layers in the same order: they run the same passes, with something to compute or without.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tightwire.comm.codec.codec import Codec
from tightwire.comm.collectives.collectives import all_gather_into
from tightwire.comm.group.partition_groups import PartitionPeers
from tightwire.model.weights.image import Image
from tightwire.model.weights.layer_store import NEVER, Moved
from tightwire.model.weights.partition_cut import Cut


@dataclass(frozen=True, slots=True)
class Kept:
    """What a rank keeps of an image. ``whole`` (kept bytes,) uint8: its part, then the tail."""

    cut: Cut
    whole: Tensor

    @property
    def part(self) -> Tensor:
        return self.whole[: self.cut.part_bytes]

    @property
    def tail(self) -> Tensor:
        return self.whole[self.cut.part_bytes :]


class PartitionStore:
    """``LayerStore`` over what the ranks of a node keep."""

    def __init__(
        self,
        images: Sequence[Image],
        plain: Sequence[Image],
        layers: Mapping[int, Kept],
        peers: PartitionPeers,
        codec: Codec,
    ) -> None:
        """
        Args:
            images: as stored; ``plain``: not encoded. Of every layer.
            layers: what this rank keeps of the streamed ones, by their number.
            peers: closed with the store.
            codec: what the images went through.
        """
        self._images, self._layers, self._peers, self._codec = images, dict(layers), peers, codec
        self._late: dict[int, tuple[float, float]] = {}
        at = peers.at
        self._exact_bytes = {
            layer: Cut(plain[layer].num_bytes, at.num_nodes, at.per_node).pass_bytes for layer in self._layers
        }

    @property
    def name(self) -> str:
        return f"what ranks {', '.join(map(str, self._peers.at.inside))} keep of it"

    @property
    def device(self) -> torch.device:
        return self._peers.inside.device

    @property
    def has_memory(self) -> bool:
        return self._peers.inside.world_size == 1

    def image(self, layer: int) -> Image:
        return self._images[layer]

    def read(self, layer: int, into: Tensor, moved: Moved) -> Tensor:
        kept, inside = self._layers[layer], self._peers.inside
        if self.has_memory:
            moved(kept.whole.nbytes)
            return kept.whole
        start, exact_bytes = kept.cut.tail_start, self._exact_bytes[layer]
        self._await_others(layer)
        moved(0)  # from here on the bytes are on their way
        self._peers.run(inside, all_gather_into, inside, kept.part, into[:start], self._codec, exact_bytes, moved)
        into[start:].copy_(kept.tail)
        moved(kept.tail.nbytes)
        return into

    def others_late(self, layer: int) -> tuple[float, float]:
        return self._late.get(layer, NEVER)

    def _await_others(self, layer: int) -> None:
        """Until all are there to gather. On CUDA nobody waits for them on the host, and so nobody knows."""
        if self.device.type == "cuda":
            return
        start_s = time.perf_counter()
        self._late[layer] = start_s, math.inf
        self._peers.run(self._peers.inside, self._peers.inside.transport.barrier)
        self._late[layer] = start_s, time.perf_counter()

    def stop(self) -> None:
        self._peers.close()

    def close(self) -> None:
        self._peers.close()
        self._layers.clear()
