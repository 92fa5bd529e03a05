"""Checks that ranks have the same configuration and data, and that replicas start with the same weights."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tightwire.comm.errors import name_ranks
from tightwire.training.checkpoint.state import RunState
from tightwire.training.config.read import to_values
from tightwire.training.config.tree import TrainConfig
from tightwire.training.data.documents import describe_files
from tightwire.training.data.run_data import RunData
from tightwire.training.ranks.control import Control

# Data paths, whose files are compared instead, and values that only rank 0 or no rank uses.
_MAY_DIFFER = ("run", "data.files", "data.held_out_files", "export.folder", "log.", "dry_run.")
_MOST_KEYS = 5  # keys in the error message


def check_told_alike(config: TrainConfig, data: RunData, control: Control) -> None:
    """Collective.

    Raises:
        ValueError: configuration values or data differ between ranks; the message names them.
    """
    own = {key: value for key, value in _flat(to_values(config), "") if not key.startswith(_MAY_DIFFER)}
    own["the fingerprint of data.files"] = describe_files(data.documents.files)
    if data.held_out_documents is not None:
        own["the fingerprint of data.held_out_files"] = describe_files(data.held_out_documents.files)
    ranks = control.gather(own)
    keys = list(dict.fromkeys(key for values in ranks for key in values))
    differing = [key for key in keys if any(values.get(key) != ranks[0].get(key) for values in ranks)]
    if differing:
        told = "; ".join(_values_of(key, ranks) for key in differing[:_MOST_KEYS])
        rest = f"; and {len(differing) - _MOST_KEYS} more" if len(differing) > _MOST_KEYS else ""
        raise ValueError(f"ranks were not told the same: {told}{rest}. Give all the same configuration and files")


def check_replicas(state: RunState, shard_rank: int, control: Control) -> None:
    """Collective. Cost: reads every shard once, and gathers one number per unit from each rank.

    Raises:
        ValueError: ranks that hold the same shard have different bits; the message names the ranks and units.
    """
    # Sum the bits as integers: exact, so every single-bit difference changes the sum, also in a NaN.
    sums = {shard.unit: int(shard.flat_N.detach().view(torch.int32).sum(dtype=torch.int64)) for shard in state.shards}
    first: dict[int, tuple[int, Mapping[str, int]]] = {}
    for rank, (shard, theirs) in enumerate(control.gather((shard_rank, sums))):
        other, known = first.setdefault(shard, (rank, theirs))
        if unlike := [unit for unit in known if theirs[unit] != known[unit]]:
            raise ValueError(
                f"{name_ranks([other, rank])} begin with other weights in {', '.join(unlike)}; the model or the checkpoint "
                "that they read is not the same on their machines"
            )


def _flat(values: Mapping[str, Any], under: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{under}{name}.")
        else:
            yield f"{under}{name}", value


def _values_of(key: str, ranks: list[dict[str, Any]]) -> str:
    by_value: dict[str, list[int]] = {}
    for rank, values in enumerate(ranks):
        by_value.setdefault(repr(values.get(key)), []).append(rank)
    return f"{key} is " + ", ".join(f"{value} on {name_ranks(own)}" for value, own in by_value.items())
