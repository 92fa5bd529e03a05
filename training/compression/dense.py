"""The gradient compressor that sends every element, and the groups that all compressors communicate over."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from tightwire.comm.all_reduce.base import BaseAllReduce
from tightwire.comm.all_reduce.one_shot import OneShotAllReduce
from tightwire.comm.all_reduce.two_shot import TwoShotAllReduce, two_shot_bytes
from tightwire.comm.group.group import Group
from tightwire.training.engine.flat_parameters import ShardLayout
from tightwire.training.engine.gradients import GradientCompressor


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """This rank's shards by flat parameter, and the groups that a compressor communicates over.

    ``group``: the ranks that hold the same shards, one of each node. ``inside``: the ranks that together hold this node's sum,
    None if that is this rank alone; only clipping needs it. ``weights``: gives a float32 shard, for weight decay.
    """

    group: Group
    shards: Mapping[str, ShardLayout]
    inside: Group | None = None
    weights: Callable[[str], Tensor] | None = None

    @property
    def gradients_per_node(self) -> int:
        """Number of ranks whose gradients are summed in a compressor's input."""
        return 1 if self.inside is None else self.inside.world_size

    @property
    def num_gradients(self) -> int:
        """Number of ranks whose gradients are summed in a compressor's result; the engine divides by it."""
        return self.group.world_size * self.gradients_per_node


FLOAT32_BYTES = 4


def exact_all_reduce(group: Group) -> BaseAllReduce:
    """The exact all-reduce that sends the fewest bytes: one-shot for two ranks, two-shot for more."""
    return OneShotAllReduce(group) if group.world_size == 2 else TwoShotAllReduce(group)


def dense_bytes(rank: int, world_size: int, num_elems: int) -> int:
    """Bytes that ``exact_all_reduce`` sends for ``num_elems`` float32 values: 2 (n-1)/n of them, rounded to slices."""
    return two_shot_bytes(rank, world_size, num_elems, FLOAT32_BYTES)


class AllReduceCompressor(GradientCompressor):
    """Sums every element with one AllReduce: exact in float32 and in rank order, or encoded by two codecs."""

    def __init__(self, all_reduce: BaseAllReduce) -> None:
        self._all_reduce = all_reduce

    def __call__(self, name: str, sum_N: Tensor) -> Tensor:
        return self._all_reduce(sum_N)
