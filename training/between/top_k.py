"""Top-k with error feedback: each node's largest numbers, for any optimizer.

A number that is not sent waits in the residual and goes with later ones, as many steps' sum at once. To an optimizer that
divides by a running root of squares, as Adam does, a sum over T steps that comes once in T looks sqrt(T) times as large
as the mean, so its steps are up to sqrt(1 / (1 - s)) times smaller than dense ones: take a lower sparsity, or a higher rate.
Before a momentum (SGD's) it lacks the correction of ``dgc``.
Source: sparsified SGD with memory, arXiv 1809.07599.
"""

from torch import Tensor

from tightwire.training.between.sparse import SparseBetween
from tightwire.training.engine.units import Piece


class TopKBetween(SparseBetween):
    """v <- v + g; send the largest of v; v <- v - what was sent."""

    name = "top-k"

    def _direction(self, unit: str, piece: Piece, mean: Tensor) -> Tensor:
        return mean

    def _sent(self, unit: str, indices_K: Tensor) -> None:
        pass  # there is no momentum to forget
