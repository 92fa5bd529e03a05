"""Stores a part of each layer on each rank of a node, and gathers a layer each time it is used (hpZ).

A node keeps each layer once instead of once per rank. An encoded layer is sent encoded (qwZ), and each rank decodes it.
Nodes do not communicate. Source: ZeRO++ (arXiv 2306.10209), ZeRO-Inference (arXiv 2206.01861).

All ranks of a group fetch the same layers in the same order, because they all run every pass, even with nothing to do.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tightwire.comm.codec.codec import Codec
from tightwire.comm.collectives.collectives import all_gather_into
from tightwire.comm.group.partition_groups import PartitionPeers
from tightwire.comm.ledger.ledger import GATHERING
from tightwire.comm.protocols import Moved
from tightwire.model.weights.layer_store import NEVER
from tightwire.model.weights.packed_layer import PackedLayer

LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class PartitionCut:
    """A packed layer of M bytes cut for R ranks: R equal parts of whole cache lines, and a tail that every rank keeps.

    The tail is shorter than R cache lines. All messages of a layer have the same size without padding. In every pass
    each rank sends R-1 parts: M (R-1)/R bytes, except for the tail.
    """

    num_bytes: int
    num_ranks: int

    @property
    def part_bytes(self) -> int:
        return self.num_bytes // (self.num_ranks * LINE_BYTES) * LINE_BYTES

    @property
    def tail_start(self) -> int:
        return self.num_ranks * self.part_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes that each rank keeps."""
        return self.part_bytes + self.num_bytes - self.tail_start

    @property
    def pass_bytes(self) -> int:
        """Bytes that each rank sends to the others per gather."""
        return (self.num_ranks - 1) * self.part_bytes


@dataclass(frozen=True, slots=True)
class Kept:
    """One rank's bytes of a layer. ``whole`` (kept bytes,) uint8: its part, then the tail."""

    cut: PartitionCut
    whole: Tensor

    @property
    def part(self) -> Tensor:
        return self.whole[: self.cut.part_bytes]

    @property
    def tail(self) -> Tensor:
        return self.whole[self.cut.part_bytes :]


class PartitionStore:
    """``LayerStore`` that gathers the parts that the ranks of a node keep."""

    def __init__(
        self,
        stored: Sequence[PackedLayer],
        plain: Sequence[PackedLayer],
        layers: Mapping[int, Kept],
        peers: PartitionPeers,
        codec: Codec,
    ) -> None:
        """
        Args:
            stored, plain: the forms of every layer of the model.
            layers: this rank's bytes of each streamed layer.
            peers: closed with the store.
            codec: the codec of ``stored``.
        """
        self._stored, self._layers, self._peers, self._codec = stored, dict(layers), peers, codec
        self._late: dict[int, tuple[float, float]] = {}
        self._exact_bytes = {
            layer: PartitionCut(plain[layer].num_bytes, peers.at.per_node).pass_bytes for layer in self._layers
        }

    @property
    def name(self) -> str:
        return f"the parts that ranks {', '.join(map(str, self._peers.at.inside))} keep"

    @property
    def device(self) -> torch.device:
        return self._peers.inside.device

    @property
    def has_memory(self) -> bool:
        return self._peers.inside.world_size == 1

    def packed(self, layer: int) -> PackedLayer:
        return self._stored[layer]

    def read(self, layer: int, into: Tensor, moved: Moved) -> Tensor:
        kept, inside = self._layers[layer], self._peers.inside
        if self.has_memory:
            moved(kept.whole.nbytes)
            return kept.whole
        start, exact_bytes = kept.cut.tail_start, self._exact_bytes[layer]
        self._await_others(layer)
        moved(0)  # the transfer starts now
        all_gather = partial(all_gather_into, phase=GATHERING, site="weights")
        self._peers.run(all_gather, inside, kept.part, into[:start], self._codec, exact_bytes, moved)
        into[start:].copy_(kept.tail)
        moved(kept.tail.nbytes)
        return into

    def others_late(self, layer: int) -> tuple[float, float]:
        return self._late.get(layer, NEVER)

    def _await_others(self, layer: int) -> None:
        """Wait until all ranks are ready to gather. On CUDA the host does not wait, so the delay is unknown there."""
        if self.device.type == "cuda":
            return
        start_s = time.perf_counter()
        self._late[layer] = start_s, math.inf
        self._peers.run(self._peers.inside.transport.barrier)
        self._late[layer] = start_s, time.perf_counter()

    def stop(self) -> None:
        self._peers.close()

    def close(self) -> None:
        self._peers.close()
        self._layers.clear()
