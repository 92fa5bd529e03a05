"""The verb `train`, with the server's engine as what answers the prompts of GRPO. torch is imported when a run needs it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from tightwire.training.run.rollouts import Sampler
    from tightwire.training.start.model import StartingModel


def train(argv: Sequence[str]) -> int:
    """Run ``tightwire train``; exit codes as there."""
    from tightwire.training.cli import train as run

    return run(argv, open_engine)


def open_engine(
    start: "StartingModel", dtype: "torch.dtype", device: "torch.device", most_tokens: int, most_sequences: int
) -> "Sampler":
    """An engine of one rank. Raises ModelError: the weights cannot be read."""
    from tightwire.rollout_engine import RolloutEngine

    return RolloutEngine(start, dtype, device, most_tokens, most_sequences)
