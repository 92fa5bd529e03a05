"""The sum over nodes through codecs: the second hop of qgZ, with the way back that a replicated shard needs.

qgZ proper (ZeRO++, arXiv 2306.10209) is a reduce-scatter: after its hop between nodes each rank has the slice that it
alone updates, and nobody else wants it (``comm.collectives.node_wise``, sharding ``zero3``). With sharding ``hybrid`` every node
updates its own copy of the shard, so here the sums of the slices are gathered again: twice the bytes, and a
second rounding. All nodes decode the same bytes, the owner of a slice too, so the copies stay equal.
"""

from collections.abc import Mapping

from torch import Tensor

from tightwire.comm.all_reduce.flash import FlashAllReduce, flash_bytes
from tightwire.comm.codec.codec import Codec, parse_codec
from tightwire.training.between.dense import FLOAT32_BYTES
from tightwire.training.between.replicas import Replicas
from tightwire.training.config.between import QuantizedOptions


def codecs_of(options: QuantizedOptions) -> tuple[Codec, Codec]:
    """
    Raises:
        ValueError: there is no such codec.
    """
    return parse_codec(options.reduce_codec), parse_codec(options.gather_codec)


def quantized_bytes(rank: int, world_size: int, num_elems: int, options: QuantizedOptions) -> int:
    return flash_bytes(rank, world_size, num_elems, FLOAT32_BYTES, *codecs_of(options))


class QuantizedBetween:
    """encode slices, exchange, decode and add in float32, encode the own slice's sum, gather, decode.

    Cost: ``flash_bytes``, about (n-1)/n (r + g)/8 bytes an element with r and g bits; nothing is kept. Rounding errors
    are not fed back: codecs round to the nearest, without a bias that steps could add up.
    """

    def __init__(self, replicas: Replicas, options: QuantizedOptions) -> None:
        self.name = f"quantized:{options.reduce_codec},{options.gather_codec}"
        self._replicas, self._options = replicas, options
        self._all_reduce = FlashAllReduce(replicas.group, *codecs_of(options), name=self.name)

    def __call__(self, unit: str, sum_N: Tensor) -> Tensor:
        return self._all_reduce(sum_N)

    def step_done(self) -> None:
        pass

    def wire_bytes(self, unit: str) -> int:
        group = self._replicas.group
        return quantized_bytes(group.rank, group.world_size, self._replicas.shard(unit).num_elems, self._options)

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state:
            raise ValueError(f"{self.name} keeps nothing, got {', '.join(state)}; the checkpoint had another slot")
