"""Gradient compressors, made from their options: they sum gradients between nodes, after each node has summed its own.

Sparse ones send the largest accumulated elements and keep the rest. The largest elements are selected per parameter, so parameters of a
small scale are sent too. Values are mean gradients of a node, so the kept state stays valid on another number of ranks. The rounding error
of sent values is kept too.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tightwire.comm.all_reduce.base import BaseAllReduce
from tightwire.comm.all_reduce.flash import FlashAllReduce, flash_bytes
from tightwire.comm.all_reduce.one_shot import OneShotAllReduce
from tightwire.comm.all_reduce.two_shot import TwoShotAllReduce
from tightwire.comm.codec.codec import NONE, Codec, parse_codec
from tightwire.comm.collectives.all_gather import all_gather, sparse_all_gather, sparse_all_gather_bytes
from tightwire.comm.group.group import Group
from tightwire.training.config.optimizer import CompressorOptions, DgcOptions, QuantizedOptions, SparseOptions
from tightwire.training.engine.flat_parameters import FLOAT32_BYTES, ShardLayout, ShardSpan
from tightwire.training.engine.gradients import GradientCompressor


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """This rank's shards by flat parameter, and the groups that a compressor communicates over.

    ``group``: the ranks that hold the same shards, one of each node. ``inside``: the ranks that together hold this node's sum,
    None if that is this rank alone; only clipping needs it. ``weights``: gives a float32 shard, for weight decay.
    """

    group: Group
    shards: Mapping[str, ShardLayout]
    inside: Group | None = None
    weights: Callable[[str], Tensor] | None = None

    @property
    def gradients_per_node(self) -> int:
        """Number of ranks whose gradients are summed in a compressor's input."""
        return 1 if self.inside is None else self.inside.world_size

    @property
    def num_gradients(self) -> int:
        """Number of ranks whose gradients are summed in a compressor's result; the engine divides by it."""
        return self.group.world_size * self.gradients_per_node


def exact_all_reduce(group: Group) -> BaseAllReduce:
    """The exact all-reduce that sends the fewest bytes: one-shot for two ranks, two-shot for more."""
    return OneShotAllReduce(group) if group.world_size == 2 else TwoShotAllReduce(group)


def dense_bytes(rank: int, world_size: int, num_elems: int) -> int:
    """Bytes that ``exact_all_reduce`` sends for ``num_elems`` float32 values: 2 (n-1)/n of them, rounded to slices."""
    return flash_bytes(rank, world_size, num_elems, FLOAT32_BYTES, NONE, NONE)


class AllReduceCompressor(GradientCompressor):
    """Sums every element with one AllReduce: exact in float32 and in rank order, or encoded by two codecs."""

    def __init__(self, all_reduce: BaseAllReduce) -> None:
        self._all_reduce = all_reduce

    def __call__(self, name: str, sum_N: Tensor) -> Tensor:
        return self._all_reduce(sum_N)


# For 4 million normally distributed values at 99.9 % sparsity, sampling takes 16 ms instead of 70. For smaller tensors
# or larger shares, sampling costs more than it saves.
_SAMPLED_FROM = 1 << 18
_SAMPLED_SHARE = 1 / 32
_STRIDE = 127  # prime, so that samples come from all columns of a matrix
# Candidates to aim for, in multiples of ``count``; the second if the first threshold left fewer than ``count``.
_MARGINS = (2, 8)


def num_sent(num_elems: int, sparsity: float) -> int:
    """Elements sent out of ``num_elems``: (1 - sparsity) of them, rounded, at least one if any."""
    return min(num_elems, max(1, round(num_elems * (1 - sparsity))))


def top_elements(x_N: Tensor, count: int) -> Tensor:
    """(count,) int64: indices of the elements of largest magnitude, unordered; NaN counts as the largest.

    A sample gives a threshold that probably more than ``count`` elements reach. If fewer do, the threshold is lowered, and
    finally the whole tensor is searched. The result is exact; ties are broken arbitrarily.
    """
    magnitude_N, num_elems = x_N.abs(), x_N.numel()
    if num_elems >= _SAMPLED_FROM and count <= num_elems * _SAMPLED_SHARE:
        sample = magnitude_N[::_STRIDE]
        for margin in _MARGINS:
            rank = -(-margin * count * sample.numel() // num_elems)
            threshold = sample.topk(rank).values[-1]
            candidates = torch.nonzero(~(magnitude_N < threshold)).view(-1)  # keeps NaN, so that it is sent and noticed
            if candidates.numel() >= count:
                return candidates[magnitude_N[candidates].topk(count, sorted=False).indices]
    return magnitude_N.topk(count, sorted=False).indices


NORM_BYTES = 8  # a squared norm in float64
_TINY = 1e-6  # same as torch.nn.utils.clip_grad_norm_


def clip_spans(spans: Sequence[Tensor], max_norm: float, inside: Group | None, *, together: bool = False) -> None:
    """Scale each parameter in place to a norm of at most ``max_norm``; ``spans`` has one per parameter.

    All ranks of ``inside`` pass the same parameters; the norm is over all their spans, which may be empty. A NaN norm makes
    the span NaN. ``together``: the norm is that of all parameters. Cost: ``clip_bytes`` inside a node, one round.
    """
    squares = torch.stack([torch.linalg.vector_norm(span, dtype=torch.float64).square() for span in spans])
    if inside is not None and inside.world_size > 1:
        squares = torch.stack(all_gather(inside, squares)).sum(0)
    squares = squares.sum().expand_as(squares) if together else squares
    factors = (max_norm / (squares.sqrt() + _TINY)).clamp(max=1.0).float()
    for span, factor in zip(spans, factors, strict=True):
        span.mul_(factor)


def clip_bytes(ranks_per_node: int, num_parameters: int) -> int:
    return (ranks_per_node - 1) * num_parameters * NORM_BYTES


_INDEX_BYTES = 4
_VALUE_TYPES = {"float32": torch.float32, "float16": torch.float16}
_MOST_ELEMS = torch.iinfo(torch.int32).max
_STEP = "step"


def split_spans(
    shard: ShardLayout, options: SparseOptions, sparsity: float | None
) -> tuple[list[ShardSpan], list[ShardSpan]]:
    """The spans sent whole, and the spans of which the largest elements are sent. ``sparsity`` None: all whole."""
    limit = math.inf if sparsity is None else options.dense_below
    whole = [span for span in shard.spans if span.param.num_elems < limit]
    return whole, [span for span in shard.spans if span.param.num_elems >= limit]


def sparse_bytes(rank: int, world_size: int, shard: ShardLayout, options: SparseOptions, step: int) -> int:
    """Bytes sent at ``step``: (n-1) (8 + K (4 + value)) for K elements, plus ``dense_bytes`` of whole spans."""
    sparsity = options.sparsity_at(step)
    whole, largest = split_spans(shard, options, sparsity)
    num_bytes = dense_bytes(rank, world_size, sum(span.num_elems for span in whole))
    counts = [num_sent(span.num_elems, sparsity or 0.0) for span in largest if span.num_elems]
    if counts:
        value_bytes = _VALUE_TYPES[options.value_type].itemsize
        num_bytes += sparse_all_gather_bytes(world_size, sum(counts), _INDEX_BYTES, value_bytes)
    return num_bytes


class SparseCompressor(GradientCompressor):
    """Top-k with error feedback, and deep gradient compression (DGC), which adds momentum.

    Top-k works with any optimizer: v <- v + g; send the largest of v; v <- v - what was sent. With an optimizer that divides by
    a running root mean square, such as Adam, updates at sparsity s are up to sqrt(1 / (1 - s)) times smaller than dense ones:
    use a lower sparsity or a higher learning rate. Source: sparsified SGD with memory, arXiv 1809.07599.

    With DGC each node computes, with g the mean gradient of its ranks, m the momentum, d the weight decay and w the weights:

        g <- clip(g) + d w                  local clipping (8), of a parameter or of the whole gradient, and weight decay (12)
        u <- m u + g                        momentum correction (7); with Nesterov, v below gets g + m u
        v <- v + u
        send the largest of v; v <- v - what was sent; u <- 0 where sent        momentum factor masking (9)
        result: the sum of what all nodes sent, divided by the number of nodes; the optimizer is plain SGD without momentum

    Numbers in parentheses are equations of the article on DGC in Paddle. Steps before the warm-up, and small parameters always,
    use momentum SGD on the exact sum, with the bits of ``torch.optim.SGD`` if the numbers of nodes and of ranks per node are
    powers of two; then its velocity continues as u on every node. Masking leaves little momentum at a low sparsity.
    Source: arXiv 1712.01887.

    State: ``residual/NAME``, (N,) float32, with DGC also ``velocity/NAME``, and the step number; all allocated at construction.
    Cost: ``sparse_bytes``, two rounds, ``top_elements`` of each span, and temporary memory for one span.
    """

    def __init__(self, replicas: Replicas, options: SparseOptions) -> None:
        for name, shard in replicas.shards.items():
            if shard.num_elems > _MOST_ELEMS:
                raise ValueError(
                    f"{name} has {shard.num_elems} elements on this rank, but 32-bit indices only reach {_MOST_ELEMS}; "
                    "shard it over more ranks, or use parallel.between.kind=dense or quantized"
                )
        self._replicas, self._options = replicas, options
        self._dgc = options if isinstance(options, DgcOptions) else None
        self.name = "top-k" if self._dgc is None else "dgc"
        self._all_reduce = exact_all_reduce(replicas.group)
        kinds = ("residual",) if self._dgc is None else ("residual", "velocity")
        self._kept = {  # by their names in ``state_dict``
            f"{kind}/{name}": torch.zeros(shard.num_elems, device=replicas.group.device)
            for kind in kinds
            for name, shard in replicas.shards.items()
        }
        self._step = 0
        self._summed: set[str] = set()
        # Each of N nodes clips its own mean gradient to the global norm times N^1/2 (8).
        self._local_factor = math.sqrt(replicas.group.world_size)
        self.takes_all_sums = options.takes_all_sums
        self._span_norm = None if options.takes_all_sums else options.clip_norm

    def __call__(self, name: str, sum_N: Tensor) -> Tensor:
        if name in self._summed:
            raise RuntimeError(
                f"{self.name} was called twice for {name} in step {self._step}: sum the micro-batches first, and call "
                "step_done after each step"
            )
        self._summed.add(name)
        sparsity = self._options.sparsity_at(self._step)
        whole, largest = split_spans(self._replicas.shards[name], self._options, sparsity)
        if whole:
            self._sum_whole(name, whole, sum_N)
        if largest and sparsity is not None:
            self._sum_largest(name, largest, sparsity, sum_N)
        return sum_N

    def begin_step(self, sums: Mapping[str, Tensor]) -> None:
        """Clip the norm over all of this node's gradient, in dense steps too."""
        replicas, max_norm = self._replicas, self._options.clip_norm or math.inf
        limit = max_norm * self._local_factor * replicas.gradients_per_node
        clip_spans(list(sums.values()), limit, replicas.inside, together=True)

    def step_done(self) -> None:
        self._step += 1
        self._summed.clear()

    def state_dict(self) -> dict[str, Tensor]:
        return {_STEP: torch.tensor(self._step), **self._kept}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        own = self._kept
        if {_STEP, *own} != set(state):
            different = sorted({_STEP, *own} ^ set(state))
            raise ValueError(
                f"the checkpoint is not of compressor {self.name}, or has other parameters: {', '.join(different)}"
            )
        for key, tensor in own.items():
            tensor.copy_(state[key])
        self._step = int(state[_STEP])
        self._summed.clear()

    def _sum_whole(self, name: str, spans: Sequence[ShardSpan], sum_N: Tensor) -> None:
        """Overwrite ``spans`` of ``sum_N`` with ``_direction`` of the mean over nodes, times ``num_gradients``."""
        divisor = self._replicas.num_gradients
        mean_N = self._all_reduce(torch.cat([sum_N[span.place] for span in spans])).div_(divisor)
        means = mean_N.split([span.num_elems for span in spans])
        if self._span_norm is not None:
            clip_spans(means, self._span_norm, self._replicas.inside)
        for span, mean in zip(spans, means, strict=True):
            torch.mul(self._direction(name, span, mean), divisor, out=sum_N[span.place])

    def _sum_largest(self, name: str, spans: Sequence[ShardSpan], sparsity: float, sum_N: Tensor) -> None:
        """Add ``spans`` of ``sum_N`` to the residual, send the largest elements, write their sum over nodes back."""
        group, per_node = self._replicas.group, self._replicas.gradients_per_node
        means = [sum_N[span.place].div_(per_node) for span in spans]
        if self._span_norm is not None:
            clip_spans(means, self._span_norm * self._local_factor, self._replicas.inside)
        residual_N = self._kept[f"residual/{name}"]
        chosen = []
        for span, mean in zip(spans, means, strict=True):
            kept = residual_N[span.place]
            kept.add_(self._direction(name, span, mean))
            mean.zero_()
            if span.num_elems:
                chosen.append(top_elements(kept, num_sent(span.num_elems, sparsity)) + span.start)
        if not chosen:
            return  # the same shard of the other nodes has no elements here either
        indices_K = torch.cat(chosen)
        values_K = _on_wire(residual_N[indices_K], _VALUE_TYPES[self._options.value_type])
        residual_N[indices_K] -= values_K.float()
        if self._dgc is not None and self._dgc.mask_momentum:
            self._kept[f"velocity/{name}"][indices_K] = 0.0
        for indices, values in sparse_all_gather(group, indices_K.int(), values_K):
            sum_N.index_add_(0, indices, values.float(), alpha=per_node)

    def _direction(self, name: str, span: ShardSpan, mean: Tensor) -> Tensor:
        """The values to accumulate for a span, given its mean gradient, which may be overwritten."""
        dgc, weights = self._dgc, self._replicas.weights
        if dgc is None:
            return mean
        # Norms and biases do not decay.
        if dgc.weight_decay and len(span.param.shape) > 1 and weights is not None:
            mean.add_(weights(name)[span.place], alpha=dgc.weight_decay)
        velocity = self._kept[f"velocity/{name}"][span.place]
        velocity.mul_(dgc.momentum).add_(mean)
        return mean.add_(velocity, alpha=dgc.momentum) if dgc.nesterov else velocity


def _on_wire(values_K: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to ``dtype``. Finite values are clamped and stay finite; the residual keeps the difference."""
    largest = torch.finfo(dtype).max
    return torch.where(values_K.isfinite(), values_K.clamp(-largest, largest), values_K).to(dtype)


def make_compressor(options: CompressorOptions, replicas: Replicas) -> GradientCompressor:
    """Make the compressor that ``options`` describe; all ranks of ``replicas.group`` pass the same options."""
    if isinstance(options, SparseOptions):
        return SparseCompressor(replicas, options)
    if isinstance(options, QuantizedOptions):
        # qgZ (ZeRO++, arXiv 2306.10209) stops after the reduce-scatter, because with ``zero3`` one rank updates each slice. Here
        # every node updates its own copy, so the sums are gathered again, with a second rounding; all decode the same bytes.
        name = f"quantized:{options.reduce_codec},{options.gather_codec}"
        return AllReduceCompressor(FlashAllReduce(replicas.group, *_codecs(options), name=name))
    return AllReduceCompressor(exact_all_reduce(replicas.group))


def compressor_bytes(options: CompressorOptions, shard: ShardLayout, *, rank: int, world_size: int, step: int) -> int:
    """Exact number of bytes that node ``rank`` of ``world_size`` sends for ``shard`` at ``step``."""
    if isinstance(options, SparseOptions):
        return sparse_bytes(rank, world_size, shard, options, step)
    if isinstance(options, QuantizedOptions):
        return flash_bytes(rank, world_size, shard.num_elems, FLOAT32_BYTES, *_codecs(options))
    return dense_bytes(rank, world_size, shard.num_elems)


def _codecs(options: QuantizedOptions) -> tuple[Codec, Codec]:
    return parse_codec(options.reduce_codec), parse_codec(options.gather_codec)


def inside_bytes(options: CompressorOptions, shard: ShardLayout, ranks_per_node: int) -> int:
    """Bytes that a rank sends inside its node for ``shard`` in a step: for clipping, over ``ranks_per_node`` ranks."""
    if isinstance(options, SparseOptions) and options.clip_norm is not None:
        return clip_bytes(ranks_per_node, len(shard.spans) if options.clip == "parameter" else 1)
    return 0


def kept_bytes(options: CompressorOptions, shard: ShardLayout) -> int:
    """Bytes that a compressor keeps for ``shard`` from step to step, in memory and in a checkpoint."""
    num_flats = 2 if isinstance(options, DgcOptions) else 1 if isinstance(options, SparseOptions) else 0
    return num_flats * shard.num_elems * FLOAT32_BYTES
