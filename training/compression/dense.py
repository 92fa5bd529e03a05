"""Gradient compressors that send every element: exact in float32, or encoded by two codecs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from tightwire.comm.all_reduce.base import BaseAllReduce
from tightwire.comm.all_reduce.flash import FlashAllReduce, flash_bytes
from tightwire.comm.all_reduce.one_shot import OneShotAllReduce
from tightwire.comm.all_reduce.two_shot import TwoShotAllReduce, two_shot_bytes
from tightwire.comm.codec.codec import parse_codec
from tightwire.comm.group.group import Group
from tightwire.training.config.compression import DenseOptions, QuantizedOptions
from tightwire.training.engine.flat_parameters import ShardLayout


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

    def shard(self, name: str) -> ShardLayout:
        if name not in self.shards:
            raise ValueError(f"no flat parameter {name!r}; there are {', '.join(self.shards)}")
        return self.shards[name]


FLOAT32_BYTES = 4


def exact_all_reduce(group: Group) -> BaseAllReduce:
    """The exact all-reduce that sends the fewest bytes: one-shot for two ranks, two-shot for more."""
    return OneShotAllReduce(group) if group.world_size == 2 else TwoShotAllReduce(group)


def dense_bytes(rank: int, world_size: int, num_elems: int) -> int:
    """Bytes that ``exact_all_reduce`` sends for ``num_elems`` float32 values: 2 (n-1)/n of them, rounded to slices."""
    return two_shot_bytes(rank, world_size, num_elems, FLOAT32_BYTES)


def quantized_bytes(rank: int, world_size: int, num_elems: int, options: QuantizedOptions) -> int:
    codecs = parse_codec(options.reduce_codec), parse_codec(options.gather_codec)
    return flash_bytes(rank, world_size, num_elems, FLOAT32_BYTES, *codecs)


class AllReduceCompressor:
    """Sums every element with one AllReduce. Stateless."""

    def __init__(self, name: str, all_reduce: BaseAllReduce) -> None:
        self.name, self._all_reduce = name, all_reduce

    def __call__(self, name: str, sum_N: Tensor) -> Tensor:
        return self._all_reduce(sum_N)

    def step_done(self) -> None:
        pass

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state:
            raise ValueError(
                f"{self.name} has no state, got {', '.join(state)}; the checkpoint was written with another compressor"
            )


def make_dense(replicas: Replicas, _: DenseOptions) -> AllReduceCompressor:
    """Exact: float32, in node order, so every rank gets the same bits. Sends 2 (n-1)/n of the shard, for n nodes."""
    return AllReduceCompressor("dense", exact_all_reduce(replicas.group))


def make_quantized(replicas: Replicas, options: QuantizedOptions) -> AllReduceCompressor:
    """Encode slices, exchange, decode and add in float32, encode the sum of the own slice, gather, decode.

    qgZ (ZeRO++, arXiv 2306.10209) stops after the reduce-scatter, because with ``zero3`` only one rank updates each slice. With
    ``hybrid`` every node updates its own copy, so the sums are gathered again: twice the bytes and a second rounding. All nodes
    decode the same bytes. Errors are not fed back, because codecs round to nearest. Cost: ``flash_bytes``.
    """
    name = f"quantized:{options.reduce_codec},{options.gather_codec}"
    codecs = parse_codec(options.reduce_codec), parse_codec(options.gather_codec)
    return AllReduceCompressor(name, FlashAllReduce(replicas.group, *codecs, name=name))
