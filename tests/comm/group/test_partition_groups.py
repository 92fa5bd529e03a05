"""The ranks that share weights, and the rank that an error names."""

import pytest
import torch
from helpers.comm.in_process_partition import in_process_partition

from tightwire.comm.collectives.collectives import all_gather
from tightwire.comm.errors import PeerLostError
from tightwire.comm.group.partition_groups import PartitionPlace
from tightwire.comm.group.topology import Topology


def place(tp: int, rank: int, world_size: int, num_nodes: int) -> PartitionPlace:
    return PartitionPlace(tp, Topology(rank, world_size, num_nodes=num_nodes))


@pytest.mark.parametrize(
    ("tp", "world_size", "num_nodes"), [(1, 2, 1), (2, 4, 1), (2, 8, 2), (1, 6, 3), (3, 12, 2), (1, 4, 4)]
)
def test_each_rank_shares_with_those_of_its_shard(tp: int, world_size: int, num_nodes: int) -> None:
    places = [place(tp, rank, world_size, num_nodes) for rank in range(world_size)]
    for rank, at in enumerate(places):
        assert len(at.inside) == at.per_node == world_size // tp // num_nodes
        assert at.inside[at.place] == rank
        assert {places[other].topology.node for other in at.inside} == {at.topology.node}
        assert {places[other].shard for other in at.inside} == {at.shard}


def test_replicas_that_nodes_would_cut_are_refused() -> None:
    with pytest.raises(ValueError, match="each node's 3 ranks must be whole replicas"):
        place(2, 0, 6, 2)
    with pytest.raises(ValueError, match="5 ranks are not whole replicas of --tp 2"):
        place(2, 0, 5, 1)


def test_the_missing_rank_is_named_as_the_world_numbers_it() -> None:
    world = in_process_partition(2, 8, 2)
    world[7].close()
    peers = world[5]
    with pytest.raises(PeerLostError, match="rank 5 lost rank 7 of 8 among .*; from here on ranks 5, 7") as caught:
        peers.run(all_gather, peers.inside, torch.ones(1))
    assert caught.value.ranks == (7,)
