"""Reduces gradients: backward writes them into a buffer, the lane sums them over ranks, and each rank keeps its shard.

If ``reduce_when`` is ``backward``, blocks share two buffers and are reduced in every micro-batch; the shard accumulates the
sums. With ``reshard_ends`` embedding and head share another one in the same way. Each other bucket has its own buffer, which
accumulates micro-batches, and is reduced at the end of the step. Sums over ranks are float32. The compressor runs once per bucket and step. ``finish`` divides by the number of ranks.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from tightwire.buffers import BufferPool, close_pools
from tightwire.comm.codec.codec import NONE, Codec, parse_codec
from tightwire.comm.collectives.qgz import hierarchical_reduce_scatter
from tightwire.comm.collectives.reduce_scatter import reduce_scatter
from tightwire.comm.group.group import Group
from tightwire.comm.group.nodes import run_leg
from tightwire.comm.lane import Lane
from tightwire.training.engine.flat_parameters import NORMS, Bucket, BucketPlan, FlatParameter, ParamSpan
from tightwire.training.engine.gathered_weights import PATIENCE, Trace, share_buffers
from tightwire.training.engine.options import EngineOptions
from tightwire.training.ranks.groups import shard_group

NUM_BUFFERS = 2


class GradientCompressor(ABC):
    """Sums flat float32 gradients over the ranks that hold the same shard: one rank of each node, or all with sharding ``none``.

    Calls are collective, one per flat parameter and step, in the same order, from the thread of the reduce lane. The methods
    below are those of a compressor without state. ``training.compression`` implements compressors.

    ``takes_all_sums``: the calls of a step come after its ``begin_step``, so none runs beside backward.
    """

    takes_all_sums = False

    def begin_step(self, sums: Mapping[str, Tensor]) -> None:
        """Called before the calls of a step, with the sums by flat parameter, if it takes all. It may overwrite them."""

    @abstractmethod
    def __call__(self, name: str, sum_N: Tensor) -> Tensor:
        """Turn (N,) this node's sum of a flat parameter's gradients into the sum over nodes; same bits on every rank.

        The engine divides by the number of ranks. ``sum_N`` may be overwritten; the result may share its memory. Raises
        RuntimeError: called twice for ``name`` in a step, with state; CommError: a rank is missing, the group ends.
        """

    def step_done(self) -> None:
        """Called once per step, after all flat parameters are summed and before the optimizer steps."""

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's state kept from step to step. Its tensors are not copied."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a ``state_dict`` of the same flat parameters. Raises ValueError: names differ."""


@dataclass(slots=True)
class BucketBuffer:
    """A bucket's gradient buffer and the shard of their sums. ``in_place``: both are the same memory."""

    flat_param: FlatParameter
    pool: BufferPool
    number: int
    name: str
    buffer_N: Tensor
    grad_S: Tensor
    alternates: bool
    in_place: bool
    written: set[ParamSpan] = field(default_factory=set)
    is_open: bool = False  # backward is writing to it
    has_sum: bool = False  # ``grad_S`` has a sum of this step; used by the lane
    is_last: bool = False  # no further backward may begin in this step


def alternates(options: EngineOptions, bucket: Bucket) -> bool:
    """Whether the bucket shares its gradient buffer with others and is reduced in every micro-batch."""
    return options.shares(bucket) and options.sharding.reduce_when == "backward"


def num_reduce_lanes(options: EngineOptions, num_nodes: int) -> int:
    """Two where sums have a leg inside nodes and one between them, so that one bucket's leg runs beside another's (qgZ of ZeRO++)."""
    return 2 if num_nodes > 1 and options.reduce_path == "hierarchical" else 1


def reduce_codecs(options: EngineOptions, bucket: Bucket) -> tuple[Codec, Codec]:
    """The codecs inside and across nodes. Norms and biases are not quantized."""
    if bucket.name == NORMS:
        return NONE, NONE
    return parse_codec(options.reduce_codec), parse_codec(options.reduce_across_codec)


def make_buffers(plan: BucketPlan, options: EngineOptions, device: torch.device) -> dict[int, BucketBuffer]:
    """The gradient buffers of the trainable buckets by number, allocated."""
    ranks, size = plan.shard_ranks, options.reduce_dtype.itemsize
    elems = {each: each.trainable.num_elems for each in plan.buckets if each.trainable and alternates(options, each)}
    shared = share_buffers(elems, NUM_BUFFERS, size, device)
    places = {}
    for bucket in plan.buckets:
        flat_param = bucket.trainable
        if flat_param is None:
            continue
        alternating = bucket.number in shared
        alone = None if alternating else BufferPool(1, flat_param.num_elems * size, device)
        pool, number, name = (alone, 0, bucket.name) if alone else shared[bucket.number]
        buffer_N = pool.buffers[number].memory.view(options.reduce_dtype)[: flat_param.num_elems]
        if not alternating:
            buffer_N.zero_()
        in_place = ranks == 1 and options.reduce_dtype == torch.float32 and not alternating
        grad_S = buffer_N if in_place else torch.zeros(flat_param.num_elems // ranks, device=device)
        name = f"gradients {name}"
        places[bucket.number] = BucketBuffer(flat_param, pool, number, name, buffer_N, grad_S, alternating, in_place)
    return places


class Gradients:
    """Called by the computing thread; the lane reduces. ``waited_s``: seconds that the computing thread has waited."""

    def __init__(
        self,
        plan: BucketPlan,
        options: EngineOptions,
        lane_groups: Sequence[Group],
        trace: Trace,
        compressor: GradientCompressor | None,
    ) -> None:
        self.waited_s = 0.0
        self._plan, self._options, self._trace, self._compressor = plan, options, trace, compressor
        self._groups, first = [(lane, shard_group(lane, options.sharding)) for lane in lane_groups], lane_groups[0]
        self._patience_s, self._num_ranks = PATIENCE * first.timeout_s, first.world_size
        self._bucket_buffers = make_buffers(plan, options, first.device)
        self._pools = list({id(place.pool): place.pool for place in self._bucket_buffers.values()}.values())
        self._layouts: dict[str, list[tuple[int, int]]] = {}  # by shared buffer: parameters' (start, length)
        self._lanes = [Lane("reduce", first.device, partial(close_pools, self._pools)) for _ in lane_groups]

    def grads(self) -> dict[str, Tensor]:
        """(N / ranks,) float32, by flat parameter: this rank's shards of the gradients; valid from ``finish`` to the next step."""
        return {place.flat_param.name: place.grad_S for place in self._bucket_buffers.values()}

    def begin(self, bucket: Bucket) -> None:
        """Wait until backward may write ``bucket``'s gradients to its buffer."""
        place = self._bucket_buffers[bucket.number]
        if place.is_open:
            return
        if place.is_last:
            raise RuntimeError(
                f"gradients of {bucket.name} came after they were reduced; run one backward per micro-batch, and set "
                "last=True only for the last one"
            )
        place.is_open = True
        if not place.alternates and place.written:
            return  # it holds the buffer since an earlier micro-batch
        start_s = time.perf_counter()
        place.pool.fill(bucket.number, place.number, self._patience_s)
        self.waited_s += time.perf_counter() - start_s
        self._trace("write", True, bucket.name, place.name)
        place.written.clear()
        if place.alternates:
            layout = [(param.start, param.num_elems) for param in place.flat_param.params]
            if self._layouts.get(place.name) != layout:
                place.buffer_N.zero_()  # padding between parameters holds values of another bucket
                self._layouts[place.name] = layout

    def view(self, bucket: Bucket, param: ParamSpan, dtype: torch.dtype) -> Tensor | None:
        """Where a layer writes a parameter's gradient itself; None: ``add`` adds it to another one or converts it."""
        place = self._bucket_buffers[bucket.number]
        if param in place.written or place.buffer_N.dtype != dtype:
            return None
        place.written.add(param)
        return param.of(place.buffer_N)

    def add(self, bucket: Bucket, param: ParamSpan, grad: Tensor | None) -> None:
        """Write a parameter's gradient to the bucket's buffer, or add it if the parameter has one there.

        None: the layer has written it to ``view``. Raises RuntimeError: it has not.
        """
        place = self._bucket_buffers[bucket.number]
        if not place.is_open:
            raise RuntimeError(f"a gradient of {param.name} came outside the backward of {bucket.name}")
        target = param.of(place.buffer_N)
        if grad is None:
            if param not in place.written:
                raise RuntimeError(
                    f"a layer returned None as the gradient of {param.name} and has not written it: return the gradient, or "
                    "write it to training.engine.autograd.gradient_view"
                )
        elif param in place.written:
            target.add_(grad)
        else:
            target.copy_(grad)
            place.written.add(param)

    def end(self, bucket: Bucket, last: bool) -> None:
        """Backward has written all of ``bucket``'s gradients of this micro-batch. ``last``: the step's last one."""
        place = self._bucket_buffers[bucket.number]
        place.is_open = False
        if not place.alternates and not last:
            return
        for param in place.flat_param.params:
            if param not in place.written:
                param.of(place.buffer_N).zero_()
        self._trace("write", False, bucket.name, place.name)
        place.pool.filled(bucket.number)
        place.is_last = last
        self._lane(bucket).start(lambda: self._reduce(bucket, place, last))

    def end_step(self) -> None:
        """Called after the last micro-batch: reduce, in plan order, the buckets that backward has not completed."""
        for bucket in self._plan.buckets:
            place = self._bucket_buffers.get(bucket.number)
            if place is None or place.is_last:
                continue
            if place.alternates:
                place.is_last = True
                self._lane(bucket).start(lambda bucket=bucket, place=place: self._complete(bucket, place))
            else:
                if not place.written:
                    self.begin(bucket)
                self.end(bucket, last=True)

    def finish(self) -> None:
        """Wait until all gradients are summed and divide by the number of ranks; RuntimeError: the step is not over."""
        if not all(place.is_last for place in self._bucket_buffers.values()):
            raise RuntimeError("the step's last micro-batch has not run; pass last=True to it")
        start_s = time.perf_counter()
        if self._compressor is not None and self._compressor.takes_all_sums:
            self._lanes[0].start(partial(self._compress_all, self._compressor))
        for lane in self._lanes:
            lane.finish(self._patience_s)
        self.waited_s += time.perf_counter() - start_s
        for place in self._bucket_buffers.values():
            place.grad_S.div_(self._num_ranks)
            place.has_sum = place.is_last = False
            place.written.clear()
        if self._compressor is not None:
            self._compressor.step_done()

    def close(self, reason: BaseException) -> None:
        close_pools(self._pools, reason)
        for lane in self._lanes:
            lane.close()

    def _lane(self, bucket: Bucket) -> Lane:
        return self._lanes[bucket.number % len(self._lanes)]

    def _reduce(self, bucket: Bucket, place: BucketBuffer, last: bool) -> None:
        place.pool.use(bucket.number, 0.0)  # it is filled
        self._trace("reduce", True, bucket.name, place.name)
        if not place.in_place:
            self._add_sum(bucket, place)
        place.has_sum = True
        if place.in_place:
            self._complete(bucket, place)
        self._trace("reduce", False, bucket.name, place.name)
        place.pool.release(bucket.number)
        if last and not place.in_place:
            self._complete(bucket, place)
        for pool in self._pools:
            pool.moved()

    def _add_sum(self, bucket: Bucket, place: BucketBuffer) -> None:
        """Add the reduced sum to the shard. Separate, so that the sum is freed before the compressor allocates."""
        sum_S = self._sum(bucket, place.buffer_N)
        place.grad_S.add_(sum_S) if place.has_sum else place.grad_S.copy_(sum_S)

    def _sum(self, bucket: Bucket, grad_N: Tensor) -> Tensor:
        """This rank's slice of the sum over the shard group, float32."""
        inside, across = reduce_codecs(self._options, bucket)
        lane_group, group = self._groups[bucket.number % len(self._groups)]
        if group.nodes is not None and self._options.reduce_path == "hierarchical":
            return hierarchical_reduce_scatter(group, grad_N, inside, across, torch.float32)
        return run_leg(lane_group, group, reduce_scatter, group, grad_N, inside, torch.float32)

    def _complete(self, bucket: Bucket, place: BucketBuffer) -> None:
        """Sum over replicas, once the shard has the sum of all micro-batches."""
        if not place.has_sum:
            place.grad_S.zero_()
        if self._compressor is not None and not self._compressor.takes_all_sums:
            place.grad_S.copy_(self._compressor(bucket.name, place.grad_S))

    def _compress_all(self, compressor: GradientCompressor) -> None:
        compressor.begin_step(self.grads())
        for name, sum_S in self.grads().items():
            sum_S.copy_(compressor(name, sum_S))
