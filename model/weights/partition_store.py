"""Stores a part of each layer on each rank of a node, and gathers a layer each time it is used (hpZ).

An encoded layer is sent encoded (qwZ). All ranks of a group fetch the same layers in the same order, because they all
run every pass, even with nothing to do. Source: ZeRO++ (arXiv 2306.10209), ZeRO-Inference (arXiv 2206.01861).
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from tightwire.comm.codec.codec import Codec
from tightwire.comm.collectives.all_gather import all_gather_into
from tightwire.comm.group.nodes import PartitionPeers
from tightwire.comm.ledger.ledger import GATHERING
from tightwire.comm.protocols import Moved
from tightwire.model.weights.packed_layer import NEVER, LayerStore, PackedModel

LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class PartitionCut:
    """A packed layer of M bytes cut for R ranks: R equal parts of whole cache lines, and a tail that every rank keeps.

    The tail is shorter than R cache lines. A rank sends M (R-1)/R bytes in every pass, except for the tail.
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
        return self.part_bytes + self.num_bytes - self.tail_start

    @property
    def pass_bytes(self) -> int:
        """Bytes that each rank sends to the others per gather."""
        return (self.num_ranks - 1) * self.part_bytes


class PartitionStore(LayerStore):
    """``LayerStore`` that gathers the parts that the ranks of a node keep."""

    def __init__(self, model: PackedModel, kept: Mapping[int, Tensor], peers: PartitionPeers, codec: Codec) -> None:
        """Take of each streamed layer this rank's part and then the tail (uint8).

        ``peers`` are closed with the store; ``codec`` is that of ``model.stored``.
        """
        self.stored, self._plain, self._kept = model.stored, model.plain, dict(kept)
        self._peers, self._codec, self.stop = peers, codec, peers.close
        self.name = f"the parts that ranks {', '.join(map(str, peers.at.inside))} keep"
        self.device, self.has_memory = peers.inside.device, peers.inside.world_size == 1
        self._late: dict[int, tuple[float, float]] = {}

    def read(self, layer: int, into: Tensor, moved: Moved) -> Tensor:
        kept, inside = self._kept[layer], self._peers.inside
        if self.has_memory:
            moved(kept.nbytes)
            return kept
        cut, exact = (PartitionCut(form[layer].num_bytes, inside.world_size) for form in (self.stored, self._plain))
        part, tail = kept[: cut.part_bytes], kept[cut.part_bytes :]
        self._await_others(layer)
        moved(0)  # the transfer starts now
        given = inside, part, into[: cut.tail_start], self._codec, exact.pass_bytes, moved
        all_gather_into(*given, phase=GATHERING, site="weights")
        into[cut.tail_start :].copy_(tail)
        moved(tail.nbytes)
        return into

    def others_late(self, layer: int) -> tuple[float, float]:
        return self._late.get(layer, NEVER)

    def _await_others(self, layer: int) -> None:
        """Wait until all ranks are ready to gather; not on CUDA, where the delay stays unknown."""
        if self.device.type == "cuda":
            return
        start_s = time.perf_counter()
        self._late[layer] = start_s, math.inf
        self._peers.inside.transport.barrier()
        self._late[layer] = start_s, time.perf_counter()

    def close(self) -> None:
        self._peers.close()
        self._kept.clear()
