"""Exact sum over nodes: float32, in node order, so every rank gets the same bits."""

from collections.abc import Mapping

from torch import Tensor

from tightwire.comm.all_reduce.base import BaseAllReduce
from tightwire.comm.all_reduce.one_shot import OneShotAllReduce
from tightwire.comm.all_reduce.two_shot import TwoShotAllReduce, two_shot_bytes
from tightwire.comm.group.group import Group
from tightwire.training.between.replicas import Replicas
from tightwire.training.config.between import DenseOptions

FLOAT32_BYTES = 4


def exact_all_reduce(group: Group) -> BaseAllReduce:
    """The exact all-reduce that sends the fewest bytes: one-shot for two ranks, two-shot for more."""
    return OneShotAllReduce(group) if group.world_size == 2 else TwoShotAllReduce(group)


def dense_bytes(rank: int, world_size: int, num_elems: int) -> int:
    """Bytes that ``exact_all_reduce`` sends for ``num_elems`` float32 values: 2 (n-1)/n of them, rounded to slices."""
    return two_shot_bytes(rank, world_size, num_elems, FLOAT32_BYTES)


class DenseBetween:
    """The stateless slot. Cost: sends 2 (n-1)/n of the shard in float32, for n nodes."""

    name = "dense"

    def __init__(self, replicas: Replicas, _: DenseOptions) -> None:
        self._replicas = replicas
        self._all_reduce = exact_all_reduce(replicas.group)

    def __call__(self, unit: str, sum_N: Tensor) -> Tensor:
        return self._all_reduce(sum_N)

    def step_done(self) -> None:
        pass

    def wire_bytes(self, unit: str) -> int:
        group = self._replicas.group
        return dense_bytes(group.rank, group.world_size, self._replicas.shard(unit).num_elems)

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state:
            raise ValueError(f"the dense slot keeps nothing, got {', '.join(state)}; the checkpoint had another slot")
