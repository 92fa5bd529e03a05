"""Which rank this process is. The only reader of RANK, WORLD_SIZE and LOCAL_RANK in the project.

Knows numbers only: no sockets, no devices. Ranks never come from a device count, because several ranks may share one
device and one rank may have none.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Topology:
    """``rank`` of ``world_size``; ``local_rank`` counts the ranks of this host and picks the device."""

    rank: int
    world_size: int
    local_rank: int = -1  # -1: all ranks are on this host, so it is the rank itself

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {self.world_size}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be 0 to {self.world_size - 1}, got {self.rank}")
        if self.local_rank == -1:
            object.__setattr__(self, "local_rank", self.rank)
        if not 0 <= self.local_rank <= self.rank:
            raise ValueError(f"local_rank must be 0 to the rank ({self.rank}), got {self.local_rank}")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Topology":
        """What torchrun (or any launcher that sets the same variables) says this process is; alone when it says nothing.

        Raises:
            ValueError: only one of RANK and WORLD_SIZE is set, or a variable is not a number in range.
        """
        if "RANK" not in environment and "WORLD_SIZE" not in environment:
            return cls(0, 1)
        rank, world_size = _read(environment, "RANK"), _read(environment, "WORLD_SIZE")
        local_rank = _read(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else -1
        return cls(rank, world_size, local_rank)


def _read(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name)
    if text is None:
        raise ValueError(f"{name} is not set; torchrun sets RANK and WORLD_SIZE together, set both or neither")
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, got {text!r}") from None
