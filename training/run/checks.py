"""Checks before a run starts: ranks have the same configuration, data and weights, and folders can be written."""

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from tightwire.comm.errors import name_ranks
from tightwire.sizes import check_disks, format_bytes
from tightwire.training.checkpoint.folders import OtherRunError, checkpoints_in, remove_partial
from tightwire.training.checkpoint.state import RunState
from tightwire.training.config.tree import TrainConfig
from tightwire.training.data.documents import RunData, fingerprint_of
from tightwire.training.engine.engine import Engine
from tightwire.training.engine.shards import sum_bits
from tightwire.training.ranks.groups import Control
from tightwire.training.start.export import ADAPTER_CONFIG, CONFIG, CRITIC, check_out
from tightwire.whole_folder import only_user

# Data paths, whose files are compared instead, and values that only rank 0 or no rank uses.
_MAY_DIFFER = ("run", "data.files", "data.held_out_files", "export.folder", "log.", "dry_run.")
_MOST_KEYS = 5  # keys in the error message


def check_same_configuration(config: TrainConfig, data: RunData, control: Control) -> None:
    """Collective. Raises ValueError: configuration values or data differ between ranks; the message names them."""
    own = {key: value for key, value in _flatten(config.model_dump(mode="json"), "") if not key.startswith(_MAY_DIFFER)}
    own["the fingerprint of data.files"] = fingerprint_of(data.documents.files)
    if data.held_out_documents is not None:
        own["the fingerprint of data.held_out_files"] = fingerprint_of(data.held_out_documents.files)
    ranks = control.gather(own)
    keys = list(dict.fromkeys(key for values in ranks for key in values))
    differing = [key for key in keys if any(values.get(key) != ranks[0].get(key) for values in ranks)]
    if differing:
        differences = "; ".join(_values_of(key, ranks) for key in differing[:_MOST_KEYS])
        rest = f"; and {len(differing) - _MOST_KEYS} more" if len(differing) > _MOST_KEYS else ""
        raise ValueError(
            f"ranks have different configurations: {differences}{rest}. Start all ranks with the same configuration and files"
        )


def check_replicas(state: RunState, engine: Engine, control: Control) -> int:
    """Return the sum of the frozen weights' bits, which does not depend on the number of ranks. Collective.

    Raises ValueError: ranks that hold the same shard have different bits; names ranks and flat parameters.
    """
    frozen = engine.frozen_sums()
    sums = {(shard.name, engine.shard_rank): sum_bits(shard.flat_N) for shard in state.shards} | frozen
    frozen_names = {name for name, _ in frozen}
    first: dict[tuple[str, int], tuple[int, int]] = {}  # by shard: the first rank that holds it, and its sum
    for rank, theirs in enumerate(control.gather(sums)):
        known = {shard: first.setdefault(shard, (rank, value)) for shard, value in theirs.items()}
        if different := [shard for shard, (_, value) in known.items() if theirs[shard] != value]:
            names = ", ".join(name for name, _ in different)
            raise ValueError(
                f"{name_ranks([known[different[0]][0], rank])} have different weights in {names}; the model or checkpoint "
                "differs between their machines"
            )
    return sum(value for (name, _), (_, value) in first.items() if name in frozen_names)


def check_frozen(folder: Path, description: Mapping[str, Any], frozen_sum: int) -> None:
    """Raises OtherRunError: the frozen weights, which are read from the starting model, are not those of the checkpoint's run."""
    if description["frozen_sum"] != frozen_sum:
        raise OtherRunError(
            f"{folder} was trained beside other frozen weights than {description['model']['name']} has now; restore its files, "
            "or give another `run`"
        )


def _flatten(values: Mapping[str, Any], under: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{under}{name}.")
        else:
            yield f"{under}{name}", value


def _values_of(key: str, ranks: list[dict[str, Any]]) -> str:
    by_value: dict[str, list[int]] = {}
    for rank, values in enumerate(ranks):
        by_value.setdefault(repr(values.get(key)), []).append(rank)
    return f"{key} is " + ", ".join(f"{value} on {name_ranks(own)}" for value, own in by_value.items())


def make_run_folder(config: TrainConfig, control: Control, held: ExitStack) -> Path:
    """Create the run's folder, lock it until ``held`` is closed, and remove unfinished files of a killed run. Collective.

    Raises ValueError: the folder cannot be written or another run has it, the ranks do not share it, or the export
    folder is unusable.
    """
    run = config.run_folder
    with control.failing_together(ValueError):
        if control.rank == 0:
            key = "run"
            try:
                run.mkdir(parents=True, exist_ok=True)
                held.enter_context(only_user(run))
                remove_partial(run)
                marker = CONFIG if config.model.lora is None else ADAPTER_CONFIG
                read = [config.model.start, config.model.tokenizer, *config.answers.rewards]
                read += [config.distill.target] if config.distill else []
                outs = {"run": run / CRITIC} if config.ppo is not None else {}
                for key, out in {**outs, "export.folder": find_export_folder(config, run)}.items():  # noqa: B007 - an error names it
                    check_out(out, marker, read)
            except (OSError, ValueError) as failure:
                raise ValueError(f"{key}: {failure}") from None
    _check_shared(run, control)
    return run


def find_export_folder(config: TrainConfig, run: Path) -> Path:
    return Path(os.path.expanduser(config.export.folder or run / ("adapter" if config.model.lora else "model")))


def check_disk_space(config: TrainConfig, run: Path, *, checkpoint_bytes: int, num_parameters: int) -> None:
    """Raises ValueError: a disk has no room for the checkpoints still to come (one more while it is written) and the export.

    ``num_parameters``: of the export.
    """
    more = config.checkpoint.keep + 1 - min(config.checkpoint.keep, len(checkpoints_in(run)))
    model_bytes = num_parameters * getattr(torch, config.export.dtype).itemsize
    keep, out = config.checkpoint.keep, find_export_folder(config, run).parent
    needs = (
        ("run", run, more * checkpoint_bytes, f"{more} checkpoints of {format_bytes(checkpoint_bytes)}"),
        ("export.folder", out, model_bytes, f"the exported model of {format_bytes(model_bytes)}"),
    )
    check_disks(needs, f"or lower checkpoint.keep={keep}")


def _check_shared(run: Path, control: Control) -> None:
    """Check that all ranks see the run folder, because each writes to a checkpoint there."""
    mark = run / control.gather(f".{uuid.uuid4()}")[0]
    if control.rank == 0:
        mark.touch()
    control.gather(None)  # wait until rank 0 has created the mark
    unseen = [rank for rank, seen in enumerate(control.gather(mark.exists())) if not seen]
    if control.rank == 0:
        mark.unlink()
    if unseen:
        raise ValueError(
            f"run: {name_ranks(unseen)} cannot see files that rank 0 writes to {run}; give a `run` on a disk that all machines share"
        )
