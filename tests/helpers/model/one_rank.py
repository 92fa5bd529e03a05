"""A runner of a checkpoint on one device, without other ranks."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.group.group import open_process_group
from tightwire.comm.group.topology import Topology
from tightwire.model.build import RankGroups, RunnerOptions, build_runner
from tightwire.model.layout import make_layout
from tightwire.model.open import open_checkpoint
from tightwire.model.runner import ModelRunner


def one_rank_runner(folder: Path, device: torch.device, **options: Any) -> ModelRunner:
    """``options``: of ``RunnerOptions``, whose dtype is float32 by default."""
    checkpoint = open_checkpoint(str(folder))
    group = open_process_group(Topology(0, 1), store=HashStore(), device=device)
    layout = make_layout(checkpoint.config, 1)
    given = RunnerOptions(**{"dtype": torch.float32, **options})
    return build_runner(checkpoint.config, checkpoint.reader(), layout, RankGroups(group), given)
