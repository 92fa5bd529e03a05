"""The verb `train`, with the server's engine as what answers the prompts of GRPO. torch is imported when a run needs it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tightwire.comm.group.group import Group
    from tightwire.training.config.tree import TrainConfig
    from tightwire.training.run.rollouts import Sampler
    from tightwire.training.start.model import StartingModel


def train(argv: Sequence[str]) -> int:
    """Run ``tightwire train``; exit codes as there."""
    from tightwire.training.cli import train as run

    return run(argv, open_engine)


def open_engine(start: "StartingModel", config: "TrainConfig", group: "Group", most_sequences: int) -> "Sampler":
    """This rank of an engine of the ranks of ``group``. Raises ValueError: the weights cannot be read, or split over them."""
    from tightwire.rollout_engine import RolloutEngine

    return RolloutEngine(start, config, group, most_sequences)
