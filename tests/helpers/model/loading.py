"""Loads resident weights, with the defaults that most tests need."""

from collections.abc import Callable

import torch

from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.reader import CheckpointReader
from tightwire.model.layout import Shard
from tightwire.model.weights import EVERYTHING_RESIDENT
from tightwire.model.weights.formats import WeightFormats
from tightwire.model.weights.load import CheckpointStore, load_weights
from tightwire.model.weights.source import ResidentWeights


def load_resident(
    reader: CheckpointReader,
    config: LlamaConfig,
    shard: Shard,
    *,
    dtype: torch.dtype,
    formats: WeightFormats | None = None,
    progress: Callable[[float], None] = lambda fraction: None,
) -> ResidentWeights:
    """One rank's weights on the CPU."""
    files = CheckpointStore.for_plan(reader, config, shard, EVERYTHING_RESIDENT, dtype, formats or WeightFormats())
    device = torch.device("cpu")
    weights = load_weights(files, EVERYTHING_RESIDENT, device=device, timeout_s=1.0, progress=progress)
    assert isinstance(weights, ResidentWeights)
    return weights
