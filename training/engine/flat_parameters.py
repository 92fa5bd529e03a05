"""Divides a model's parameters into buckets, which are gathered and reduced as a whole, and lays out their flat parameters.

    embedding   the token embedding, and the head if they are tied
    blocks.I    the matrices of decoder block I, or of several blocks that follow each other
    head        the final projection
    norms       all one-dimensional parameters of the model: norms and biases

The parameters of a bucket are concatenated to a flat parameter, each at a multiple of ``ALIGN_ELEMS``, independent of the number
of ranks. Only the padding at the end depends on it: shards have equal length and consist of whole codec groups. Frozen
parameters are in a flat parameter of their own (``.frozen``) without gradients, and those that are kept in the blocks of their file
in another (``.packed``).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from torch import Tensor, nn

from tightwire.kernels.spec.gguf_blocks import PackedFormat

FLOAT32_BYTES = 4
ALIGN_ELEMS = 16  # a cache line of float32
SHARD_MULTIPLE = 256  # elements of a shard: whole groups of every codec, whole words at every bit width

EMBEDDING, HEAD, NORMS = "embedding", "head", "norms"
ENDS = EMBEDDING, HEAD


class ParamSpan(NamedTuple):
    """One parameter's position in a flat parameter."""

    name: str  # as in model.named_parameters()
    shape: tuple[int, ...]
    start: int
    num_elems: int

    def of(self, flat_N: Tensor) -> Tensor:
        return flat_N[self.start : self.start + self.num_elems].view(self.shape)


@dataclass(frozen=True, slots=True)
class FlatParameter:
    """Parameters as one vector. ``num_elems`` includes padding and is a multiple of shard ranks * SHARD_MULTIPLE.

    ``formats``: of parameters that are kept in blocks, and ``blocks``: the same matrices as bytes, each (rows, bytes of a row).
    """

    name: str
    params: tuple[ParamSpan, ...]
    num_elems: int
    trainable: bool
    formats: tuple[PackedFormat, ...] = ()
    blocks: "FlatParameter | None" = None

    @property
    def num_parameters(self) -> int:
        return sum(param.num_elems for param in self.params)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that are gathered together. ``flat_params``: trainable, frozen, packed; at least one. ``block``: its index."""

    number: int
    name: str
    block: int | None
    flat_params: tuple[FlatParameter, ...]

    @property
    def trainable(self) -> FlatParameter | None:
        return self.flat_params[0] if self.flat_params[0].trainable else None

    @property
    def num_elems(self) -> int:
        return sum(flat_param.num_elems for flat_param in self.flat_params)

    @property
    def num_parameters(self) -> int:
        return sum(flat_param.num_parameters for flat_param in self.flat_params)


class Use(NamedTuple):
    """A module attribute that is a parameter; a tied parameter has several uses."""

    module: str
    attribute: str
    bucket: Bucket
    flat_param: FlatParameter
    param: ParamSpan


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The buckets of a model for ``shard_ranks`` ranks, and the module attributes that use their parameters."""

    buckets: tuple[Bucket, ...]
    uses: tuple[Use, ...]
    block_modules: tuple[str, ...]
    shard_ranks: int
    per_bucket: int = 1  # of ``block_modules``; the last bucket of blocks may have fewer

    @property
    def flat_params(self) -> Iterator[FlatParameter]:
        return (flat_param for bucket in self.buckets for flat_param in bucket.flat_params)

    @property
    def blocks(self) -> tuple[Bucket, ...]:
        return tuple(bucket for bucket in self.buckets if bucket.block is not None)

    @property
    def trainable(self) -> list[FlatParameter]:
        return [flat_param for flat_param in self.flat_params if flat_param.trainable]

    @property
    def num_parameters(self) -> int:
        return sum(bucket.num_parameters for bucket in self.buckets)

    @property
    def num_trainable(self) -> int:
        return sum(flat_param.num_parameters for flat_param in self.trainable)


def plan_buckets(
    model: nn.Module, shard_ranks: int, packed: Mapping[str, PackedFormat] | None = None, per_bucket: int = 1
) -> BucketPlan:
    """Plan the buckets of ``model``, which may be on the meta device: only names, shapes and ``requires_grad`` are read.

    The entries of its ``model.layers`` are called in order. ``packed``: the formats of frozen matrices that are kept in blocks.
    Raises ValueError: a parameter is in no bucket.
    """
    packed = packed or {}
    block_names = tuple(f"model.layers.{i}" for i, _ in enumerate(model.get_submodule("model.layers").children()))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    names = {id(module): name for name, module in model.named_modules()}
    owners = {names[id(embedding)]: EMBEDDING} | ({} if head is None else {names[id(head)]: HEAD})
    members: dict[str, dict[str, list[tuple[str, nn.Parameter]]]] = {EMBEDDING: {}}
    owners |= {name: f"blocks.{i // per_bucket}" for i, name in enumerate(block_names)}
    members |= {owners[name]: {} for name in block_names} | {HEAD: {}, NORMS: {}}
    for name, parameter in model.named_parameters():
        kind = "" if parameter.requires_grad else ".packed" if name in packed else ".frozen"
        members[_bucket_of(name, parameter, owners)].setdefault(kind, []).append((name, parameter))
    buckets: list[Bucket] = []
    for name, found in members.items():
        kinds = [kind for kind in ("", ".frozen", ".packed") if kind in found]
        flat_params = tuple(_make_flat_param(f"{name}{kind}", found[kind], packed, shard_ranks) for kind in kinds)
        if flat_params:
            block = int(name.removeprefix("blocks.")) if name.startswith("blocks.") else None
            buckets.append(Bucket(len(buckets), name, block, flat_params))
    return BucketPlan(tuple(buckets), tuple(_uses(model, buckets)), block_names, shard_ranks, per_bucket)


def _bucket_of(name: str, parameter: nn.Parameter, owners: dict[str, str]) -> str:
    if parameter.dim() <= 1:
        return NORMS
    module = name.rpartition(".")[0]
    for owner, bucket in owners.items():
        if f"{module}.".startswith(f"{owner}."):  # also of a module inside the head
            return bucket
    raise ValueError(
        f"parameter {name} {tuple(parameter.shape)} is in none of the embedding, the blocks and the head, which are all that the engine shards"
    )


def _make_flat_param(
    name: str, members: list[tuple[str, nn.Parameter]], packed: Mapping[str, PackedFormat], shard_ranks: int
) -> FlatParameter:
    shapes = {own: tuple(parameter.shape) for own, parameter in members}
    flat_param = _lay_out(name, shapes, shard_ranks, members[0][1].requires_grad)
    if not name.endswith(".packed"):
        return flat_param
    formats = tuple(packed[own] for own in shapes)
    in_bytes = {own: (rows, packed[own].row_bytes(columns)) for own, (rows, columns) in shapes.items()}
    return replace(flat_param, formats=formats, blocks=_lay_out(name, in_bytes, shard_ranks, trainable=False))


def _lay_out(name: str, shapes: Mapping[str, tuple[int, ...]], shard_ranks: int, trainable: bool) -> FlatParameter:
    params, end = [], 0
    for own, shape in shapes.items():
        params.append(ParamSpan(own, shape, end, prod(shape)))
        end = -(-(end + prod(shape)) // ALIGN_ELEMS) * ALIGN_ELEMS
    multiple = shard_ranks * SHARD_MULTIPLE
    return FlatParameter(name, tuple(params), -(-end // multiple) * multiple, trainable)


def _uses(model: nn.Module, buckets: list[Bucket]) -> Iterator[Use]:
    places = {
        param.name: (bucket, flat_param, param)
        for bucket in buckets
        for flat_param in bucket.flat_params
        for param in flat_param.params
    }
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module_name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield Use(module_name, attribute, *places[names[id(parameter)]])


class ShardSpan(NamedTuple):
    """A parameter's elements in a shard: ``num_elems`` from ``offset`` of the parameter, at ``start`` of the shard."""

    param: ParamSpan
    offset: int
    start: int
    num_elems: int

    @property
    def place(self) -> slice:
        """Its slice of the shard."""
        return slice(self.start, self.start + self.num_elems)


class ShardLayout(NamedTuple):
    """A rank's shard of a flat parameter. ``num_elems`` includes padding; ``spans`` has one, maybe empty, per parameter."""

    num_elems: int
    spans: tuple[ShardSpan, ...]


def cut_shard(flat_param: FlatParameter, rank: int, num_ranks: int) -> ShardLayout:
    """The layout of shard ``rank`` of ``num_ranks``."""
    length = flat_param.num_elems // num_ranks
    spans = []
    for param in flat_param.params:
        first, end = max(param.start, rank * length), min(param.start + param.num_elems, (rank + 1) * length)
        if first < end:
            spans.append(ShardSpan(param, first - param.start, first - rank * length, end - first))
        else:
            spans.append(ShardSpan(param, 0, 0, 0))
    return ShardLayout(length, tuple(spans))


def copy_into_shard(tensor_of: Callable[[str], Tensor], shard: ShardLayout, shard_S: Tensor) -> None:
    """Fill ``shard_S`` from ``tensor_of(name)``, a whole parameter. Raises ValueError: a tensor has another shape."""
    for span in shard.spans:
        tensor, shape = tensor_of(span.param.name), span.param.shape
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{span.param.name} must have shape {shape}, got {tuple(tensor.shape)}; of another model?")
        shard_S[span.place].copy_(tensor.reshape(-1)[span.offset : span.offset + span.num_elems])
