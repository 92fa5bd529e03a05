"""Quantized sum over nodes: a reduce-scatter through one codec, then a gather through another.

qgZ (ZeRO++, arXiv 2306.10209) stops after the reduce-scatter, because with sharding ``zero3`` only one rank updates
each slice (``comm.collectives.node_wise``). With sharding ``hybrid`` every node updates its own copy of the shard, so
the summed slices are gathered again: twice the bytes and a second rounding. All nodes, the owner of a slice included,
decode the same bytes, so the copies stay equal.
"""

from collections.abc import Mapping

from torch import Tensor

from tightwire.comm.all_reduce.flash import FlashAllReduce, flash_bytes
from tightwire.comm.codec.codec import Codec, parse_codec
from tightwire.training.between.dense import FLOAT32_BYTES
from tightwire.training.between.replicas import Replicas
from tightwire.training.config.between import QuantizedOptions


def codecs_of(options: QuantizedOptions) -> tuple[Codec, Codec]:
    """The reduce codec and the gather codec.

    Raises:
        ValueError: a codec does not exist.
    """
    return parse_codec(options.reduce_codec), parse_codec(options.gather_codec)


def quantized_bytes(rank: int, world_size: int, num_elems: int, options: QuantizedOptions) -> int:
    return flash_bytes(rank, world_size, num_elems, FLOAT32_BYTES, *codecs_of(options))


class QuantizedBetween:
    """Encode slices, exchange, decode and add in float32, encode the sum of the own slice, gather, decode.

    Stateless: rounding errors are not fed back, because codecs round to nearest and so add no bias over steps.
    Cost: ``flash_bytes``, about (n-1)/n (r + g)/8 bytes an element for codecs of r and g bits.
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
