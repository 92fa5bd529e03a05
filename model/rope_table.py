"""Rotary position tables: cosine and sine of every position, computed once at start-up."""

import math

import torch
from torch import Tensor

from tightwire.model.checkpoint.config import LlamaConfig, RopeScaling


def rope_table(config: LlamaConfig, max_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position x frequency, both (max_positions, E/2) float32.

    Frequencies are ``theta ** (-2i/E)``, stretched as ``config.rope_scaling`` says. Computed in float32 as in
    transformers, because token parity in float32 needs equal bits.
    Cost: 4 E bytes a position.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = _stretch(1.0 / config.rope_theta**exponents, config.rope_scaling)
    angles = torch.outer(torch.arange(max_positions).float(), frequencies)
    return angles.cos().to(device), angles.sin().to(device)


def _stretch(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    if scaling.kind == "none":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    return _stretch_llama3(frequencies, scaling)


def _stretch_llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide the long wavelengths by ``factor``, keep the short ones, blend in between (Llama 3, 2407.21783)."""
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)  # full turns within the trained context
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept_share = ramp.clamp(0.0, 1.0)
    return (1 - kept_share) * frequencies / scaling.factor + kept_share * frequencies
