"""Shards of weights: gathered in rank order, into the memory that was given."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import run_in_process
from torch import Tensor

from tightwire.comm.codec.codec import parse_codec
from tightwire.comm.collectives.gather_shards import gather_over_nodes, gather_shards
from tightwire.comm.group.group import Group, NodeGroups

_SHARD_ELEMS = 256


class _Watched:
    """A transport that only gathers into what it is given, and remembers where that was."""

    def __init__(self, transport: Any, places: list[int]) -> None:
        self._transport, self._places = transport, places

    @property
    def bytes_sent(self) -> int:
        return self._transport.bytes_sent

    @property
    def world_size(self) -> int:
        return self._transport.world_size

    @property
    def rank(self) -> int:
        return self._transport.rank

    def gather_into(self, buf: Tensor, out: Tensor) -> None:
        self._places.append(out.data_ptr())
        self._transport.gather_into(buf, out)


def _watch(group: Group, places: list[int]) -> Group:
    transport: Any = _Watched(group.transport, places)
    if group.nodes is None:
        return replace(group, transport=transport)
    inside, across = _watch(group.nodes.inside, places), _watch(group.nodes.across, places)
    return replace(group, transport=transport, nodes=NodeGroups(inside=inside, across=across))


def _gather(group: Group, name: str) -> tuple[Tensor, list[str]]:
    """What comes, and through which memory."""
    codec, places = parse_codec(name), []
    own_S = torch.arange(_SHARD_ELEMS).float() + 1000 * group.rank
    wire = own_S.view(torch.uint8) if codec.exact else codec.encode(own_S)
    out_N = torch.zeros(group.world_size * _SHARD_ELEMS)
    room = torch.empty(group.world_size * wire.numel(), dtype=torch.uint8)
    gather = gather_shards if group.nodes is None else gather_over_nodes
    gather(_watch(group, places), wire, codec, out_N, room)
    memory = {"room": room, "out": out_N}
    return out_N, [name for place in places for name, tensor in memory.items() if _is_in(place, tensor)]


def _is_in(place: int, tensor: Tensor) -> bool:
    return tensor.data_ptr() <= place < tensor.data_ptr() + tensor.nbytes


@pytest.mark.parametrize(
    ("name", "num_nodes", "places"),
    [("none", 1, ["out"]), ("int8", 1, ["room"]), ("none", 2, ["room", "room"]), ("int8", 2, ["room", "room"])],
)
def test_shards_come_in_rank_order_through_no_other_memory(name: str, num_nodes: int, places: list[str]) -> None:
    codec, wants = parse_codec(name), []
    for rank in range(4):
        own_S = torch.arange(_SHARD_ELEMS).float() + 1000 * rank
        wants.append(own_S if codec.exact else codec.decode(codec.encode(own_S), _SHARD_ELEMS, torch.float32))

    for out_N, through in run_in_process(4, _gather, name, num_nodes=num_nodes):
        assert torch.equal(out_N, torch.cat(wants))
        assert through == places
