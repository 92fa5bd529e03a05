"""Opens the model of ``bench train``, and makes the training configuration of an arm."""

from pathlib import Path

from tightwire.bench.train.options import ARMS, TrainOptions, model_values
from tightwire.comm.group.topology import Topology
from tightwire.training.config.tree import ModelConfig, TrainConfig
from tightwire.training.engine.options import EngineOptions, engine_options
from tightwire.training.start.model import StartingModel, open_starting_model


def open_model(model: str, seed: int) -> StartingModel:
    """Raises ModelError: there is no such model."""
    values = ModelConfig.model_validate(model_values(model))
    return open_starting_model(values, seed=seed, keep_in=Path(), texts=lambda: ())


def config_of_arm(options: TrainOptions, name: str) -> tuple[TrainConfig, EngineOptions]:
    """The training configuration of an engine's arm. Raises ValueError: the arm does not fit these ranks."""
    config = TrainConfig.model_validate(
        {
            "run": "bench",
            "device": "cpu",
            "model": {**model_values(options.model), "compute_dtype": options.dtype},
            "data": {"files": ["-"], "sequence_tokens": options.sequence_tokens},  # tokens are random, no file is read
            "batch": {"sequences": options.sequences * options.world_size, "micro_sequences": options.sequences},
            "optimizer": ARMS[name].optimizer,
            "parallel": {**ARMS[name].parallel, "timeout_s": options.timeout_s},
        }
    )
    how = engine_options(config)
    try:
        config.check_ranks(Topology(0, options.world_size, num_nodes=options.nodes))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return config, how
