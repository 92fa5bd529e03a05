"""Which replica a new sequence goes to."""

from collections.abc import Sequence

# Of the larger of two loads. A replica may be that much behind the others for the sake of its prefix cache: what a cached
# prompt spares is spared once, while a sequence that is being answered slows its neighbours down for as long as it runs.
NEAR_SHARE = 0.25


def choose_replica(loads: Sequence[int], num_cached: Sequence[int]) -> int:
    """The least loaded replica, or of those whose load is near to that the one with most of the prompt in its prefix cache.

    Args:
        loads: tokens that each has to compute, as far as that is known: prompts' rest, and one for each answer under way.
        num_cached: tokens of the prompt that each need not compute.
    """
    least = min(loads)
    near = [replica for replica, load in enumerate(loads) if load - least <= NEAR_SHARE * load]
    return max(near, key=lambda replica: (num_cached[replica], -loads[replica], -replica))
