"""Reduces gradients: backward writes them into a buffer, the lane sums them over ranks, and each rank keeps its shard.

If ``reduce_when`` is ``backward``, blocks share two buffers and are reduced in every micro-batch; the shard accumulates the
sums. With ``reshard_ends`` embedding and head share another one in the same way. Each other bucket has its own buffer, which
accumulates micro-batches, and is reduced at the end of the step. Sums over ranks are float32. The compressor runs once per
bucket and step. ``finish`` divides by the number of ranks.
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
    """Sums flat float32 gradients over the ranks with the same shard: one of each node, or all with sharding ``none``.

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
class GradientBuffer:
    """A bucket's gradient buffer and the shard of its sum over ranks. ``in_place``: both are the same memory."""

    flat_param: FlatParameter
    pool: BufferPool
    number: int
    name: str
    grad_N: Tensor
    grad_S: Tensor
    is_shared: bool  # other buckets use the buffer too
    in_place: bool
    written: set[ParamSpan] = field(default_factory=set)
    is_open: bool = False  # backward is writing to it
    has_sum: bool = False  # ``grad_S`` has a sum of this step; used by the lane
    is_last: bool = False  # no further backward may begin in this step


def shares_gradient_buffer(options: EngineOptions, bucket: Bucket) -> bool:
    """Whether the bucket's gradient buffer is also that of others, so it is reduced in every micro-batch."""
    return options.may_share(bucket) and options.sharding.reduce_when == "backward"


def num_reduce_lanes(options: EngineOptions, num_nodes: int) -> int:
    """Two where sums have a leg inside nodes and one between, so that two buckets' legs run side by side (qgZ of ZeRO++)."""
    return 2 if num_nodes > 1 and options.reduce_path == "hierarchical" else 1


def reduce_codecs(options: EngineOptions, bucket: Bucket) -> tuple[Codec, Codec]:
    """The codecs inside and across nodes. Norms and biases are not quantized."""
    if bucket.name == NORMS:
        return NONE, NONE
    return parse_codec(options.reduce_codec), parse_codec(options.reduce_across_codec)


def make_buffers(plan: BucketPlan, options: EngineOptions, device: torch.device) -> dict[int, GradientBuffer]:
    """The gradient buffers of the trainable buckets by number, allocated."""
    ranks, size = plan.shard_ranks, options.reduce_dtype.itemsize
    trained = {bucket: bucket.trainable for bucket in plan.buckets if bucket.trainable}
    elems = {bucket: own.num_elems for bucket, own in trained.items() if shares_gradient_buffer(options, bucket)}
    shared = share_buffers(elems, NUM_BUFFERS, size, device)
    buffers = {}
    for bucket, flat_param in trained.items():
        is_shared = bucket.number in shared
        alone = None if is_shared else BufferPool(1, flat_param.num_elems * size, device)
        pool, number, name = (alone, 0, bucket.name) if alone else shared[bucket.number]
        grad_N = pool.buffers[number].memory.view(options.reduce_dtype)[: flat_param.num_elems]
        if not is_shared:
            grad_N.zero_()
        in_place = ranks == 1 and options.reduce_dtype == torch.float32 and not is_shared
        grad_S = grad_N if in_place else torch.zeros(flat_param.num_elems // ranks, device=device)
        of_pool = flat_param, pool, number, f"gradients {name}"
        buffers[bucket.number] = GradientBuffer(*of_pool, grad_N, grad_S, is_shared, in_place)
    return buffers


class Gradients:
    """The gradients of one step: the computing thread calls the methods, and the lanes' threads reduce.

    ``waited_s``: seconds that the computing thread has waited.
    """

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
        self._buffers = make_buffers(plan, options, first.device)
        self._pools = list({id(buffer.pool): buffer.pool for buffer in self._buffers.values()}.values())
        self._layouts: dict[str, list[tuple[int, int]]] = {}  # by shared buffer: parameters' (start, length)
        self._lanes = [Lane("reduce", first.device, partial(close_pools, self._pools)) for _ in lane_groups]

    def grads(self) -> dict[str, Tensor]:
        """(N / ranks,) float32, by flat parameter: this rank's shards of the gradients; valid from ``finish`` to the next step."""
        return {buffer.flat_param.name: buffer.grad_S for buffer in self._buffers.values()}

    def begin(self, bucket: Bucket) -> None:
        """Wait until backward may write ``bucket``'s gradients to its buffer."""
        buffer = self._buffers[bucket.number]
        if buffer.is_open:
            return
        if buffer.is_last:
            raise RuntimeError(
                f"gradients of {bucket.name} came after they were reduced; run one backward per micro-batch, and set "
                "last=True only for the last one"
            )
        buffer.is_open = True
        if not buffer.is_shared and buffer.written:
            return  # it holds the buffer since an earlier micro-batch
        start_s = time.perf_counter()
        buffer.pool.fill(bucket.number, buffer.number, self._patience_s)
        self.waited_s += time.perf_counter() - start_s
        self._trace("write", True, bucket.name, buffer.name)
        buffer.written.clear()
        if buffer.is_shared:
            layout = [(param.start, param.num_elems) for param in buffer.flat_param.params]
            if self._layouts.get(buffer.name) != layout:
                buffer.grad_N.zero_()  # padding between parameters holds values of another bucket
                self._layouts[buffer.name] = layout

    def view(self, bucket: Bucket, param: ParamSpan, dtype: torch.dtype) -> Tensor | None:
        """Where a layer writes a parameter's gradient itself; None: ``add`` adds it to another one or converts it."""
        buffer = self._buffers[bucket.number]
        if param in buffer.written or buffer.grad_N.dtype != dtype:
            return None
        buffer.written.add(param)
        return param.of(buffer.grad_N)

    def add(self, bucket: Bucket, param: ParamSpan, grad: Tensor | None) -> None:
        """Write a parameter's gradient to the bucket's buffer, or add it if the parameter has one there.

        None: the layer has written it to ``view``. Raises RuntimeError: it has not.
        """
        buffer = self._buffers[bucket.number]
        if not buffer.is_open:
            raise RuntimeError(f"a gradient of {param.name} came outside the backward of {bucket.name}")
        target = param.of(buffer.grad_N)
        if grad is None:
            if param not in buffer.written:
                raise RuntimeError(
                    f"a layer returned None as the gradient of {param.name} and has not written it: return the gradient, or "
                    "write it to training.engine.autograd.gradient_view"
                )
        elif param in buffer.written:
            target.add_(grad)
        else:
            target.copy_(grad)
            buffer.written.add(param)

    def end(self, bucket: Bucket, last: bool) -> None:
        """Backward has written all of ``bucket``'s gradients of this micro-batch. ``last``: the step's last one."""
        buffer = self._buffers[bucket.number]
        buffer.is_open = False
        if not buffer.is_shared and not last:
            return
        for param in buffer.flat_param.params:
            if param not in buffer.written:
                param.of(buffer.grad_N).zero_()
        self._trace("write", False, bucket.name, buffer.name)
        buffer.pool.filled(bucket.number)
        buffer.is_last = last
        self._lane(bucket).start(lambda: self._reduce(bucket, buffer, last))

    def end_step(self) -> None:
        """Called after the last micro-batch: reduce, in plan order, the buckets that backward has not completed."""
        for bucket in self._plan.buckets:
            buffer = self._buffers.get(bucket.number)
            if buffer is None or buffer.is_last:
                continue
            if buffer.is_shared:
                buffer.is_last = True
                self._lane(bucket).start(lambda bucket=bucket, buffer=buffer: self._complete(bucket, buffer))
            else:
                if not buffer.written:
                    self.begin(bucket)
                self.end(bucket, last=True)

    def finish(self) -> None:
        """Wait until all gradients are summed and divide by the number of ranks; RuntimeError: the step is not over."""
        if not all(buffer.is_last for buffer in self._buffers.values()):
            raise RuntimeError("the step's last micro-batch has not run; pass last=True to it")
        start_s = time.perf_counter()
        if self._compressor is not None and self._compressor.takes_all_sums:
            self._lanes[0].start(partial(self._compress_all, self._compressor))
        for lane in self._lanes:
            lane.finish(self._patience_s)
        self.waited_s += time.perf_counter() - start_s
        for buffer in self._buffers.values():
            buffer.grad_S.div_(self._num_ranks)
            buffer.has_sum = buffer.is_last = False
            buffer.written.clear()
        if self._compressor is not None:
            self._compressor.step_done()

    def close(self, reason: BaseException) -> None:
        close_pools(self._pools, reason)
        for lane in self._lanes:
            lane.close()

    def _lane(self, bucket: Bucket) -> Lane:
        return self._lanes[bucket.number % len(self._lanes)]

    def _reduce(self, bucket: Bucket, buffer: GradientBuffer, last: bool) -> None:
        buffer.pool.use(bucket.number, 0.0)  # it is filled
        self._trace("reduce", True, bucket.name, buffer.name)
        if not buffer.in_place:
            self._add_sum(bucket, buffer)
        buffer.has_sum = True
        if buffer.in_place:
            self._complete(bucket, buffer)
        self._trace("reduce", False, bucket.name, buffer.name)
        buffer.pool.release(bucket.number)
        if last and not buffer.in_place:
            self._complete(bucket, buffer)
        for pool in self._pools:
            pool.moved()

    def _add_sum(self, bucket: Bucket, buffer: GradientBuffer) -> None:
        """Add the reduced sum to the shard. Separate, so that the sum is freed before the compressor allocates."""
        sum_S = self._sum(bucket, buffer.grad_N)
        buffer.grad_S.add_(sum_S) if buffer.has_sum else buffer.grad_S.copy_(sum_S)

    def _sum(self, bucket: Bucket, grad_N: Tensor) -> Tensor:
        """This rank's slice of the sum over the shard group, float32."""
        inside, across = reduce_codecs(self._options, bucket)
        lane_group, group = self._groups[bucket.number % len(self._groups)]
        if group.nodes is not None and self._options.reduce_path == "hierarchical":
            return hierarchical_reduce_scatter(group, grad_N, inside, across, torch.float32)
        return run_leg(lane_group, group, reduce_scatter, group, grad_N, inside, torch.float32)

    def _complete(self, bucket: Bucket, buffer: GradientBuffer) -> None:
        """Sum over replicas, once the shard has the sum of all micro-batches."""
        if not buffer.has_sum:
            buffer.grad_S.zero_()
        if self._compressor is not None and not self._compressor.takes_all_sums:
            buffer.grad_S.copy_(self._compressor(bucket.name, buffer.grad_S))

    def _compress_all(self, compressor: GradientCompressor) -> None:
        compressor.begin_step(self.grads())
        for name, sum_S in self.grads().items():
            sum_S.copy_(compressor(name, sum_S))
