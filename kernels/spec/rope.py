"""Frequencies of rotary embeddings, scaled for contexts longer than the trained one. ``wavelengths``: (E/2,) float32.

The float32 arithmetic is that of transformers, because equal tokens in float32 need equal bits.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def llama3(wavelengths: Tensor, factor: float, trained: int, low: float, high: float) -> Tensor:
    """Divide frequencies of long wavelengths by ``factor``, keep short ones, and interpolate (Llama 3, 2407.21783)."""
    frequencies = 1.0 / wavelengths
    turns = trained / (2 * math.pi / frequencies)  # full turns within the trained context
    kept_share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept_share) * frequencies / factor + kept_share * frequencies


def yarn(
    wavelengths: Tensor, theta: float, factor: float, trained: int, fast: float, slow: float, truncate: bool
) -> Tensor:
    """Keep frequencies that turn often in the trained context, divide the others by ``factor``, and interpolate."""
    half = len(wavelengths)

    def place_of(num_turns: float) -> float:
        return 2 * half * math.log(trained / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = place_of(fast), place_of(slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    if first == last:
        last += 0.001
    ramp = ((torch.arange(half, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    kept_share = 1 - ramp
    return 1.0 / (factor * wavelengths) * (1 - kept_share) + 1.0 / wavelengths * kept_share


def longrope(wavelengths: Tensor, factors: Sequence[float]) -> Tensor:
    """Divide each frequency by its own factor."""
    return 1.0 / (torch.tensor(factors) * wavelengths)
