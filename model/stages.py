"""Stages: which layers of the model each host computes for prompts (hybrid). Imports no torch.

docs/layouts.md has the pictures. With N stages, chunk c of the prompts passes stage s in step c + s: rank s of a replica
computes the layers of stage s, and sends its hidden states to rank s + 1.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import msgspec


class StagePlan(msgspec.Struct, frozen=True):
    """The layers of each stage. One rank computes a stage, so a stage has the number of its rank."""

    layers: tuple[tuple[int, int], ...]  # of each stage: the first, and the one after the last

    @property
    def num_stages(self) -> int:
        return len(self.layers)

    def of(self, stage: int) -> range:
        """Return the layers of ``stage``."""
        return range(*self.layers[stage])


def divide_layers(num_layers: int, shares: Sequence[float]) -> StagePlan:
    """Divide the layers in proportion to ``shares``, one for each stage, at least one layer each; ValueError: too few layers."""
    if len(shares) > num_layers:
        raise ValueError(
            f"{num_layers} layers cannot be divided into {len(shares)} stages; give fewer --tp or --layout tensor"
        )
    ends, total = [0], sum(shares)
    for stage, share in enumerate(accumulate(shares), start=1):
        least, most = ends[-1] + 1, num_layers - (len(shares) - stage)
        ends.append(min(max(round(num_layers * share / total), least), most))
    return StagePlan(tuple(pairwise(ends)))
