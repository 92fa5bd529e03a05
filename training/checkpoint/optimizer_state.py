"""Converts optimizer state to pieces that a run with another sharding can read, and back."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tightwire.training.checkpoint.pieces import FlatShard, SavedPiece, pieces_of

_PREFIX = "optimizer"


def optimizer_pieces(optimizer: Optimizer, shards: Sequence[FlatShard]) -> Iterator[SavedPiece]:
    """State tensors of the same shape as the shards, such as AdamW's moments."""
    for shard in shards:
        for name, value in optimizer.state.get(shard.flat_N, {}).items():
            if _is_flat(value, shard):
                yield from pieces_of(f"{_PREFIX}/{name}", shard, value)


def optimizer_scalars(optimizer: Optimizer, shards: Sequence[FlatShard]) -> dict[str, dict[str, float]]:
    """The rest of the state by unit, such as AdamW's step count."""
    return {
        shard.unit: {
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
    """Restore the scalars and allocate zeros for the flat state, so that ``optimizer_pieces`` can be read into.

    Args:
        keys: all keys of the checkpoint with their lengths; they determine which flat state exists.
    """
    names = _flat_names(keys)
    for shard in shards:
        if shard.unit not in scalars:
            continue
        # Torch's optimizers keep scalar state, such as step counts, as tensors.
        state: dict[str, Any] = {name: torch.tensor(value) for name, value in scalars[shard.unit].items()}
        state |= {name: torch.zeros_like(shard.flat_N) for name in names}
        optimizer.state[shard.flat_N] = state


def has_flat_state(keys: Mapping[str, int], parameter: str) -> bool:
    """Whether the checkpoint has every kind of flat state for ``parameter``."""
    return all(f"{_PREFIX}/{name}/{parameter}" in keys for name in _flat_names(keys))


def _flat_names(keys: Mapping[str, int]) -> set[str]:
    return {key.split("/")[1] for key in keys if key.startswith(f"{_PREFIX}/")}


def _is_flat(value: Any, shard: FlatShard) -> bool:
    return isinstance(value, Tensor) and value.shape == shard.flat_N.shape
