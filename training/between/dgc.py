"""Deep gradient compression: the momentum is accumulated where the gradients are, and its largest sums are sent.

Of each node k, with g the mean gradient of its ranks, m the momentum, d the weight decay and w the weights:

    g <- clip(g) + d w                  local clipping (8) and weight decay (12)
    u <- m u + g                        momentum correction (7); Nesterov's adds g + m u to v below
    v <- v + u
    send the largest of v; v <- v - what was sent; u <- 0 where sent        momentum factor masking (9)
    result: the sum of what all nodes sent, over their number; the optimizer is SGD without momentum

(numbers are equations of the article on DGC in Paddle, arXiv 1712.01887 before it). Gradients are means of a node, not
divided by the number of nodes N: that is equation 12, where d w keeps its precision because it is not d/N w.

Steps before the warm-up, and small parameters always, go through momentum SGD on the exact sum, with the bits of
``torch.optim.SGD(momentum, weight_decay, nesterov)`` where N and the ranks of a node are powers of two. Its velocity goes on
as every node's u, since the mean of the nodes' u is what it is.

Masking takes the momentum of all that is sent, so at a low sparsity there is little of it: at 0 this is SGD without.
"""

from torch import Tensor

from tightwire.training.between.replicas import Replicas
from tightwire.training.between.sparse import SparseBetween
from tightwire.training.config.between import DgcOptions
from tightwire.training.engine.units import Piece


class DgcBetween(SparseBetween):
    """State: ``velocity/UNIT``, u of the above, beside the residuals, which are v."""

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
