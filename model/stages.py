"""Stages: which layers of the model each host computes, for prompts (hybrid) or all rows (pipeline). Imports no torch.

docs/layouts.md has the pictures. With N stages, chunk c of the prompts passes stage s in step c + s: a replica's ranks of stage s
compute its layers, and the first of them sends the hidden states to the first of stage s + 1.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import msgspec

# Keys and values of a chunk are in the ordinary cache of all ranks at most this many steps after it entered.
MAX_LATE_STEPS = 16


class StagePlan(msgspec.Struct, frozen=True):
    """The layers of each stage, and how many consecutive ranks compute one together."""

    layers: tuple[tuple[int, int], ...]  # of each stage: the first, and the one after the last
    pipeline: bool = False  # generated tokens pass the stages too, and a rank holds its stage alone; False: hybrid
    ranks_each: int = 1  # each has a part of every layer of its stage

    @property
    def num_stages(self) -> int:
        return len(self.layers)

    def of(self, stage: int) -> range:
        """Return the layers of ``stage``."""
        return range(*self.layers[stage])

    def stage_of(self, rank: int) -> int:
        return rank // self.ranks_each

    def ranks_of(self, stage: int) -> range:
        """Return the ranks that compute ``stage`` together."""
        return range(stage * self.ranks_each, (stage + 1) * self.ranks_each)


def divide_layers(
    layers: int | Sequence[float], shares: Sequence[float], *, last: float = 0.0, most: Sequence[int] | None = None
) -> StagePlan:
    """Divide the layers so that the stage that takes longest takes least, and no stage is empty; ValueError: impossible.

    ``layers``: their number, or the work of each. ``shares``: the stages' speeds. ``last``: work that the last stage has besides,
    such as the head's. ``most``: the layers that each stage's memory holds. On a tie the first stages have more layers.
    """
    work = [1.0] * layers if isinstance(layers, int) else layers
    num_layers, num_stages = len(work), len(shares)
    if num_stages > num_layers:
        raise ValueError(f"{num_layers} layers cannot be divided into {num_stages} stages; give --layout tensor")
    ends = [0.0, *accumulate(work)]
    # By the first layer of the last stages: the longest of them, and where they begin.
    found = {num_layers: (last / shares[-1], (num_layers,))}
    for stage in reversed(range(num_stages)):
        behind, found = found, {}
        for start in range(stage, num_layers) if stage else (0,):
            options = [
                (max((ends[stop] - ends[start] + last * (stop == num_layers)) / shares[stage], longest), -stop, cuts)
                for stop, (longest, cuts) in behind.items()
                if start < stop <= start + (num_layers if most is None else most[stage])
            ]
            if options:
                longest, _, cuts = min(options)
                found[start] = longest, (start, *cuts)
    if 0 not in found:
        raise ValueError(f"{num_layers} layers do not fit: the stages hold {', '.join(map(str, most or ()))}")
    return StagePlan(tuple(pairwise(found[0][1])))
