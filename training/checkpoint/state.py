"""Collects a run's state as pieces and restores it: weights, optimizer, between-node slot, random states.

Flat state is keyed by parameter name, so a run with another sharding can read it. State that each replica keeps for
itself (residuals, velocities) has the replica's number in its key; if the number of replicas has changed, every new
replica gets the mean of the old ones, which preserves the mean they send (``training.between``). Random states are per
rank; a rank without a saved one is seeded with ``seed + rank``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from tightwire.training.checkpoint.optimizer_state import optimizer_pieces, optimizer_scalars, prepare_state
from tightwire.training.checkpoint.pieces import FlatShard, SavedPiece, pieces_of
from tightwire.training.engine.between import Between

_PARAMETERS, _BETWEEN, _RANDOM = "parameters", "between", "random"


class Replica(NamedTuple):
    """This rank's position among the ranks that hold the same shards."""

    rank: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """References to everything that changes from step to step."""

    shards: Sequence[FlatShard]
    optimizer: Optimizer
    between: Between | None
    replica: Replica


def snapshot(state: RunState, rank: int) -> list[SavedPiece]:
    """Copies in host memory of what this rank writes; replicas divide the units they share."""
    shards, optimizer, between, replica = state.shards, state.optimizer, state.between, state.replica
    own = [shard for number, shard in enumerate(shards) if number % replica.size == replica.rank]
    pieces = [piece for shard in own for piece in pieces_of(_PARAMETERS, shard, shard.flat_N)]
    pieces += optimizer_pieces(optimizer, own)
    pieces += _between_pieces(shards, {} if between is None else between.state_dict(), replica.rank)
    pieces += [_whole(key, state) for key, state in _random_states(rank).items()]
    return [piece._replace(numbers=piece.numbers.detach().to("cpu", copy=True)) for piece in pieces]


def not_finite(state: RunState) -> list[str]:
    """Units with inf or NaN on this rank, in weights, optimizer state or slot state. Cost: reads all of it once."""
    kept = {} if state.between is None else state.between.state_dict()
    numbers = [(key.partition("/")[2], value) for key, value in kept.items()]
    for shard in state.shards:
        numbers.append((shard.unit, shard.flat_N.detach()))
        flats = state.optimizer.state.get(shard.flat_N, {}).values()
        numbers += [(shard.unit, value) for value in flats if isinstance(value, Tensor)]
    return sorted({unit for unit, value in numbers if not value.isfinite().all()})


def scalars_of(state: RunState) -> dict[str, Any]:
    """The scalar state for the checkpoint's JSON; equal on every rank."""
    shards, optimizer = state.shards, state.optimizer
    kept = {} if state.between is None else state.between.state_dict()
    return {
        "optimizer": optimizer_scalars(optimizer, shards),
        "between": {key: value.item() for key, value in kept.items() if "/" not in key},
    }


def wanted_state(state: RunState, scalars: Mapping[str, Any], keys: Mapping[str, int]) -> list[SavedPiece]:
    """Destinations for weights and optimizer state."""
    shards, optimizer = state.shards, state.optimizer
    prepare_state(optimizer, shards, scalars["optimizer"], keys)
    pieces = [piece for shard in shards for piece in pieces_of(_PARAMETERS, shard, shard.flat_N)]
    return [*pieces, *optimizer_pieces(optimizer, shards)]


def parameters_in(keys: Mapping[str, int]) -> dict[str, int]:
    """The number of elements of each parameter in the checkpoint."""
    prefix = f"{_PARAMETERS}/"
    return {key.removeprefix(prefix): length for key, length in keys.items() if key.startswith(prefix)}


class BetweenReader:
    """Restores the between-node slot: fill what ``wanted()`` returns, then call ``load()``."""

    def __init__(self, between: Between, state: RunState, scalars: Mapping[str, Any], *, saved_replicas: int) -> None:
        """``saved_replicas``: the number of replicas that wrote the checkpoint."""
        replica, shards, saved = state.replica, state.shards, saved_replicas
        self._between = between
        self._scalars = scalars["between"]
        self._replicas = [replica.rank] if saved == replica.size else list(range(saved))
        self._shards = {shard.unit: shard for shard in shards}
        kept = {key: value for key, value in between.state_dict().items() if "/" in key}
        self._states = [{key: torch.zeros_like(value) for key, value in kept.items()} for _ in self._replicas]

    def wanted(self) -> list[SavedPiece]:
        shards = list(self._shards.values())
        return [
            piece
            for replica, state in zip(self._replicas, self._states, strict=True)
            for piece in _between_pieces(shards, state, replica)
        ]

    def load(self) -> None:
        count = len(self._states)
        # In float64, so that the mean of equal values is exactly that value.
        means = {
            key: sum((state[key].double() for state in self._states[1:]), first.double()).div(count).to(first.dtype)
            for key, first in self._states[0].items()
        }
        self._between.load_state_dict({**means, **{key: torch.tensor(value) for key, value in self._scalars.items()}})


def restore_random(states: Mapping[str, Tensor], *, seed: int, rank: int) -> None:
    """Restore the random states, or seed from ``seed + rank`` if the checkpoint has none for this rank."""
    if not states:
        torch.manual_seed(seed + rank)
        return
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def wanted_random(keys: Mapping[str, int], rank: int) -> dict[str, SavedPiece]:
    """Destinations for this rank's random states by device; empty if the checkpoint has none for this rank."""
    return {
        device: _whole(f"{_RANDOM}/{device}/{rank}", torch.empty_like(state))
        for device, state in ((key.split("/")[1], state) for key, state in _random_states(rank).items())
        if f"{_RANDOM}/{device}/{rank}" in keys
    }


def _between_pieces(shards: Sequence[FlatShard], state: Mapping[str, Tensor], replica: int) -> list[SavedPiece]:
    by_unit = {shard.unit: shard for shard in shards}
    pieces = []
    for key, value in state.items():
        kind, slash, unit = key.partition("/")
        if slash:
            pieces += pieces_of(f"{_BETWEEN}/{kind}/{replica}", by_unit[unit], value)
    return pieces


def _random_states(rank: int) -> dict[str, Tensor]:
    states = {f"{_RANDOM}/cpu/{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"{_RANDOM}/cuda/{rank}"] = torch.cuda.get_rng_state()
    return states


def _whole(key: str, tensor: Tensor) -> SavedPiece:
    return SavedPiece(key, tensor.numel(), 0, tensor)
