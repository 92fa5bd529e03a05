"""Top-k with error feedback: sends each node's largest elements, for any optimizer.

An element that is not sent stays in the residual and is sent later as the sum of several steps. An optimizer that
divides by a running root mean square, such as Adam, sees a sum of T steps once in T steps, and its root mean square is
sqrt(T) times that of dense gradients. So at sparsity s its updates are up to sqrt(1 / (1 - s)) times smaller than dense
ones: use a lower sparsity or a higher learning rate. With a momentum optimizer it lacks the momentum correction of
``dgc``.

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
        pass  # there is no momentum to clear
