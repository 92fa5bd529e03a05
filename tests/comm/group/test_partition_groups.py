"""Who shares weights with whom, what joins, and who is blamed."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tightwire.comm.collectives.collectives import all_gather
from tightwire.comm.errors import PeerLostError
from tightwire.comm.group.partition_groups import PartitionPeers, PartitionPlace, in_process_partition
from tightwire.comm.group.topology import Topology


def place(tp: int, rank: int, world_size: int, num_nodes: int) -> PartitionPlace:
    return PartitionPlace(tp, Topology(rank, world_size, num_nodes=num_nodes))


@pytest.mark.parametrize(
    ("tp", "world_size", "num_nodes"), [(1, 2, 1), (2, 4, 1), (2, 8, 2), (1, 6, 3), (3, 12, 2), (1, 4, 4)]
)
def test_each_rank_shares_with_those_of_its_shard(tp: int, world_size: int, num_nodes: int) -> None:
    places = [place(tp, rank, world_size, num_nodes) for rank in range(world_size)]
    for rank, at in enumerate(places):
        of_shard = [places[other].index for other in range(rank % tp, world_size, tp)]
        assert sorted(of_shard) == list(range(at.num_ranks))
        assert at.inside[at.place] == rank
        assert at.across[at.node] == rank
        assert {places[other].node for other in at.inside} == {at.node}
        assert {places[other].node for other in at.across} == set(range(num_nodes))
        assert {places[other].place for other in at.across} == {at.place}


def test_replicas_that_nodes_would_cut_are_refused() -> None:
    with pytest.raises(ValueError, match="each node's 3 ranks must be whole replicas"):
        place(2, 0, 6, 2)
    with pytest.raises(ValueError, match="5 ranks are not whole replicas of --tp 2"):
        place(2, 0, 5, 1)


def test_what_one_has_all_of_its_shard_get() -> None:
    world = in_process_partition(2, 8, 2)

    def run(peers: PartitionPeers) -> list[int]:
        got = []
        for index in range(peers.at.num_ranks):
            peers.meet()
            own = torch.tensor([peers.at.topology.rank if index == peers.at.index else -1])
            got.append(int(peers.share(own, index)))
        return got

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(run, world))
    assert results == 4 * [[0, 4, 2, 6], [1, 5, 3, 7]]  # place by place, and of a place node by node
    for peers in world:
        assert peers.across.bytes_sent == 8  # each is the source once, to the one other node


def test_the_missing_rank_is_named_as_the_world_numbers_it() -> None:
    world = in_process_partition(2, 8, 2)
    world[7].close()
    for rank, where in ((5, "inside nodes, where ranks 5, 7"), (3, "across nodes, where ranks 3, 7")):
        peers = world[rank]
        leg = peers.inside if rank == 5 else peers.across
        with pytest.raises(PeerLostError, match=f"rank {rank} is without rank 7 of 8, .* {where}") as caught:
            peers.run(leg, all_gather, leg, torch.ones(1))
        assert caught.value.ranks == (7,)
