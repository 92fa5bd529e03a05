"""A function for rank processes that answer prompts together, with an adapter made from a seed."""

from collections.abc import Sequence
from pathlib import Path

import torch

from tightwire.comm.group.group import Group
from tightwire.rollout_engine import RolloutEngine
from tightwire.training.config.tree import TrainConfig
from tightwire.training.start.answers import Answer
from tightwire.training.start.model import build_model, open_starting_model


def answer_together(
    group: Group, config: TrainConfig, prompts: Sequence[tuple[list[int], int]], num_tokens: int
) -> tuple[list[Answer], int, str]:
    """This rank's share of the answers, the bytes that it sent, and its transport."""
    start = open_starting_model(config.model, seed=0, keep_in=Path("unused"), texts=list)
    model = build_model(start.config, device=torch.device("cpu"), lora=config.model.lora)
    generator = torch.Generator().manual_seed(1)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters() if "lora_" in name}
    matrices = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    engine = RolloutEngine(start, config, group, len(prompts))
    engine.load(matrices)
    answers = engine.answer(prompts[group.rank :: group.world_size], num_tokens)
    engine.close()
    return answers, engine.bytes_sent, type(engine.transport).__name__
