"""The rank and node of this process. The only reader of RANK, WORLD_SIZE and the LOCAL_ variables in comm."""

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Topology:
    """``rank`` of ``world_size``; ``local_rank`` counts the ranks of this host and selects the device.

    Ranks are numbered node by node, equally many on each of ``num_nodes`` nodes. A node is a set of ranks with a faster
    connection to each other than to the rest: a host, a socket, or a part of one host's ranks for testing.
    """

    rank: int
    world_size: int
    local_rank: int = -1  # -1: all ranks are on this host, so it equals the rank
    num_nodes: int = 1

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {self.world_size}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be 0 to {self.world_size - 1}, got {self.rank}")
        if self.local_rank == -1:
            object.__setattr__(self, "local_rank", self.rank)
        if not 0 <= self.local_rank <= self.rank:
            raise ValueError(f"local_rank must be 0 to the rank ({self.rank}), got {self.local_rank}")
        if not 1 <= self.num_nodes <= self.world_size or self.world_size % self.num_nodes:
            even = [str(n) for n in range(1, self.world_size + 1) if self.world_size % n == 0]
            raise ValueError(
                f"{self.world_size} ranks cannot be on {self.num_nodes} nodes, equally many on each; the number of nodes "
                f"may be {', '.join(even)}"
            )

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // self.num_nodes

    @property
    def node(self) -> int:
        return self.rank // self.ranks_per_node

    @property
    def node_rank(self) -> int:
        return self.rank % self.ranks_per_node

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Topology":
        """Read the variables of torchrun and similar launchers; a single rank when RANK and WORLD_SIZE are not set.

        LOCAL_WORLD_SIZE, when set, determines the number of nodes. Raises ValueError if only one of RANK and WORLD_SIZE
        is set, a variable is out of range, nodes have different numbers of ranks, or ranks are not numbered node by
        node.
        """
        if "RANK" not in environment and "WORLD_SIZE" not in environment:
            return cls(0, 1)
        rank, world_size = _read(environment, "RANK"), _read(environment, "WORLD_SIZE")
        local_rank = _read(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else -1
        if "LOCAL_WORLD_SIZE" not in environment:
            return cls(rank, world_size, local_rank)
        per_node = _read(environment, "LOCAL_WORLD_SIZE")
        if per_node < 1 or world_size % per_node:
            raise ValueError(
                f"this node has LOCAL_WORLD_SIZE={per_node} of {world_size} ranks, so nodes are uneven; start equally "
                "many ranks on every node"
            )
        if local_rank not in (-1, rank % per_node):
            raise ValueError(
                f"rank {rank} has LOCAL_RANK={local_rank} with {per_node} ranks on a node; ranks must be numbered node by "
                f"node, which would make it {rank % per_node}"
            )
        return cls(rank, world_size, rank % per_node, world_size // per_node)


def _read(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name)
    if text is None:
        raise ValueError(f"{name} is not set; torchrun sets RANK and WORLD_SIZE together, set both or neither")
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, got {text!r}") from None
