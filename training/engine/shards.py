"""One rank's shards of the flat parameters, and the form in which each is gathered.

A trainable flat parameter keeps float32 numbers (``MainShard``) and encodes them once per version. A frozen one keeps its encoded
bytes only (``FrozenShard``), in the same codec on any number of ranks, so its bits do not depend on their number. With
``secondary`` frozen flat parameters are sharded over the ranks of a node: each node has all of them, and their gathers stay inside it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tightwire.comm.codec.codec import NONE, Codec, parse_codec
from tightwire.comm.group.group import Group
from tightwire.training.config.sharding import GroupShape
from tightwire.training.config.tree import PACKED
from tightwire.training.engine.flat_parameters import NORMS, Bucket, BucketPlan, FlatParameter
from tightwire.training.engine.options import EngineOptions


@dataclass(frozen=True, slots=True)
class Form:
    """How a flat parameter is sharded and sent.

    ``ranks``: the ranks it is sharded over. ``two_legs``: it is gathered across nodes, then inside them. ``copied``: each node
    keeps a copy of what came from other nodes. ``wire_bytes``: of one rank's encoded shard.
    """

    ranks: GroupShape
    codec: Codec
    two_legs: bool
    copied: bool
    wire_bytes: int


def form_of(options: EngineOptions, bucket: Bucket, flat_param: FlatParameter, ranks: GroupShape) -> Form:
    """The form in which ``flat_param`` is gathered. ``ranks``: the shard group.

    Norms and biases are not quantized, nor are trainable weights of a single rank; blocks are sent as they are.
    """
    codec_name = options.gather_codec
    if not flat_param.trainable:
        codec_name = "none" if options.frozen_codec == PACKED else options.frozen_codec or codec_name
        ranks = GroupShape(1, ranks.per_node) if options.secondary else ranks
    elif ranks.world_size == 1:
        codec_name = "none"
    codec = NONE if bucket.name == NORMS else parse_codec(codec_name)
    copied = options.secondary and flat_param.trainable and options.may_share(bucket)
    two_legs = ranks.num_nodes > 1 and (copied or options.gather_path == "hierarchical")
    kept, size = (flat_param, options.compute_dtype.itemsize) if flat_param.blocks is None else (flat_param.blocks, 1)
    return Form(ranks, codec, two_legs, copied, codec.wire_bytes(kept.num_elems // ranks.world_size, size))


def group_of(form: Form, group: Group) -> Group:
    """The ranks of the shard group ``group`` that a flat parameter of this form is sharded over."""
    return group.nodes.inside if group.nodes is not None and form.ranks.world_size < group.world_size else group


class MainShard:
    """This rank's float32 numbers of a trainable flat parameter, ``main``, (N / ranks,).

    ``version`` increases when they change; copies of an older version are invalid.
    Cost: 4 bytes an element, plus the encoded bytes (``encoded``) unless those are ``main`` itself (float32, exact codec).
    """

    def __init__(self, flat_param: FlatParameter, form: Form, dtype: torch.dtype, device: torch.device) -> None:
        """``dtype``: of the computing weights, and of the wire if the codec is exact."""
        self.flat_param, self.form, self._dtype = flat_param, form, dtype
        self.version = 0
        self.main = nn.Parameter(torch.zeros(flat_param.num_elems // form.ranks.world_size, device=device))
        is_main = form.codec.exact and dtype == torch.float32
        self.encoded = None if is_main else torch.empty(form.wire_bytes, dtype=torch.uint8, device=device)
        self._encoded_version = -1

    def wire(self) -> Tensor:
        """The encoded shard, encoded once per version."""
        numbers_S = self.main.data
        if self.encoded is None:
            return numbers_S.view(torch.uint8)
        if self._encoded_version != self.version:
            _encode(self.form.codec, numbers_S, self._dtype, self.encoded)
            self._encoded_version = self.version
        return self.encoded

    def computable(self) -> Tensor | None:
        """The shard as numbers that modules can compute with, if it has them in memory."""
        return self.main.data if self.encoded is None else None


class FrozenShard:
    """This rank's bytes of a frozen flat parameter, ``encoded``, as they are gathered. ``version`` increases at each ``load``.

    ``sum``: the loaded numbers' bits, added up as integers, so every single-bit difference of a model changes it.
    """

    def __init__(self, flat_param: FlatParameter, form: Form, dtype: torch.dtype, device: torch.device) -> None:
        """``dtype``: of the computing weights, and of the bytes if the codec is exact."""
        self.flat_param, self.form, self._dtype = flat_param, form, dtype
        self.version = self.sum = 0
        self.encoded = torch.zeros(form.wire_bytes, dtype=torch.uint8, device=device)

    def load(self, numbers_S: Tensor, blocks_S: Tensor | None) -> None:
        """``blocks_S``: this rank's bytes of a flat parameter that is kept in blocks."""
        self.sum = sum_bits(numbers_S)
        self.version += 1
        if blocks_S is None:
            _encode(self.form.codec, numbers_S, self._dtype, self.encoded)
        else:
            self.encoded.copy_(blocks_S)

    def wire(self) -> Tensor:
        return self.encoded

    def computable(self) -> Tensor | None:
        has_numbers = self.form.codec.exact and self.flat_param.blocks is None
        return self.encoded.view(self._dtype) if has_numbers else None


Shard = MainShard | FrozenShard


class Shards(NamedTuple):
    """This rank's shards by flat parameter."""

    main: dict[str, MainShard]
    frozen: dict[str, FrozenShard]

    @property
    def all(self) -> dict[str, Shard]:
        return {**self.main, **self.frozen}


def make_shards(plan: BucketPlan, options: EngineOptions, ranks: GroupShape, device: torch.device) -> Shards:
    """The shards, zeros. ``ranks``: the shard group."""
    shards = Shards({}, {})
    for bucket in plan.buckets:
        for flat_param in bucket.flat_params:
            made = flat_param, form_of(options, bucket, flat_param, ranks), options.compute_dtype, device
            if flat_param.trainable:
                shards.main[flat_param.name] = MainShard(*made)
            else:
                shards.frozen[flat_param.name] = FrozenShard(*made)
    return shards


def sum_bits(numbers_N: Tensor) -> int:
    """The bits of float32 numbers, added up as integers: exact, so every single-bit difference changes it, also in a NaN."""
    return int(numbers_N.detach().view(torch.int32).sum(dtype=torch.int64))


def _encode(codec: Codec, numbers_S: Tensor, dtype: torch.dtype, out: Tensor) -> None:
    if codec.exact:
        out.view(dtype).copy_(numbers_S)
    else:
        codec.encode(numbers_S, out)
