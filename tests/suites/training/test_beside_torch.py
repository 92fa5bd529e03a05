"""Ranks as processes: the same bits as torch's DDP whose hook adds in the same order, and FSDP2's numbers."""

from pathlib import Path

import pytest
from harness import run_ranks
from helpers.training.training_processes import Case, beside_torch

from tightwire.training.config.sharding import SHARDINGS


@pytest.mark.slow
def test_steps_equal_those_of_ddp_and_fsdp2(tmp_path: Path) -> None:
    """Losses, gradients of every step and parameters. Rich: three micro-batches, tied, frozen, recomputed."""
    cases = [
        Case(world_size=1, sharding="zero3", rich=True),
        *(Case(world_size=2, sharding=name, rich=False) for name in SHARDINGS),
        Case(world_size=2, sharding="zero1", rich=True),
        *(Case(world_size=4, sharding=name, rich=True) for name in ("zero3", "hybrid")),
    ]

    run_ranks(4, beside_torch, str(tmp_path), 3, cases, timeout_s=280, collective_timeout_s=120)
