"""The ``auto`` AllReduce without a policy: a lossless choice by size, from the cost model's seeds.

A server's ``auto`` is a policy (``comm.policy.choose``), which uses the model's messages and measurements on the host.
"""

from tightwire.comm.all_reduce.entry import Setting
from tightwire.comm.all_reduce.one_shot import OneShotAllReduce
from tightwire.comm.all_reduce.two_shot import TwoShotAllReduce
from tightwire.comm.group.group import Group
from tightwire.comm.policy.cost import CostModel, size_grid
from tightwire.comm.policy.routes import SizedAllReduce

_SMALLEST_BYTES, _LARGEST_BYTES = 1 << 10, 64 << 20
_FUSED = {"cpu": "shared-memory", "cuda": "peer-memory"}  # the transports that sum in their own kernels


class AutoAllReduce(SizedAllReduce):
    """``one-shot`` up to some size, ``two-shot`` beyond. With two ranks in shared memory always one-shot: the bytes are equal.

    Both are exact and add in rank order with one rounding, so the switch changes no bit of the result. A row's sum does
    not depend on the number of rows in its message. The ledger records the algorithm that ran, not ``auto``.
    """

    def __init__(self, group: Group) -> None:
        one_shot, two_shot = OneShotAllReduce(group), TwoShotAllReduce(group)
        limit = _last_one_shot_bytes(group)
        super().__init__([(None, one_shot)] if limit is None else [(limit, one_shot), (None, two_shot)], "auto")


def _last_one_shot_bytes(group: Group) -> int | None:
    """The largest message for which one-shot is not slower; None: any."""
    setting = Setting(
        transport="process-group" if group.transport.fused is None else _FUSED[group.device.type],
        device=group.device.type,
        world_size=group.world_size,
        num_nodes=1,
        dtype="bfloat16",  # irrelevant for algorithms that encode nothing
    )
    costs, best = CostModel(setting), 0
    for size in size_grid(_SMALLEST_BYTES, _LARGEST_BYTES):
        if costs.predict("one-shot", size).us > costs.predict("two-shot", size).us:
            return best
        best = size
    return None
