"""One rank's shards of the weights, and their gathering: the computing thread requests them, the lane gathers them into a buffer.

Block i always uses buffer i % ``num_buffers``, so that views saved by autograd are valid again when backward gathers the
block again. The other buckets, and the blocks if sharding keeps whole weights, have their own buffers and are gathered once per
version. If one rank holds a whole flat parameter in float32 and computes in float32, the main shard is the buffer.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tightwire.buffers import BufferPool
from tightwire.comm.codec.codec import NONE, Codec, parse_codec
from tightwire.comm.collectives.gather_shards import gather_across, gather_inside, gather_over_nodes, gather_shards
from tightwire.comm.group.group import Group
from tightwire.comm.group.nodes import run_leg
from tightwire.comm.lane import Lane
from tightwire.training.config.sharding import GroupShape
from tightwire.training.engine.flat_parameters import NORMS, Bucket, BucketPlan, FlatParameter, ParamSpan
from tightwire.training.engine.options import EngineOptions
from tightwire.training.ranks.groups import shard_group

# Told kind (gather, compute, write or reduce), whether it begins, bucket, and buffer: of the work itself, not of the waits.
Trace = Callable[[str, bool, str, str], None]
PATIENCE = 4  # in timeouts of a collective: a wait for the lane may include earlier collectives


def gather_codec(options: EngineOptions, bucket: Bucket, shard_ranks: int) -> Codec:
    """The codec of a bucket's gathered weights. Norms and biases, and weights of a single rank, are not quantized."""
    return NONE if shard_ranks == 1 or bucket.name == NORMS else parse_codec(options.gather_codec)


def shard_wire_bytes(flat_param: FlatParameter, num_ranks: int, codec: Codec, dtype: torch.dtype) -> int:
    """Bytes of one rank's encoded shard."""
    return codec.wire_bytes(flat_param.num_elems // num_ranks, dtype.itemsize)


class MainShard:
    """``main`` is float32, (N / ranks,). ``version`` increases when it changes; copies of an older version are invalid.

    Cost: 4 bytes an element, plus the encoded bytes (``encoded``) unless those are ``main`` itself (float32, exact codec).
    """

    def __init__(
        self, flat_param: FlatParameter, num_ranks: int, codec: Codec, dtype: torch.dtype, device: torch.device
    ) -> None:
        """``dtype``: of the computing weights, and of the wire if the codec is exact."""
        self.flat_param = flat_param
        self.codec = codec
        self.version = 0
        num_elems = flat_param.num_elems // num_ranks
        self.main = nn.Parameter(torch.zeros(num_elems, device=device), requires_grad=flat_param.trainable)
        self._dtype = dtype
        num_bytes = shard_wire_bytes(flat_param, num_ranks, codec, dtype)
        is_main = codec.exact and dtype == torch.float32
        self.encoded = None if is_main else torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._encoded_version = -1

    def wire(self) -> Tensor:
        """The encoded shard, encoded once per version."""
        numbers_S = self.main.data
        if self.encoded is None:
            return numbers_S.view(torch.uint8)
        if self._encoded_version != self.version:
            if self.codec.exact:
                self.encoded.view(self._dtype).copy_(numbers_S)
            else:
                self.codec.encode(numbers_S, self.encoded)
            self._encoded_version = self.version
        return self.encoded


def make_shards(plan: BucketPlan, options: EngineOptions, device: torch.device) -> dict[str, MainShard]:
    """This rank's shards by flat parameter, zeros."""
    ranks = plan.shard_ranks
    return {
        flat_param.name: MainShard(
            flat_param, ranks, gather_codec(options, bucket, ranks), options.compute_dtype, device
        )
        for bucket in plan.buckets
        for flat_param in bucket.flat_params
    }


class NodeCopy:
    """This rank's 1/L of its node's copy of the blocks' weights, so that repeated gathers stay inside the node.

    The copy is the bytes received from other nodes, so later gathers give the same bits. It is valid for one version of the
    weights; when they change, the next gather crosses nodes again.

    Source: hpZ of ZeRO++, arXiv 2306.10209. Cost: ``node_copy_bytes`` of each flat parameter, allocated at construction.
    """

    def __init__(self, options: EngineOptions, plan: BucketPlan, num_nodes: int, group: Group) -> None:
        self._group = group
        self._versions: dict[str, int] = {}
        self._copies = {
            name: torch.empty(num_bytes, dtype=torch.uint8, device=group.device)
            for name, num_bytes in node_copy_bytes(options, plan, num_nodes).items()
        }

    def keeps(self, flat_param: FlatParameter) -> bool:
        return flat_param.name in self._copies

    def gather(self, shard: MainShard, out_N: Tensor, room: Tensor) -> None:
        """Fill ``out_N`` with the weights of a flat parameter: from the node's copy if it is current, else across nodes.

        ``room``: as in ``comm.collectives.gather_shards``.
        """
        name = shard.flat_param.name
        if self._versions.get(name) != shard.version:
            self._versions.pop(name, None)  # the copy is overwritten from here on
            gather_across(self._group, shard.wire(), self._copies[name])
        gather_inside(self._group, self._copies[name], shard.codec, out_N, room)
        self._versions[name] = shard.version


def node_copy_bytes(options: EngineOptions, plan: BucketPlan, num_nodes: int) -> dict[str, int]:
    """Bytes of a rank's part of the node's copy, by flat parameter: its encoded shards on all nodes."""
    kept = plan.blocks if options.secondary else ()
    return {
        flat_param.name: num_nodes
        * shard_wire_bytes(
            flat_param, plan.shard_ranks, gather_codec(options, bucket, plan.shard_ranks), options.compute_dtype
        )
        for bucket in kept
        for flat_param in bucket.flat_params
    }


@dataclass(slots=True)
class BucketBuffer:
    """A bucket's weight buffer. ``pool`` None: the main shard is the buffer. ``alternates``: other buckets share it."""

    pool: BufferPool | None
    number: int
    name: str
    views: dict[str, Tensor]  # by flat parameter, (N,)
    alternates: bool
    versions: dict[str, int]  # by flat parameter, the version in the buffer


def alternates(options: EngineOptions, bucket: Bucket) -> bool:
    """Whether the bucket shares its weight buffer with others."""
    return bucket.block is not None and not options.sharding.keep_weights


def is_in_shard(options: EngineOptions, bucket: Bucket, shard_ranks: int) -> bool:
    """Whether the main shard itself is the buffer that modules compute with."""
    return shard_ranks == 1 and options.compute_dtype == torch.float32 and not alternates(options, bucket)


def room_bytes(plan: BucketPlan, options: EngineOptions, shape: GroupShape) -> int:
    """Bytes of the lane's receive buffer, for weights that are encoded or gathered across nodes in two legs."""
    ranks = shape.world_size
    return max(
        (
            ranks * shard_wire_bytes(flat_param, ranks, codec, options.compute_dtype)
            for bucket in plan.buckets
            for codec in [gather_codec(options, bucket, ranks)]
            if not codec.exact or in_two_legs(options, bucket, shape)
            for flat_param in bucket.flat_params
        ),
        default=0,
    )


def in_two_legs(options: EngineOptions, bucket: Bucket, shape: GroupShape) -> bool:
    """Whether the bucket is gathered across nodes first and then inside them."""
    kept = options.secondary and bucket.block is not None
    return shape.num_nodes > 1 and (options.gather_path == "hierarchical" or kept)


def make_buffers(
    plan: BucketPlan, options: EngineOptions, shards: dict[str, MainShard], device: torch.device
) -> list[BucketBuffer]:
    """The weight buffer of each bucket, allocated."""
    size = options.compute_dtype.itemsize
    shared = None
    if any(alternates(options, bucket) for bucket in plan.buckets):
        room = max(bucket.num_elems for bucket in plan.blocks)
        shared = BufferPool(options.num_buffers, room * size, device)
    places = []
    for bucket in plan.buckets:
        if is_in_shard(options, bucket, plan.shard_ranks):
            views = {flat_param.name: shards[flat_param.name].main.data for flat_param in bucket.flat_params}
            places.append(BucketBuffer(None, 0, bucket.name, views, False, {}))
            continue
        alternating = alternates(options, bucket)
        number = (bucket.block or 0) % options.num_buffers if alternating else 0
        pool = shared if alternating and shared is not None else BufferPool(1, bucket.num_elems * size, device)
        name = f"weights {number if alternating else bucket.name}"
        numbers = pool.buffers[number].memory.view(options.compute_dtype)[: bucket.num_elems]
        sizes = [flat_param.num_elems for flat_param in bucket.flat_params]
        views = {fp.name: view for fp, view in zip(bucket.flat_params, numbers.split(sizes), strict=True)}
        places.append(BucketBuffer(pool, number, name, views, alternating, {}))
    return places


class Weights:
    """Called by the computing thread; the lane gathers. ``waited_s``: seconds that the computing thread has waited."""

    def __init__(
        self, plan: BucketPlan, shards: dict[str, MainShard], options: EngineOptions, lane_group: Group, trace: Trace
    ) -> None:
        self.waited_s = 0.0
        self._plan, self._shards, self._options, self._trace = plan, shards, options, trace
        self._lane_group = lane_group
        self._group = shard_group(lane_group, options.sharding)
        self._patience_s = PATIENCE * lane_group.timeout_s
        num_nodes = 1 if self._group.nodes is None else self._group.nodes.across.world_size
        shape = GroupShape(num_nodes, self._group.world_size // num_nodes)
        self._node_copy = NodeCopy(options, plan, num_nodes, lane_group)
        self._bucket_buffers = make_buffers(plan, options, shards, lane_group.device)
        self._pools = list({id(place.pool): place.pool for place in self._bucket_buffers if place.pool}.values())
        self._room = torch.empty(room_bytes(plan, options, shape), dtype=torch.uint8, device=lane_group.device)
        self._held: set[int] = set()  # buckets requested and not released
        self._lane = Lane("gather", lane_group.device, self._close_pools)

    def request(self, bucket: Bucket) -> None:
        """Have the lane gather ``bucket``, unless it is gathered or requested already."""
        place = self._bucket_buffers[bucket.number]
        if place.pool is None or bucket.number in self._held:
            return
        self._held.add(bucket.number)
        self._lane.start(lambda: self._gather_bucket(bucket, place))

    def use(self, bucket: Bucket) -> None:
        """Wait until ``bucket`` is gathered; it stays so until ``done``."""
        self.request(bucket)
        place = self._bucket_buffers[bucket.number]
        if place.pool is None:
            return
        start_s = time.perf_counter()
        place.pool.use(bucket.number, self._patience_s)
        self.waited_s += time.perf_counter() - start_s
        self._trace("compute", True, bucket.name, place.name)

    def done(self, bucket: Bucket, keep: bool) -> None:
        """End the use of ``bucket``. ``keep``: do not release it, because it will be used again in this version."""
        place = self._bucket_buffers[bucket.number]
        if place.pool is None:
            return
        self._trace("compute", False, bucket.name, place.name)
        if keep or not place.alternates:
            place.pool.keep(bucket.number)
        else:
            place.pool.release(bucket.number)
            self._held.remove(bucket.number)

    def view(self, bucket: Bucket, flat_param: FlatParameter, param: ParamSpan) -> Tensor:
        """A view of a parameter in its buffer, without the buffer's version counter: the lane writes there later."""
        return param.of(self._bucket_buffers[bucket.number].views[flat_param.name].data)

    def drop_blocks(self) -> None:
        """Release the blocks that were kept or gathered ahead."""
        for bucket in self._plan.blocks:
            if self._bucket_buffers[bucket.number].alternates:
                self._drop(bucket)

    def changed(self) -> None:
        """Release buckets of an older version."""
        for bucket in self._plan.buckets:
            place = self._bucket_buffers[bucket.number]
            if any(
                place.versions.get(flat_param.name) != self._shards[flat_param.name].version
                for flat_param in bucket.flat_params
            ):
                self._drop(bucket)

    def close(self, reason: BaseException) -> None:
        self._close_pools(reason)
        self._lane.close()

    def _drop(self, bucket: Bucket) -> None:
        place = self._bucket_buffers[bucket.number]
        if place.pool is not None and bucket.number in self._held:
            place.pool.use(bucket.number, self._patience_s)  # the lane may still be gathering it
            place.pool.release(bucket.number)
            self._held.remove(bucket.number)

    def _gather_bucket(self, bucket: Bucket, place: BucketBuffer) -> None:
        assert place.pool is not None
        place.pool.fill(bucket.number, place.number)
        self._trace("gather", True, bucket.name, place.name)
        for flat_param in bucket.flat_params:
            shard = self._shards[flat_param.name]
            # A buffer of its own still holds an unchanged (frozen) flat parameter.
            if place.alternates or place.versions.get(flat_param.name) != shard.version:
                self._gather(shard, place.views[flat_param.name])
                place.versions[flat_param.name] = shard.version
        self._trace("gather", False, bucket.name, place.name)
        place.pool.filled(bucket.number)
        for pool in self._pools:
            pool.moved()  # extends the deadline of waits for later buckets

    def _gather(self, shard: MainShard, out_N: Tensor) -> None:
        group = self._group
        if self._node_copy.keeps(shard.flat_param):
            self._node_copy.gather(shard, out_N, self._room)
        elif group.nodes is not None and self._options.gather_path == "hierarchical":
            gather_over_nodes(group, shard.wire(), shard.codec, out_N, self._room)
        else:
            run_leg(self._lane_group, group, gather_shards, group, shard.wire(), shard.codec, out_N, self._room)

    def _close_pools(self, reason: BaseException) -> None:
        for pool in self._pools:
            pool.close(reason)
