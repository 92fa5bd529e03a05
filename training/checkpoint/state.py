"""Collects a run's state as chunks and restores it: weights, optimizer, gradient compressor, random states.

State is keyed by parameter name, so a run with another sharding can read it. State that each replica keeps for
itself (residuals, velocities) has the replica's number in its key; if the number of replicas has changed, every new
replica gets the mean of the old ones, which preserves the mean they send (``training.compression``). Random states are per
rank; a rank without a saved one is seeded with ``seed + rank``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from tightwire.training.checkpoint.files import Chunk, FlatShard, chunks_of
from tightwire.training.engine.compressor import GradientCompressor

_PREFIX = "optimizer"


def optimizer_chunks(optimizer: Optimizer, shards: Sequence[FlatShard]) -> Iterator[Chunk]:
    """State tensors of the same shape as the shards, such as AdamW's moments."""
    for shard in shards:
        for name, value in optimizer.state.get(shard.flat_N, {}).items():
            if _is_flat(value, shard):
                yield from chunks_of(f"{_PREFIX}/{name}", shard, value)


def optimizer_scalars(optimizer: Optimizer, shards: Sequence[FlatShard]) -> dict[str, dict[str, float]]:
    """The rest of the state by flat parameter, such as AdamW's step count."""
    return {
        shard.name: {
            name: float(value)
            for name, value in optimizer.state.get(shard.flat_N, {}).items()
            if not _is_flat(value, shard) and value is not None
        }
        for shard in shards
        if shard.flat_N in optimizer.state
    }


def prepare_state(
    optimizer: Optimizer,
    shards: Sequence[FlatShard],
    scalars: Mapping[str, Mapping[str, float]],
    keys: Mapping[str, int],
) -> None:
    """Restore the scalars and allocate zeros for the flat state, so that ``optimizer_chunks`` can be read into.

    Args:
        keys: all keys of the checkpoint with their lengths; they determine which flat state exists.
    """
    names = _flat_names(keys)
    for shard in shards:
        if shard.name not in scalars:
            continue
        # Torch's optimizers keep scalar state, such as step counts, as tensors.
        state: dict[str, Any] = {name: torch.tensor(value) for name, value in scalars[shard.name].items()}
        state |= {name: torch.zeros_like(shard.flat_N) for name in names}
        optimizer.state[shard.flat_N] = state


def has_flat_state(keys: Mapping[str, int], parameter: str) -> bool:
    """Whether the checkpoint has every kind of flat state for ``parameter``."""
    return all(f"{_PREFIX}/{name}/{parameter}" in keys for name in _flat_names(keys))


def _flat_names(keys: Mapping[str, int]) -> set[str]:
    return {key.split("/")[1] for key in keys if key.startswith(f"{_PREFIX}/")}


def _is_flat(value: Any, shard: FlatShard) -> bool:
    return isinstance(value, Tensor) and value.shape == shard.flat_N.shape


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
    compressor: GradientCompressor | None
    replica: Replica


def snapshot(state: RunState, rank: int) -> list[Chunk]:
    """Copies in host memory of what this rank writes; replicas divide the shards they share."""
    shards, optimizer, compressor, replica = state.shards, state.optimizer, state.compressor, state.replica
    own = [shard for number, shard in enumerate(shards) if number % replica.size == replica.rank]
    chunks = [chunk for shard in own for chunk in chunks_of(_PARAMETERS, shard, shard.flat_N)]
    chunks += optimizer_chunks(optimizer, own)
    chunks += _compressor_chunks(shards, {} if compressor is None else compressor.state_dict(), replica.rank)
    chunks += [_whole(key, state) for key, state in _random_states(rank).items()]
    return [chunk._replace(numbers=chunk.numbers.detach().to("cpu", copy=True)) for chunk in chunks]


def find_not_finite(state: RunState) -> list[str]:
    """Flat parameters with inf or NaN on this rank, in weights, optimizer state or compressor state. Cost: reads all of it once."""
    kept = {} if state.compressor is None else state.compressor.state_dict()
    numbers = [(key.partition("/")[2], value) for key, value in kept.items()]
    for shard in state.shards:
        numbers.append((shard.name, shard.flat_N.detach()))
        flats = state.optimizer.state.get(shard.flat_N, {}).values()
        numbers += [(shard.name, value) for value in flats if isinstance(value, Tensor)]
    return sorted({name for name, value in numbers if not value.isfinite().all()})


def scalars_of(state: RunState) -> dict[str, Any]:
    """The scalar state for the checkpoint's JSON; equal on every rank."""
    shards, optimizer = state.shards, state.optimizer
    kept = {} if state.compressor is None else state.compressor.state_dict()
    return {
        "optimizer": optimizer_scalars(optimizer, shards),
        "between": {key: value.item() for key, value in kept.items() if "/" not in key},
    }


def wanted_state(state: RunState, scalars: Mapping[str, Any], keys: Mapping[str, int]) -> list[Chunk]:
    """Destinations for weights and optimizer state."""
    shards, optimizer = state.shards, state.optimizer
    prepare_state(optimizer, shards, scalars["optimizer"], keys)
    chunks = [chunk for shard in shards for chunk in chunks_of(_PARAMETERS, shard, shard.flat_N)]
    return [*chunks, *optimizer_chunks(optimizer, shards)]


def parameters_in(keys: Mapping[str, int]) -> dict[str, int]:
    """The number of elements of each parameter in the checkpoint."""
    prefix = f"{_PARAMETERS}/"
    return {key.removeprefix(prefix): length for key, length in keys.items() if key.startswith(prefix)}


class CompressorReader:
    """Restores the gradient compressor: fill what ``wanted()`` returns, then call ``load()``."""

    def __init__(
        self, compressor: GradientCompressor, state: RunState, scalars: Mapping[str, Any], *, saved_replicas: int
    ) -> None:
        """``saved_replicas``: the number of replicas that wrote the checkpoint."""
        replica, shards, saved = state.replica, state.shards, saved_replicas
        self._compressor = compressor
        self._scalars = scalars["between"]
        self._replicas = [replica.rank] if saved == replica.size else list(range(saved))
        self._shards = {shard.name: shard for shard in shards}
        kept = {key: value for key, value in compressor.state_dict().items() if "/" in key}
        self._states = [{key: torch.zeros_like(value) for key, value in kept.items()} for _ in self._replicas]

    def wanted(self) -> list[Chunk]:
        shards = list(self._shards.values())
        return [
            chunk
            for replica, state in zip(self._replicas, self._states, strict=True)
            for chunk in _compressor_chunks(shards, state, replica)
        ]

    def load(self) -> None:
        count = len(self._states)
        # In float64, so that the mean of equal values is exactly that value.
        means = {
            key: sum((state[key].double() for state in self._states[1:]), first.double()).div(count).to(first.dtype)
            for key, first in self._states[0].items()
        }
        self._compressor.load_state_dict(
            {**means, **{key: torch.tensor(value) for key, value in self._scalars.items()}}
        )


def restore_random(states: Mapping[str, Tensor], *, seed: int, rank: int) -> None:
    """Restore the random states, or seed from ``seed + rank`` if the checkpoint has none for this rank."""
    if not states:
        torch.manual_seed(seed + rank)
        return
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def wanted_random(keys: Mapping[str, int], rank: int) -> dict[str, Chunk]:
    """Destinations for this rank's random states by device; empty if the checkpoint has none for this rank."""
    return {
        device: _whole(f"{_RANDOM}/{device}/{rank}", torch.empty_like(state))
        for device, state in ((key.split("/")[1], state) for key, state in _random_states(rank).items())
        if f"{_RANDOM}/{device}/{rank}" in keys
    }


def _compressor_chunks(shards: Sequence[FlatShard], state: Mapping[str, Tensor], replica: int) -> list[Chunk]:
    by_unit = {shard.name: shard for shard in shards}
    chunks = []
    for key, value in state.items():
        kind, slash, name = key.partition("/")
        if slash:
            chunks += chunks_of(f"{_BETWEEN}/{kind}/{replica}", by_unit[name], value)
    return chunks


def _random_states(rank: int) -> dict[str, Tensor]:
    states = {f"{_RANDOM}/cpu/{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"{_RANDOM}/cuda/{rank}"] = torch.cuda.get_rng_state()
    return states


def _whole(key: str, tensor: Tensor) -> Chunk:
    return Chunk(key, tensor.numel(), 0, tensor)
