"""The bandwidth at which quantizing stops paying, by the cost model: below it bytes cost more than coding, above it less."""

import math

from tightwire.comm.all_reduce.entry import Setting
from tightwire.comm.link.link import Link
from tightwire.comm.policy.cost import CostModel, Points

_SLOWEST, _FASTEST = 1e4, 1e13  # bytes per second
_STEPS = 60  # of halving, in logarithms


def crossover_rate(
    setting: Setting,
    exact: str,
    lossy: str,
    num_bytes: int,
    *,
    latency_s: float = 0.0,
    computing: Points | None = None,
) -> float | None:
    """Bytes per second of a link between nodes at which both are predicted to take equally long.

    Args:
        exact, lossy: algorithms; ``num_bytes``: of the message that they sum.
        computing: what ``tightwire tune`` measured of it; seeds stand in for what is not there.
    Returns:
        None where there is no such rate: ``lossy`` pays at every one, because the transport itself is no faster, or at
        none.
    """

    def gain(rate: float) -> float:
        costs = CostModel(setting, None, Link("", rate, latency_s), computing)
        return costs.modelled_us(exact, num_bytes) - costs.modelled_us(lossy, num_bytes)

    if gain(_SLOWEST) <= 0 or gain(_FASTEST) > 0:
        return None
    low, high = _SLOWEST, _FASTEST
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gain(middle) > 0 else (low, middle)
    return math.sqrt(low * high)
