"""Refuses a run before torch is imported: ranks that do not fit, missing data, an unknown model, an unusable folder."""

import os
import pkgutil
import sys
from collections.abc import Mapping
from typing import Any

from tightwire.comm.group.topology import Topology
from tightwire.model.checkpoint.errors import naming
from tightwire.model.checkpoint.header import check_name
from tightwire.training.checkpoint.folders import find_checkpoint
from tightwire.training.config.tree import BPE, BYTES, TrainConfig
from tightwire.training.data.documents import RunData


def find_topology(environment: Mapping[str, str], nodes: int | None) -> Topology:
    """This process's rank and node. ``nodes`` overrides the launcher's number of nodes, to try several on one machine.

    Raises ValueError: the launcher's variables are invalid, or the ranks do not divide equally over ``nodes``.
    """
    from_launcher = Topology.from_environment(environment)
    if nodes is None:
        return from_launcher
    try:
        return Topology(from_launcher.rank, from_launcher.world_size, from_launcher.local_rank, nodes)
    except ValueError as error:
        raise ValueError(f"parallel.nodes={nodes}: {error}") from None


def find_function(name: str) -> Any:
    """Raises ValueError: there is no such function of a reward."""
    if "" not in sys.path:
        sys.path.append("")  # modules of the folder that the run is started in
    try:
        found = pkgutil.resolve_name(name) if ":" in name else None
    except (Exception, SystemExit) as error:  # noqa: BLE001, a module of the user's may raise anything
        raise ValueError(f"rewards: {name} cannot be imported: {error!r}") from None
    if not callable(found):
        raise ValueError(f"rewards: {name} is neither a function, package.module:name, nor a reward model's folder")  # noqa: TRY004 - of a value in the configuration
    return found


def check_early(config: TrainConfig, topology: Topology) -> RunData:
    """The run's data, after all checks that need no torch. Raises ValueError: the run would fail its later checks."""
    config.check_ranks(topology)
    model, target = config.model, config.distill.target if config.distill else ""
    tokenizer = "" if model.tokenizer == BYTES or model.tokenizer.startswith(BPE) else model.tokenizer
    for key, name in (("model.start", model.start), ("model.tokenizer", tokenizer), ("distill.target", target)):
        with naming(key):
            if name:
                check_name(name)
    for name in config.answers.rewards:
        if not os.path.isdir(os.path.expanduser(name)):
            find_function(name)
    data = RunData.find(config)
    data.check_documents()
    if topology.rank == 0:
        _check_run_folder(config)
    return data


def _check_run_folder(config: TrainConfig) -> None:
    run = config.run_folder
    with naming(f"run: {run}", "cannot be used", OSError):
        existing = next(folder for folder in (run, *run.absolute().parents) if folder.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK | (os.R_OK if existing == run else 0)):
            raise NotADirectoryError(f"{existing} is no folder in which you may read and create files")
        find_checkpoint(run, resume=config.checkpoint.resume)
