"""An optimizer's state as pieces that another cut can take up."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tightwire.training.checkpoint.pieces import FlatShard, SavedPiece, pieces_of

_PREFIX = "optimizer"


def optimizer_pieces(optimizer: Optimizer, shards: Sequence[FlatShard]) -> Iterator[SavedPiece]:
    """The state that lies like the shards, such as AdamW's moments."""
    for shard in shards:
        for name, value in optimizer.state.get(shard.flat_N, {}).items():
            if _is_flat(value, shard):
                yield from pieces_of(f"{_PREFIX}/{name}", shard, value)


def optimizer_scalars(optimizer: Optimizer, shards: Sequence[FlatShard]) -> dict[str, dict[str, float]]:
    """The rest of the state by unit, such as AdamW's count of steps."""
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
    """Put back the scalars, and zeros in the place of the flat state, for ``optimizer_pieces`` to be read into.

    Args:
        keys: of the checkpoint; they say which flat state there is.
    """
    names = _flat_names(keys)
    for shard in shards:
        if shard.unit not in scalars:
            continue
        # Torch's own counts of steps are tensors; so are all the scalars that its optimizers keep for a parameter.
        state: dict[str, Any] = {name: torch.tensor(value) for name, value in scalars[shard.unit].items()}
        state |= {name: torch.zeros_like(shard.flat_N) for name in names}
        optimizer.state[shard.flat_N] = state


def has_flat_state(keys: Mapping[str, int], parameter: str) -> bool:
    """Whether a checkpoint of ``keys`` has for ``parameter`` what it has for others."""
    return all(f"{_PREFIX}/{name}/{parameter}" in keys for name in _flat_names(keys))


def _flat_names(keys: Mapping[str, int]) -> set[str]:
    return {key.split("/")[1] for key in keys if key.startswith(f"{_PREFIX}/")}


def _is_flat(value: Any, shard: FlatShard) -> bool:
    return isinstance(value, Tensor) and value.shape == shard.flat_N.shape
