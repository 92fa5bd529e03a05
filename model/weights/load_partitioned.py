"""Loads weights of which each rank keeps a part, in one of two ways.

``files``: every node has the files, and its ranks read what they keep. Where parts cannot be read by themselves (a checkpoint's
tensors; checksums) each rank reads all of the layers and drops the rest.

``first-touch``: all ranks of all nodes together read everything once, and send each other what each keeps. Images that have
parts are read in units; the others whole, by the ranks in turn, so that encoding is shared out as well.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tightwire.comm.buffers import page_aligned
from tightwire.comm.codec.codec import parse_codec
from tightwire.comm.collectives.collectives import all_gather_into, prepare_codecs
from tightwire.comm.group.partition_groups import PartitionPeers
from tightwire.comm.ledger.ledger import GATHERING, LOADING
from tightwire.model.weights.image import Image, layer_on_device
from tightwire.model.weights.image_reader import ImageReader
from tightwire.model.weights.load_streamed import start_streaming
from tightwire.model.weights.partition_cut import Cut
from tightwire.model.weights.partitioned import Kept, PartitionStore
from tightwire.model.weights.residency import FILES, FIRST_TOUCH, WeightPlan
from tightwire.model.weights.source import LayerWeights, OuterWeights
from tightwire.model.weights.streamed import StreamedWeights
from tightwire.model.weights.weight_codecs import WEIGHT_CODECS

_OUTER = -1  # among the layers


class _Item(NamedTuple):
    """What is loaded as one: a layer, or what stands before and after them."""

    layer: int
    image: Image
    in_units: bool


def load_partitioned(
    reader: ImageReader,
    plan: WeightPlan,
    peers: PartitionPeers,
    *,
    device: torch.device,
    timeout_s: float,
    progress: Callable[[float], None] = lambda fraction: None,
) -> StreamedWeights:
    """Load what stays on ``device``, and this rank's part of each streamed layer to where ``peers.inside`` meets.

    Collective over all ranks that hold this shard. The reader is closed; ``peers`` are closed with the weights.

    Args:
        plan: with layers to stream, and the origin ``files`` or ``first-touch``.
        timeout_s: longest that not one byte of a streamed layer may come once all ranks gather it.
    Raises:
        CommError: a rank is missing.
        ModelError, WeightsError: something cannot be read.
    """
    codec = parse_codec(WEIGHT_CODECS[plan.codec])
    prepare_codecs(device, codec)  # or others would wait in a collective for this one's compiler
    peers.count_as(LOADING)
    loading = _Loading(reader, plan, peers, device, progress)
    try:
        loading.load()
        store = PartitionStore(reader.stored, reader.plain, loading.kept, peers, codec)
        assert loading.outer is not None
        peers.meet()  # a gather has a deadline, and those that still read are not late
        peers.count_as(GATHERING)
        return start_streaming(loading.outer, loading.resident, store, reader.plain, plan, device, timeout_s)
    except BaseException:
        peers.close()
        raise
    finally:
        reader.close()


class _Loading:
    def __init__(
        self,
        reader: ImageReader,
        plan: WeightPlan,
        peers: PartitionPeers,
        device: torch.device,
        progress: Callable[[float], None],
    ) -> None:
        self._reader, self._plan, self._peers, self._device = reader, plan, peers, device
        self._progress, self._items = progress, _items(reader, plan)
        self.outer: OuterWeights | None = None
        self.resident: dict[int, LayerWeights] = {}
        self.kept: dict[int, Kept] = {}
        self._num_done = 0

    def load(self) -> None:
        wholes = [item for item in self._items if not item.in_units]
        if self._plan.origin == FILES:
            for item in wholes:
                self._keep(item, self._read(item))
        else:
            self._load_in_turns(wholes)
        self._load_in_units([item for item in self._items if item.in_units])

    def _load_in_turns(self, items: Sequence[_Item]) -> None:
        at = self._peers.at
        for start in range(0, len(items), at.num_ranks):
            turn = items[start : start + at.num_ranks]
            own = self._read(turn[at.index]) if at.index < len(turn) else None
            self._peers.meet()
            for index, item in enumerate(turn):
                if index == at.index and own is not None:
                    whole = own.to(self._peers.inside.device)
                else:
                    whole = page_aligned(item.image.num_bytes, self._peers.inside.device)
                self._keep(item, self._peers.share(whole, index))

    def _load_in_units(self, items: Sequence[_Item]) -> None:
        first_touch, at = self._plan.origin == FIRST_TOUCH, self._peers.at
        for item in items:
            kept = self._empty(item)
            cut, start = kept.cut, at.place * kept.cut.part_bytes
            units = range(at.node, at.node + 1) if first_touch else range(at.num_nodes)
            offset, size = units.start * cut.unit_bytes, len(units) * cut.unit_bytes
            self._read_to(item, start + offset, kept.part[offset : offset + size])
            self._read_to(item, cut.tail_start, kept.tail)
            self._done()
        if not first_touch or not items:
            return
        self._peers.meet()
        across = self._peers.across
        for item in items:
            part = self.kept[item.layer].part
            unit = part.view(at.num_nodes, -1)[at.node] if part.numel() else part
            self._peers.run(across, all_gather_into, across, unit, part)

    def _read(self, item: _Item) -> Tensor:
        if item.layer == _OUTER:
            return self._reader.read_outer(lambda num_bytes: None)
        return self._reader.read_layer(item.layer, lambda num_bytes: None)

    def _read_to(self, item: _Item, start: int, target: Tensor) -> None:
        parts = self._reader.parts
        assert parts is not None, "only then are there units"
        if target.device.type == "cpu":
            parts.read_part(item.layer, start, target, lambda num_bytes: None)
        else:
            host = torch.empty(target.shape, dtype=torch.uint8)
            parts.read_part(item.layer, start, host, lambda num_bytes: None)
            target.copy_(host)

    def _keep(self, item: _Item, whole: Tensor) -> None:
        """Put a whole image to its use: what stays onto the device, of what streams this rank's part aside."""
        if item.layer == _OUTER:
            self.outer = OuterWeights.of(item.image.tensors(whole.to(self._device)))
        elif item.layer in self._plan.streamed:
            kept = self._empty(item)
            start = self._peers.at.place * kept.cut.part_bytes
            kept.part.copy_(whole[start : start + kept.cut.part_bytes])
            kept.tail.copy_(whole[kept.cut.tail_start :])
        else:
            plain = self._reader.plain[item.layer]
            self.resident[item.layer] = layer_on_device(item.image, plain, whole, self._device)
        self._done()

    def _empty(self, item: _Item) -> Kept:
        at, device = self._peers.at, self._peers.inside.device
        cut = Cut(item.image.num_bytes, at.num_nodes, at.per_node)
        pinned = device.type == "cpu" and self._device.type == "cuda"
        kept = self.kept[item.layer] = Kept(cut, page_aligned(cut.kept_bytes, device, pinned=pinned))
        return kept

    def _done(self) -> None:
        self._num_done += 1
        self._progress(self._num_done / len(self._items))


def _items(reader: ImageReader, plan: WeightPlan) -> list[_Item]:
    layers = [
        _Item(layer, image, reader.parts is not None and layer in plan.streamed)
        for layer, image in enumerate(reader.stored)
    ]
    return [_Item(_OUTER, reader.outer, False), *layers]
