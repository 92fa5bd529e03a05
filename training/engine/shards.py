"""One rank's shards of the weights: the float32 values that the optimizer updates, and its share of the copy that its node keeps."""

import torch
from torch import Tensor, nn

from tightwire.comm.codec.codec import Codec, parse_codec
from tightwire.comm.collectives.shard_gather import gather_across, gather_inside, gather_node_copy, gather_over_nodes
from tightwire.comm.group.group import Group
from tightwire.training.engine.flat_parameters import Bucket, FlatParameter
from tightwire.training.engine.options import EngineOptions


class MainShard:
    """``main`` is float32, (N / ranks,). ``version`` increases when it changes; copies of an older version are invalid.

    Cost: 4 bytes an element, plus the encoded bytes unless those are ``main`` itself (float32, exact codec).
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
        self._wire: Tensor | None = None
        if not (codec.exact and dtype == torch.float32):
            self._wire = torch.empty(
                shard_wire_bytes(flat_param, num_ranks, codec, dtype), dtype=torch.uint8, device=device
            )
        self._wire_version = -1

    def wire(self) -> Tensor:
        """The encoded shard, encoded once per version."""
        numbers_S = self.main.data
        if self._wire is None:
            return numbers_S.view(torch.uint8)
        if self._wire_version != self.version:
            if self.codec.exact:
                self._wire.view(self._dtype).copy_(numbers_S)
            else:
                self.codec.encode(numbers_S, self._wire)
            self._wire_version = self.version
        return self._wire


def shard_wire_bytes(flat_param: FlatParameter, num_ranks: int, codec: Codec, dtype: torch.dtype) -> int:
    """Bytes of one rank's encoded shard."""
    return codec.wire_bytes(flat_param.num_elems // num_ranks, dtype.itemsize)


def kept_buckets(options: EngineOptions, blocks: tuple[Bucket, ...]) -> tuple[Bucket, ...]:
    """The blocks that nodes keep copies of."""
    if not options.secondary:
        return ()
    return blocks if options.secondary_blocks is None else blocks[: options.secondary_blocks]


class Secondary:
    """This rank's 1/L of its node's copy of the blocks' weights, so that repeated gathers stay inside the node.

    By default the copy is the bytes received from other nodes, so later gathers give the same bits. A copy is valid for
    one version of the weights; when they change, the next gather crosses nodes again.

    Source: hpZ of ZeRO++, arXiv 2306.10209. Cost: ``secondary_bytes`` of each flat parameter, allocated at construction.
    """

    def __init__(
        self, options: EngineOptions, shards: dict[str, MainShard], buckets: tuple[Bucket, ...], group: Group
    ) -> None:
        self._group = group
        self._codec = None if options.secondary_codec is None else parse_codec(options.secondary_codec)
        self._copies: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}
        if not buckets:
            return
        assert group.nodes is not None, "options.check_ranks() was not called"
        self._num_nodes, self._ranks_per_node = group.nodes.across.world_size, group.nodes.inside.world_size
        for flat_param in (flat_param for bucket in buckets for flat_param in bucket.flat_params):
            wire_bytes = shards[flat_param.name].wire().numel()
            own = secondary_bytes(
                flat_param, self._num_nodes, self._ranks_per_node, wire_bytes, self._codec, options.compute_dtype
            )
            self._copies[flat_param.name] = torch.empty(own, dtype=torch.uint8, device=group.device)

    def keeps(self, flat_param: FlatParameter) -> bool:
        return flat_param.name in self._copies

    def gather(self, shard: MainShard, out_N: Tensor, room: Tensor) -> None:
        """Fill ``out_N`` with the weights of a flat parameter: from the node's copy if it is current, else across nodes.

        ``room``: as in ``comm.collectives.shard_gather``.
        """
        name = shard.flat_param.name
        copy = self._copies[name]
        if self._versions.get(name) != shard.version:
            self._fetch_copy(shard, copy, out_N, room)
        elif self._codec is None:
            gather_inside(self._group, copy, shard.codec, out_N, room)
        else:
            gather_node_copy(self._group, copy, self._codec, out_N, room)

    def _fetch_copy(self, shard: MainShard, copy: Tensor, out_N: Tensor, room: Tensor) -> None:
        name = shard.flat_param.name
        self._versions.pop(name, None)  # the copy is overwritten from here on
        if self._codec is None:
            gather_across(self._group, shard.wire(), copy)
            gather_inside(self._group, copy, shard.codec, out_N, room)
        else:
            gather_over_nodes(self._group, shard.wire(), shard.codec, out_N, room)
            assert self._group.nodes is not None
            own = out_N.chunk(self._ranks_per_node)[self._group.nodes.inside.rank]
            self._codec.encode(own, copy)
        self._versions[name] = shard.version


def secondary_bytes(
    flat_param: FlatParameter,
    num_nodes: int,
    ranks_per_node: int,
    wire_bytes: int,
    codec: Codec | None,
    dtype: torch.dtype,
) -> int:
    """Bytes of a rank's 1/L of a flat parameter whose encoded shard has ``wire_bytes``. ``codec``: of the copy, if any."""
    if codec is None:
        return num_nodes * wire_bytes
    return codec.wire_bytes(flat_param.num_elems // ranks_per_node, dtype.itemsize)
