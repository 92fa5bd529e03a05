"""The verb `train`, with the server's engine as what answers the prompts of GRPO and of a distillation.

torch is imported when a run needs it.
"""

import os
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tightwire.parent_death import die_with_parent

if TYPE_CHECKING:
    from tightwire.comm.group.group import Group
    from tightwire.comm.group.topology import Topology
    from tightwire.training.config.tree import TrainConfig
    from tightwire.training.data.documents import RunData
    from tightwire.training.engine.engine import Engine
    from tightwire.training.run.rollouts import Engines, Sampler
    from tightwire.training.start.model import StartingModel


def train(argv: Sequence[str]) -> int:
    """Run ``tightwire train``; exit codes as there. Ranks of torchrun end with it, as at SIGTERM: saved."""
    from tightwire.training.cli import train as run

    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(signal.SIGTERM)
    return run(argv, make_engines)


def make_engines() -> "Engines":
    """What a run has answers from."""
    from tightwire.training.run.rollouts import Engines

    return Engines(open_engine, record, engine_bytes)


def open_engine(
    start: "StartingModel",
    config: "TrainConfig",
    group: "Group",
    most_sequences: int,
    trainer: "Engine",
) -> "Sampler":
    """This rank of an engine of the ranks of ``group``. Raises ValueError: the weights cannot be read, or split over them."""
    from tightwire.rollout_engine import RolloutEngine

    return RolloutEngine(start, config, group, most_sequences, trainer)


def record(*given: Any) -> "RunData":
    """The answers of a distillation's target, as ``rollout_engine.record``."""
    from tightwire.rollout_engine import record

    return record(*given)


def engine_bytes(config: "TrainConfig", topology: "Topology") -> dict[str, int]:
    """What a rank's engine holds, as ``rollout_engine.engine_bytes``."""
    from tightwire.rollout_engine import engine_bytes

    return engine_bytes(config, topology)
