"""One rank's shards of the weights: the float32 values that the optimizer updates, and its share of the copy that its node keeps."""

import torch
from torch import Tensor, nn

from tightwire.comm.codec.codec import Codec, parse_codec
from tightwire.comm.collectives.collectives import NONE, gather_across, gather_inside
from tightwire.comm.group.group import Group
from tightwire.training.engine.flat_parameters import NORMS, Bucket, BucketPlan, FlatParameter
from tightwire.training.engine.options import EngineOptions


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

        ``room``: as in ``comm.collectives.collectives``.
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
