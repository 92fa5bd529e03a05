"""The AllReduce of the library, gloo or NCCL: the baseline for the others."""

from dataclasses import replace

from torch import Tensor

from tightwire.comm.all_reduce.names import NAMES
from tightwire.comm.all_reduce.ring import RingAllReduce, ring_work
from tightwire.comm.codec.codec import Carried


class NativeAllReduce(RingAllReduce):
    """Calls the library.

    Cost: counted as a ring's 2 (N-1)/N * M bytes, rounded down to whole elements; the library does not report its
    bytes. Exactness: sums in the tensor's dtype, in an order of the library's choice. Gloo's ring gives all ranks the
    same bits, but with three or more ranks the order of an element's sum depends on its place and on the tensor's size.
    """

    name = "native"

    def _reduce(self, x_N: Tensor, carried: Carried) -> Tensor:
        return self._transport.all_reduce(x_N)

    def wire_bytes(self, num_elems: int, elem_bytes: int) -> int:
        return 2 * (self.world_size - 1) * num_elems // self.world_size * elem_bytes


ENTRY = replace(
    NAMES["native"],
    make=NativeAllReduce,
    work=ring_work,
    depends_on_place=True,
    rounds="library",
    neighbours_only=True,
    preference=4,
)
