"""Deep gradient compression (DGC): each node accumulates momentum locally and sends the largest accumulated values.

Each node computes, with g the mean gradient of its ranks, m the momentum, d the weight decay and w the weights:

    g <- clip(g) + d w                  local clipping (8) and weight decay (12)
    u <- m u + g                        momentum correction (7); with Nesterov, v below gets g + m u
    v <- v + u
    send the largest of v; v <- v - what was sent; u <- 0 where sent        momentum factor masking (9)
    result: the sum of what all nodes sent, divided by the number of nodes; the optimizer is plain SGD without momentum

Numbers in parentheses are equations of the article on DGC in Paddle. Gradients are means over a node, not divided by
the number of nodes N (equation 12), so the decay term is d w and not d/N w, which would lose precision.

Steps before the warm-up, and small parameters always, use momentum SGD on the exact sum. Its bits equal those of
``torch.optim.SGD(momentum, weight_decay, nesterov)`` if N and the ranks per node are powers of two. When compression
starts, its velocity continues as u on every node.

Masking clears the momentum of every element sent, so a low sparsity leaves little momentum; sparsity 0 is SGD without
it.

Source: arXiv 1712.01887.
"""

from torch import Tensor

from tightwire.training.between.replicas import Replicas
from tightwire.training.between.sparse import SparseBetween
from tightwire.training.config.between import DgcOptions
from tightwire.training.engine.units import Piece


class DgcBetween(SparseBetween):
    """State: ``velocity/UNIT`` holds u, ``residual/UNIT`` holds v."""

    name = "dgc"

    def __init__(self, replicas: Replicas, options: DgcOptions) -> None:
        if options.weight_decay and replicas.weights is None:
            raise ValueError("weight decay is part of the local gradient in DGC, so the slot needs the weights")
        super().__init__(replicas, options)
        self._dgc = options
        self._velocities = self._zeros()

    def _direction(self, unit: str, piece: Piece, mean: Tensor) -> Tensor:
        dgc, weights = self._dgc, self._replicas.weights
        if dgc.weight_decay and piece.decays and weights is not None:
            mean.add_(weights(unit)[piece.place], alpha=dgc.weight_decay)
        velocity = self._velocities[unit][piece.place]
        velocity.mul_(dgc.momentum).add_(mean)
        return mean.add_(velocity, alpha=dgc.momentum) if dgc.nesterov else velocity

    def _sent(self, unit: str, indices_K: Tensor) -> None:
        if self._dgc.mask_momentum:
            self._velocities[unit][indices_K] = 0.0

    def _kept(self) -> dict[str, Tensor]:
        velocities = {f"velocity/{unit}": velocity_N for unit, velocity_N in self._velocities.items()}
        return {**super()._kept(), **velocities}
