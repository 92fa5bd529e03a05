"""Finds the AllReduces that a caller's kernel can run between its own steps, without returning to Python."""

from tightwire.comm.all_reduce.by_size import SizedAllReduce
from tightwire.comm.all_reduce.one_shot import OneShotAllReduce
from tightwire.comm.protocols import AllReduce, KernelSums


def kernel_sums(all_reduce: AllReduce, num_elems: int, elem_bytes: int) -> KernelSums | None:
    """Return the sums in a kernel that equal ``all_reduce`` at this size, bits and bytes; None: not available.

    All one-shots of a group share one object.
    """
    while isinstance(all_reduce, SizedAllReduce):
        all_reduce = all_reduce.choose(num_elems, elem_bytes)
    return all_reduce.in_kernel if isinstance(all_reduce, OneShotAllReduce) else None
