"""Checks the run folder and the export folder before a run starts."""

import os
import shutil
import uuid
from pathlib import Path

import torch
import yaml

from tightwire.comm.errors import name_ranks
from tightwire.comm.sizes import format_bytes
from tightwire.training.checkpoint.folders import checkpoints_in, remove_partial
from tightwire.training.config.read import to_values
from tightwire.training.config.tree import TrainConfig
from tightwire.training.ranks.control import Control
from tightwire.training.start.export import check_out

_MODEL, _CONFIG = "model", "config.yaml"


def make_folder(config: TrainConfig, control: Control) -> Path:
    """Create the run's folder, remove unfinished files of a killed run, and write the configuration there. Collective.

    Raises:
        ValueError: the folder cannot be written, the ranks do not share it, or the export folder is unusable.
    """
    run = Path(config.run).expanduser()
    with control.failing_together(ValueError):
        if control.rank == 0:
            try:
                run.mkdir(parents=True, exist_ok=True)
                remove_partial(run)
                (run / _CONFIG).write_text(yaml.safe_dump(to_values(config), sort_keys=False), encoding="utf-8")
            except OSError as failure:
                raise ValueError(f"run: {run} cannot be written to: {failure}") from None
            try:
                check_out(export_place(config, run))
            except (OSError, ValueError) as failure:
                raise ValueError(f"export.folder: {failure}") from None
    _check_shared(run, control)
    return run


def export_place(config: TrainConfig, run: Path) -> Path:
    return Path(config.export.folder).expanduser() if config.export.folder else run / _MODEL


def check_room(config: TrainConfig, run: Path, *, checkpoint_bytes: int, num_parameters: int) -> None:
    """Check the disk space for the checkpoints still to come and for the exported model.

    Raises:
        ValueError: there is not enough space.
    """
    more = config.checkpoint.keep + 1 - min(config.checkpoint.keep, len(checkpoints_in(run)))
    model_bytes = num_parameters * getattr(torch, config.export.dtype).itemsize
    out = export_place(config, run).parent
    _check_disk(
        "run",
        run,
        more * checkpoint_bytes + (model_bytes if _same_disk(run, out) else 0),
        f"{more} checkpoints of {format_bytes(checkpoint_bytes)} (checkpoint.keep={config.checkpoint.keep}, and one more while "
        f"it is written){f' and the exported model of {format_bytes(model_bytes)}' if _same_disk(run, out) else ''}",
    )
    if not _same_disk(run, out):
        _check_disk("export.folder", out, model_bytes, "the exported model")


def _check_disk(key: str, folder: Path, needed: int, what: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ValueError(
            f"{key}: {folder} has {format_bytes(free)} left, and {format_bytes(needed)} are needed for {what}; make room, or give "
            f"another `{key}`"
        )


def _same_disk(one: Path, other: Path) -> bool:
    return os.stat(one).st_dev == os.stat(other).st_dev


def _check_shared(run: Path, control: Control) -> None:
    """Check that all ranks see the run folder, because each writes its part of a checkpoint there."""
    mark = run / control.gather(f".{uuid.uuid4()}")[0]
    if control.rank == 0:
        mark.touch()
    control.gather(None)  # wait until rank 0 has created the mark
    unseen = [rank for rank, seen in enumerate(control.gather(mark.exists())) if not seen]
    if control.rank == 0:
        mark.unlink()
    if unseen:
        raise ValueError(
            f"run: {name_ranks(unseen)} cannot see what rank 0 writes to {run}; give a `run` on a disk that all machines share"
        )
