"""One rank's shards of the weights, and their gathering: the computing thread requests them, the lane gathers them into a buffer.

Block i always uses buffer i % ``num_buffers``, so that views saved by autograd are valid again when backward gathers the
block again. With ``reshard_ends`` embedding and head share a buffer too. The other buckets, and the blocks if sharding keeps
whole weights, have their own buffers and are gathered once per version. If one rank holds whole flat parameters in the dtype
that it computes in, the shards are the buffer.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tightwire.buffers import BufferPool, close_pools
from tightwire.comm.collectives.gather_shards import gather_across, gather_inside, gather_over_nodes, gather_shards
from tightwire.comm.group.group import Group
from tightwire.comm.group.nodes import run_leg
from tightwire.comm.lane import Lane
from tightwire.kernels.packed import dequantize
from tightwire.kernels.spec.packed import PackedMatrix
from tightwire.training.engine.flat_parameters import HEAD, Bucket, BucketPlan, FlatParameter, ParamSpan
from tightwire.training.engine.options import EngineOptions
from tightwire.training.engine.shards import MainShard, Shard, Shards, group_of
from tightwire.training.ranks.groups import shard_group

# Called with the kind of work (gather, compute, write or reduce), whether it begins, its bucket and its buffer; not called for waits.
Trace = Callable[[str, bool, str, str], None]
_UNPACKED_ROWS = 1024  # of a matrix at a time, which bounds the memory
PATIENCE = 4  # in timeouts of a collective: a wait for the lane may include earlier collectives


class NodeCopy:
    """This rank's 1/L of its node's copy of the blocks' weights, so that repeated gathers stay inside the node.

    The copy is the bytes received from other nodes, so later gathers give the same bits. It is valid for one version of the
    weights; when they change, the next gather crosses nodes again.

    Source: hpZ of ZeRO++, arXiv 2306.10209. Cost: ``node_copy_bytes`` of each flat parameter, allocated at construction.
    """

    def __init__(self, shards: Shards, group: Group) -> None:
        self._group = group
        self._versions: dict[str, int] = {}
        self._copies = {
            name: torch.empty(num_bytes, dtype=torch.uint8, device=group.device)
            for name, num_bytes in node_copy_bytes(shards).items()
        }

    def gather(self, shard: MainShard, out_N: Tensor, room: Tensor) -> None:
        """Fill ``out_N`` with the weights of a flat parameter: from the node's copy if it is current, else across nodes.

        ``room``: as in ``comm.collectives.gather_shards``.
        """
        name = shard.flat_param.name
        if self._versions.get(name) != shard.version:
            self._versions.pop(name, None)  # the copy is overwritten from here on
            gather_across(self._group, shard.wire(), self._copies[name])
        gather_inside(self._group, self._copies[name], shard.form.codec, out_N, room)
        self._versions[name] = shard.version


def node_copy_bytes(shards: Shards) -> dict[str, int]:
    """Bytes of a rank's part of the node's copy, by flat parameter: its encoded shards on all nodes."""
    copied = {name: shard.form for name, shard in shards.main.items() if shard.form.copied}
    return {name: form.ranks.num_nodes * form.wire_bytes for name, form in copied.items()}


@dataclass(slots=True)
class WeightBuffer:
    """A bucket's weight buffer. ``pool`` None: the shards are the buffer. ``is_shared``: other buckets use it too."""

    pool: BufferPool | None
    number: int
    name: str
    views: dict[str, Tensor]  # by flat parameter, (N,)
    is_shared: bool
    versions: dict[str, int]  # by flat parameter, the version in the buffer


def shares_weight_buffer(options: EngineOptions, bucket: Bucket) -> bool:
    """Whether the bucket's weight buffer is also that of others."""
    return options.may_share(bucket) and not options.sharding.keep_weights


def share_buffers(
    elems: Mapping[Bucket, int], num_buffers: int, elem_bytes: int, device: torch.device
) -> dict[int, tuple[BufferPool, int, str]]:
    """By bucket number: pool, buffer's number there, and its name. Blocks take turns in ``num_buffers``; the ends have one."""
    found = {}
    for count, is_block in ((num_buffers, True), (1, False)):
        own = [bucket for bucket in elems if (bucket.block is not None) == is_block]
        pool = BufferPool(count, max(elems[bucket] for bucket in own) * elem_bytes, device) if own else None
        for bucket in own if pool else ():
            number = (bucket.block or 0) % count
            found[bucket.number] = pool, number, str(number) if is_block else "ends"
    return found


def room_bytes(shards: Shards) -> int:
    """Bytes of the lane's receive buffer, for weights that are encoded or gathered across nodes in two legs."""
    forms = [shard.form for shard in shards.all.values()]
    needed = [form for form in forms if not form.codec.exact or form.two_legs]
    return max((form.ranks.world_size * form.wire_bytes for form in needed), default=0)


def blocks_bytes(shards: Shards) -> int:
    """Bytes of the lane's buffer of gathered blocks, from which matrices are decoded."""
    gathered = [shard for shard in shards.frozen.values() if shard.form.ranks.world_size > 1]
    return max((blocks.num_elems for shard in gathered if (blocks := shard.flat_param.blocks)), default=0)


def make_buffers(plan: BucketPlan, options: EngineOptions, shards: Shards, device: torch.device) -> list[WeightBuffer]:
    """The weight buffer of each bucket, allocated. Raises ValueError: ``reshard_ends`` without a head of its own."""
    if options.reshard_ends and HEAD not in [bucket.name for bucket in plan.buckets]:
        raise ValueError("parallel.reshard_ends: the head is the embedding, so they have one buffer; leave it out")
    size = options.compute_dtype.itemsize
    elems = {bucket: bucket.num_elems for bucket in plan.buckets if shares_weight_buffer(options, bucket)}
    shared = share_buffers(elems, options.num_buffers, size, device)
    buffers = []
    for bucket in plan.buckets:
        is_shared = bucket.number in shared
        views = {} if is_shared else _whole_shards(bucket, shards)
        if views:
            buffers.append(WeightBuffer(None, 0, bucket.name, views, False, {}))
            continue
        alone = None if is_shared else BufferPool(1, bucket.num_elems * size, device)
        pool, number, name = (alone, 0, bucket.name) if alone else shared[bucket.number]
        numbers = pool.buffers[number].memory.view(options.compute_dtype)[: bucket.num_elems]
        sizes = [flat_param.num_elems for flat_param in bucket.flat_params]
        views = {fp.name: view for fp, view in zip(bucket.flat_params, numbers.split(sizes), strict=True)}
        buffers.append(WeightBuffer(pool, number, f"weights {name}", views, is_shared, {}))
    return buffers


def _whole_shards(bucket: Bucket, shards: Shards) -> dict[str, Tensor]:
    """The shards of ``bucket`` if modules can compute with them: they are whole flat parameters. Else nothing."""
    own = [shards.all[flat_param.name] for flat_param in bucket.flat_params]
    numbers = {shard.flat_param.name: shard.computable() for shard in own if shard.form.ranks.world_size == 1}
    views = {name: numbers_N for name, numbers_N in numbers.items() if numbers_N is not None}
    return views if len(views) == len(own) else {}


def _unpack(flat_param: FlatParameter, blocks: FlatParameter, blocks_B: Tensor, out_N: Tensor) -> None:
    for param, place, packed in zip(flat_param.params, blocks.params, flat_param.formats, strict=True):
        parts = param.of(out_N).split(_UNPACKED_ROWS), place.of(blocks_B).split(_UNPACKED_ROWS)
        for numbers, blocks_OB in zip(*parts, strict=True):
            numbers.copy_(dequantize(PackedMatrix(blocks_OB, packed), numbers.dtype))


def gather_shard(shard: Shard, lane_group: Group, group: Group, out_N: Tensor, room: Tensor) -> None:
    """Fill ``out_N`` with a flat parameter, or the bytes of its blocks. ``group``: the ranks of ``lane_group`` that share it."""
    given = group, shard.wire(), shard.form.codec, out_N, room
    if shard.form.two_legs:
        gather_over_nodes(*given)
    else:
        run_leg(lane_group, group, gather_shards, *given)


class Weights:
    """The weights that modules compute with: the computing thread calls the methods, and the lane's thread gathers.

    ``waited_s``: seconds that the computing thread has waited.
    """

    def __init__(
        self, plan: BucketPlan, shards: Shards, options: EngineOptions, lane_group: Group, trace: Trace
    ) -> None:
        self.waited_s = 0.0
        self._plan, self._shards, self._trace = plan, shards.all, trace
        self._lane_group, self._group = lane_group, shard_group(lane_group, options.sharding)
        self._patience_s = PATIENCE * lane_group.timeout_s
        self._node_copy = NodeCopy(shards, lane_group)
        self._buffers = make_buffers(plan, options, shards, lane_group.device)
        self._pools = list({id(buffer.pool): buffer.pool for buffer in self._buffers if buffer.pool}.values())
        sizes = room_bytes(shards), blocks_bytes(shards)
        self._room, self._blocks = (torch.empty(size, dtype=torch.uint8, device=lane_group.device) for size in sizes)
        self._held: set[int] = set()  # buckets requested and not released
        self._lane = Lane("gather", lane_group.device, partial(close_pools, self._pools))

    def request(self, bucket: Bucket) -> None:
        """Have the lane gather ``bucket``, unless it is gathered or requested already."""
        buffer = self._buffers[bucket.number]
        if buffer.pool is None or bucket.number in self._held:
            return
        self._held.add(bucket.number)
        gather = partial(self._gather_bucket, bucket, buffer)
        # Once the buffer is free: then all ranks give their lanes the same work between the same steps of computing.
        buffer.pool.fill_later(bucket.number, buffer.number, lambda: self._lane.start(gather))

    def use(self, bucket: Bucket) -> None:
        """Wait until ``bucket`` is gathered; it stays so until ``done``."""
        self.request(bucket)
        buffer = self._buffers[bucket.number]
        if buffer.pool is None:
            return
        start_s = time.perf_counter()
        buffer.pool.use(bucket.number, self._patience_s)
        self.waited_s += time.perf_counter() - start_s
        self._trace("compute", True, bucket.name, buffer.name)

    def done(self, bucket: Bucket, keep: bool) -> None:
        """End the use of ``bucket``. ``keep``: do not release it, because it will be used again in this version."""
        buffer = self._buffers[bucket.number]
        if buffer.pool is None:
            return
        self._trace("compute", False, bucket.name, buffer.name)
        if keep or not buffer.is_shared:
            buffer.pool.keep(bucket.number)
        else:
            buffer.pool.release(bucket.number)
            self._held.remove(bucket.number)

    def view(self, bucket: Bucket, flat_param: FlatParameter, param: ParamSpan) -> Tensor:
        """A view of a parameter in its buffer, without the buffer's version counter: the lane writes there later."""
        return param.of(self._buffers[bucket.number].views[flat_param.name].data)

    def drop_shared(self) -> None:
        """Release the buckets in shared buffers that were kept or gathered ahead."""
        for bucket in self._plan.buckets:
            if self._buffers[bucket.number].is_shared:
                self._drop(bucket)

    def changed(self) -> None:
        """Release buckets of an older version."""
        for bucket, buffer in zip(self._plan.buckets, self._buffers, strict=True):
            if any(buffer.versions.get(name) != self._shards[name].version for name in buffer.views):
                self._drop(bucket)

    def close(self, reason: BaseException) -> None:
        close_pools(self._pools, reason)
        self._lane.close()

    def _drop(self, bucket: Bucket) -> None:
        buffer = self._buffers[bucket.number]
        if buffer.pool is not None and bucket.number in self._held:
            buffer.pool.use(bucket.number, self._patience_s)  # the lane may still be gathering it
            buffer.pool.release(bucket.number)
            self._held.remove(bucket.number)

    def _gather_bucket(self, bucket: Bucket, buffer: WeightBuffer) -> None:
        assert buffer.pool is not None
        self._trace("gather", True, bucket.name, buffer.name)
        for flat_param in bucket.flat_params:
            shard = self._shards[flat_param.name]
            # A buffer of its own still holds an unchanged (frozen) flat parameter.
            if buffer.is_shared or buffer.versions.get(flat_param.name) != shard.version:
                self._gather(shard, buffer.views[flat_param.name])
                buffer.versions[flat_param.name] = shard.version
        self._trace("gather", False, bucket.name, buffer.name)
        buffer.pool.filled(bucket.number)
        for pool in self._pools:
            pool.moved()  # extends the deadline of waits for later buckets

    def _gather(self, shard: Shard, out_N: Tensor) -> None:
        form, group, blocks = shard.form, group_of(shard.form, self._group), shard.flat_param.blocks
        if blocks is not None and form.ranks.world_size == 1:
            return _unpack(shard.flat_param, blocks, shard.wire(), out_N)
        gathered = out_N if blocks is None else self._blocks[: blocks.num_elems]
        if form.copied and isinstance(shard, MainShard):
            self._node_copy.gather(shard, gathered, self._room)
        else:
            gather_shard(shard, self._lane_group, group, gathered, self._room)
        if blocks is not None:
            _unpack(shard.flat_param, blocks, gathered, out_N)
