"""Defines the benchmark's models and makes an arm's training configuration."""

from pathlib import Path
from typing import Any

from tightwire.bench.train.arms import Arm
from tightwire.training.config.tree import ModelConfig, TrainConfig
from tightwire.training.start.model import StartingModel, open_start

# The name is the approximate number of parameters; embeddings are tied.
TINY = "tiny"
MODELS: dict[str, dict[str, int | float | bool]] = {
    TINY: {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 192},
    "10m": {"hidden_size": 256, "num_hidden_layers": 10, "num_attention_heads": 8, "intermediate_size": 896},
    "30m": {"hidden_size": 448, "num_hidden_layers": 10, "num_attention_heads": 7, "intermediate_size": 1536},
    "60m": {"hidden_size": 512, "num_hidden_layers": 16, "num_attention_heads": 8, "intermediate_size": 1792},
}
_VOCABULARY = {"vocab_size": 4096}


def model_values(model: str) -> dict[str, Any]:
    """The ``model`` section of a configuration."""
    if model in MODELS:
        return {"shape": {**MODELS[model], **_VOCABULARY}}
    return {"start": model}


def open_model(model: str, seed: int) -> StartingModel:
    """
    Raises:
        ModelError: there is no such model.
    """
    return open_start(ModelConfig.model_validate(model_values(model)), seed=seed, keep_in=Path(), texts=lambda: ())


def arm_config(
    arm: Arm, *, model: str, dtype: str, world_size: int, sequences: int, sequence_tokens: int, timeout_s: float
) -> TrainConfig:
    """
    Raises:
        ValueError: the arm does not fit the model.
    """
    return TrainConfig.model_validate(
        {
            "run": "bench",
            "device": "cpu",
            "model": {**model_values(model), "compute_dtype": dtype},
            "data": {"files": ["-"], "sequence_tokens": sequence_tokens},  # tokens are random, no file is read
            "batch": {"sequences": sequences * world_size, "micro_sequences": sequences},
            "optimizer": arm.optimizer,
            "parallel": {**arm.parallel, "timeout_s": timeout_s},
        }
    )
