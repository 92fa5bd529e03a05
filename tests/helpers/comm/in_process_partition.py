"""Partition groups whose ranks are threads of this process."""

from datetime import timedelta

from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.group.group import Group, in_process_groups
from tightwire.comm.group.nodes import PartitionPeers, PartitionPlace, make_barrier
from tightwire.comm.group.topology import Topology
from tightwire.comm.ledger.ledger import Ledger


def in_process_partition(
    tp: int, world_size: int, num_nodes: int = 1, timeout_s: float = 30.0, await_timeout_s: float = 120.0
) -> list[PartitionPeers]:
    """Return one object per rank of the world, all in this process; give each its own thread. ``timeout_s``: of collectives."""
    places = [PartitionPlace(tp, Topology(rank, world_size, num_nodes=num_nodes)) for rank in range(world_size)]
    groups: dict[tuple[int, ...], list[Group]] = {}
    store = HashStore()
    for at in places:
        if at.inside not in groups:
            groups[at.inside] = in_process_groups(at.per_node, timeout_s, [Ledger() for _ in at.inside])
    return [
        PartitionPeers(
            at=at,
            inside=groups[at.inside][at.place],
            await_all=make_barrier(store, f"shard-{at.shard}", at, timedelta(seconds=await_timeout_s)),
        )
        for at in places
    ]
