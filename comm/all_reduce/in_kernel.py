"""Finds the AllReduces that a caller's kernel can run between its own steps, without returning to Python."""

from tightwire.comm.all_reduce.by_size import SizedAllReduce
from tightwire.comm.all_reduce.one_shot import OneShotAllReduce
from tightwire.comm.protocols import AllReduce, KernelSums


def kernel_sums(all_reduce: AllReduce, num_elems: int, elem_bytes: int) -> KernelSums | None:
    """What makes the sums of ``all_reduce`` for messages of this size, the same bits and bytes; None: only it can.

    One object for all the one-shots of a group.
    """
    while isinstance(all_reduce, SizedAllReduce):
        all_reduce = all_reduce.choose(num_elems, elem_bytes)
    return all_reduce.in_kernel if isinstance(all_reduce, OneShotAllReduce) else None
