"""Sparse gradient compressors: top-k with error feedback, and deep gradient compression (DGC)."""

from torch import Tensor

from tightwire.training.compression.dense import Replicas
from tightwire.training.compression.sparse import SparseCompressor
from tightwire.training.config.compression import DgcOptions
from tightwire.training.engine.flat_parameters import ShardSpan


class TopKCompressor(SparseCompressor):
    """Top-k with error feedback, for any optimizer: v <- v + g; send the largest of v; v <- v - what was sent.

    An element that is not sent stays in the residual and is sent later as the sum of several steps. An optimizer that
    divides by a running root mean square, such as Adam, sees a sum of T steps once in T steps, and its root mean square is
    sqrt(T) times that of dense gradients. So at sparsity s its updates are up to sqrt(1 / (1 - s)) times smaller than dense
    ones: use a lower sparsity or a higher learning rate. With a momentum optimizer it lacks the momentum correction of DGC.

    Source: sparsified SGD with memory, arXiv 1809.07599.
    """

    name = "top-k"

    def _direction(self, name: str, span: ShardSpan, mean: Tensor) -> Tensor:
        return mean

    def _sent(self, name: str, indices_K: Tensor) -> None:
        pass  # there is no momentum to clear


class DgcCompressor(SparseCompressor):
    """Accumulates momentum on each node and sends the largest accumulated values.

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
    starts, its velocity continues as u on every node. Masking clears the momentum of every element sent, so a low
    sparsity leaves little momentum; sparsity 0 is SGD without it.

    State: ``velocity/NAME`` holds u, ``residual/NAME`` holds v. Source: arXiv 1712.01887.
    """

    name = "dgc"

    def __init__(self, replicas: Replicas, options: DgcOptions) -> None:
        if options.weight_decay and replicas.weights is None:
            raise ValueError("DGC adds weight decay to the local gradient, so it needs Replicas.weights")
        super().__init__(replicas, options)
        self._dgc = options
        self._velocities = self._zeros()

    def _direction(self, name: str, span: ShardSpan, mean: Tensor) -> Tensor:
        dgc, weights = self._dgc, self._replicas.weights
        if dgc.weight_decay and span.decays and weights is not None:
            mean.add_(weights(name)[span.place], alpha=dgc.weight_decay)
        velocity = self._velocities[name][span.place]
        velocity.mul_(dgc.momentum).add_(mean)
        return mean.add_(velocity, alpha=dgc.momentum) if dgc.nesterov else velocity

    def _sent(self, name: str, indices_K: Tensor) -> None:
        if self._dgc.mask_momentum:
            self._velocities[name][indices_K] = 0.0

    def _kept(self) -> dict[str, Tensor]:
        velocities = {f"velocity/{name}": velocity_N for name, velocity_N in self._velocities.items()}
        return {**super()._kept(), **velocities}
