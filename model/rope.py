"""Rotary tables: cosine and sine of every position and frequency, for each kind of scaling."""

import math

import torch
from torch import Tensor

from tightwire.model.checkpoint.config import LlamaConfig, RopeScaling


def rope_table(config: LlamaConfig, max_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of position x frequency, both (max_positions, E/2) float32.

    Frequencies are ``theta ** (-2i/E)``, scaled by ``config.rope_scaling``. The float32 arithmetic is that of
    transformers, because equal tokens in float32 need equal bits.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = _stretched(1.0 / config.rope_theta**exponents, config.rope_scaling)
    angles = torch.outer(torch.arange(max_positions).float(), frequencies)
    return angles.cos().to(device), angles.sin().to(device)


def _stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    if scaling.kind == "none":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # Divide frequencies of long wavelengths by ``factor``, keep short ones, and interpolate (Llama 3, 2407.21783).
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)  # full turns within the trained context
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept_share = ramp.clamp(0.0, 1.0)
    return (1 - kept_share) * frequencies / scaling.factor + kept_share * frequencies
