"""Divides a model's parameters into flat units, which are gathered, reduced and sharded as a whole.

    embedding   the token embedding, and the head if they are tied
    blocks.I    the matrices of decoder block I
    head        the final projection
    norms       all one-dimensional parameters of the model: norms and biases

A unit's parameters are concatenated, each starting at a multiple of ``ALIGN_ELEMS``. The end is padded so that shards
have equal length and consist of whole codec groups. Frozen parameters are in a separate flat (``.frozen``) without
gradients. Positions of parameters do not depend on the number of ranks; only the padding at the end does.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

ALIGN_ELEMS = 16  # 64 bytes of float32: a cache line
SHARD_MULTIPLE = 256  # elements of a shard: whole groups of every codec, whole words at every bit width

EMBEDDING, HEAD, NORMS = "embedding", "head", "norms"


class Part(NamedTuple):
    """One parameter's position in a flat."""

    name: str  # as in model.named_parameters()
    shape: tuple[int, ...]
    start: int
    num_elems: int

    def of(self, flat_N: Tensor) -> Tensor:
        return flat_N[self.start : self.start + self.num_elems].view(self.shape)


@dataclass(frozen=True, slots=True)
class Flat:
    """Parameters as one vector. ``num_elems`` includes padding and is a multiple of shard ranks * SHARD_MULTIPLE."""

    name: str
    parts: tuple[Part, ...]
    num_elems: int
    trainable: bool

    @property
    def num_parameters(self) -> int:
        return sum(part.num_elems for part in self.parts)


@dataclass(frozen=True, slots=True)
class Unit:
    """``flats``: trainable, then frozen; at least one of them. ``block``: the block's index, or None."""

    number: int
    name: str
    block: int | None
    flats: tuple[Flat, ...]

    @property
    def trainable(self) -> Flat | None:
        return self.flats[0] if self.flats[0].trainable else None


class Use(NamedTuple):
    """A module attribute that is a parameter; a tied parameter has several uses."""

    module: str
    attribute: str
    unit: Unit
    flat: Flat
    part: Part


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """The units of a model for ``shard_ranks`` ranks, and the module attributes that use their parameters."""

    units: tuple[Unit, ...]
    uses: tuple[Use, ...]
    block_modules: tuple[str, ...]
    shard_ranks: int

    @property
    def flats(self) -> Iterator[Flat]:
        return (flat for unit in self.units for flat in unit.flats)

    @property
    def blocks(self) -> tuple[Unit, ...]:
        return tuple(unit for unit in self.units if unit.block is not None)

    @property
    def num_parameters(self) -> int:
        return sum(flat.num_parameters for flat in self.flats)


def plan_units(model: nn.Module, shard_ranks: int, blocks: str = "model.layers") -> UnitPlan:
    """Plan the units of ``model``, which may be on the meta device: only names, shapes and ``requires_grad`` are read.

    Args:
        model: has ``get_input_embeddings`` and ``get_output_embeddings``, like models of transformers.
        blocks: name of the module list whose entries are called in order.
    Raises:
        ValueError: a parameter belongs to no unit; the message names it.
    """
    block_names = tuple(f"{blocks}.{i}" for i, _ in enumerate(model.get_submodule(blocks).children()))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    names = {id(module): name for name, module in model.named_modules()}
    owners = {names[id(embedding)]: EMBEDDING} | ({} if head is None else {names[id(head)]: HEAD})
    members: dict[str, list[tuple[str, nn.Parameter]]] = {EMBEDDING: []}
    members |= {f"blocks.{i}": [] for i in range(len(block_names))} | {HEAD: [], NORMS: []}
    unit_of: dict[int, str] = {}  # by parameter id
    for name, parameter in model.named_parameters():
        unit_of[id(parameter)] = unit = _unit_of(name, parameter, owners, block_names)
        members[unit].append((name, parameter))
    units: list[Unit] = []
    for name, found in members.items():
        flats = tuple(
            _flat(name if trainable else f"{name}.frozen", chosen, trainable, shard_ranks * SHARD_MULTIPLE)
            for trainable in (True, False)
            if (chosen := [(n, p) for n, p in found if p.requires_grad == trainable])
        )
        if flats:
            block = int(name.removeprefix("blocks.")) if name.startswith("blocks.") else None
            units.append(Unit(len(units), name, block, flats))
    return UnitPlan(tuple(units), tuple(_uses(model, units)), block_names, shard_ranks)


def _unit_of(name: str, parameter: nn.Parameter, owners: dict[str, str], blocks: tuple[str, ...]) -> str:
    if parameter.dim() <= 1:
        return NORMS
    module = name.rpartition(".")[0]
    if module in owners:
        return owners[module]
    for number, block in enumerate(blocks):
        if name.startswith(f"{block}."):
            return f"blocks.{number}"
    raise ValueError(
        f"parameter {name} {tuple(parameter.shape)} is in none of the embedding, the blocks and the head, so no unit has it"
    )


def _flat(name: str, members: list[tuple[str, nn.Parameter]], trainable: bool, multiple: int) -> Flat:
    parts, end = [], 0
    for parameter_name, parameter in members:
        parts.append(Part(parameter_name, tuple(parameter.shape), end, parameter.numel()))
        end = _round_up(end + parameter.numel(), ALIGN_ELEMS)
    return Flat(name, tuple(parts), _round_up(end, multiple), trainable)


def _uses(model: nn.Module, units: list[Unit]) -> Iterator[Use]:
    places = {part.name: (unit, flat, part) for unit in units for flat in unit.flats for part in flat.parts}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module_name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield Use(module_name, attribute, *places[names[id(parameter)]])


def _round_up(num_elems: int, multiple: int) -> int:
    return -(-num_elems // multiple) * multiple


class Piece(NamedTuple):
    """A part's elements in a shard: ``num_elems`` from ``offset`` of the flat parameter, at ``start`` of the shard."""

    part: Part
    offset: int
    start: int
    num_elems: int

    @property
    def place(self) -> slice:
        """Its slice of the shard."""
        return slice(self.start, self.start + self.num_elems)

    @property
    def parameter(self) -> str:
        return self.part.name

    @property
    def parameter_elems(self) -> int:
        """Elements of the whole parameter."""
        return self.part.num_elems

    @property
    def decays(self) -> bool:
        """Whether weight decay applies to this parameter: to matrices, not to norms and biases."""
        return len(self.part.shape) > 1


class UnitShard(NamedTuple):
    """A rank's shard of a flat. ``num_elems`` includes padding; ``pieces`` has one, maybe empty, per part."""

    num_elems: int
    pieces: tuple[Piece, ...]


def cut(flat: Flat, rank: int, num_ranks: int) -> UnitShard:
    """The layout of shard ``rank`` of ``num_ranks``."""
    length = flat.num_elems // num_ranks
    pieces = []
    for part in flat.parts:
        first, end = max(part.start, rank * length), min(part.start + part.num_elems, (rank + 1) * length)
        if first < end:
            pieces.append(Piece(part, first - part.start, first - rank * length, end - first))
        else:
            pieces.append(Piece(part, 0, 0, 0))
    return UnitShard(length, tuple(pieces))


def copy_into_shard(tensor_of: Callable[[str], Tensor], shard: UnitShard, shard_S: Tensor) -> None:
    """Fill ``shard_S`` from ``tensor_of(name)``, which returns a whole parameter.

    Raises:
        ValueError: a tensor has another shape.
    """
    for piece in shard.pieces:
        tensor, shape = tensor_of(piece.parameter), piece.part.shape
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{piece.parameter} is {shape} here, got {tuple(tensor.shape)}; is it another model's?")
        shard_S[piece.place].copy_(tensor.reshape(-1)[piece.offset : piece.offset + piece.num_elems])
