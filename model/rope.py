"""Rotary tables: cosine and sine of every position and frequency, for each kind of scaling."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tightwire.model.checkpoint.config import LlamaConfig, RopeScaling

Angles = tuple[Tensor, Tensor]  # cosines and sines, both (positions, numbers rotated / 2) float32


def rope_tables(config: LlamaConfig, max_positions: int, device: torch.device) -> list[Angles]:
    """Return the tables of each layer; layers that rotate in the same way share them."""
    local = config.local_rope_theta
    whole = _table(config, config.rope_theta, config.rope_scaling, max_positions)
    tables = {"": whole, "local": whole, "nope": (torch.ones_like(whole[0]), torch.zeros_like(whole[1]))}
    if local is not None:
        tables["local"] = _table(config, local, RopeScaling(), max_positions)
    placed = {name: (cos.to(device), sin.to(device)) for name, (cos, sin) in tables.items()}
    return [
        placed["nope" if layer in config.nope else "local" if layer in config.sliding else ""]
        for layer in range(config.num_layers)
    ]


def _table(config: LlamaConfig, theta: float, scaling: RopeScaling, max_positions: int) -> Angles:
    """Return cosine and sine of position x frequency.

    Frequencies are ``theta ** (-2i/E)``, scaled. The float32 arithmetic is that of transformers, because equal tokens in
    float32 need equal bits.
    """
    width = config.rotary_dim or config.head_dim
    wavelengths = theta ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width)
    frequencies = _FREQUENCIES[scaling.kind](wavelengths, scaling, theta, max_positions)
    angles = torch.outer(torch.arange(max_positions).float(), frequencies)
    return angles.cos() * scaling.attention_factor, angles.sin() * scaling.attention_factor


def _llama3(wavelengths: Tensor, scaling: RopeScaling, theta: float, max_positions: int) -> Tensor:
    """Divide frequencies of long wavelengths by ``factor``, keep short ones, and interpolate (Llama 3, 2407.21783)."""
    frequencies = 1.0 / wavelengths
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)  # full turns within the trained context
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept_share = ramp.clamp(0.0, 1.0)
    return (1 - kept_share) * frequencies / scaling.factor + kept_share * frequencies


def _yarn(wavelengths: Tensor, scaling: RopeScaling, theta: float, max_positions: int) -> Tensor:
    """Keep frequencies that turn often in the trained context, divide the others by ``factor``, and interpolate."""
    half = len(wavelengths)

    def place_of(num_turns: float) -> float:
        turned = scaling.original_max_positions / (num_turns * 2 * math.pi)
        return 2 * half * math.log(turned) / (2 * math.log(theta))

    first, last = place_of(scaling.beta_fast), place_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    if first == last:
        last += 0.001
    ramp = ((torch.arange(half, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    kept_share = 1 - ramp
    return 1.0 / (scaling.factor * wavelengths) * (1 - kept_share) + 1.0 / wavelengths * kept_share


def _longrope(wavelengths: Tensor, scaling: RopeScaling, theta: float, max_positions: int) -> Tensor:
    """Divide each frequency by its own factor: the short ones if all sequences fit the original context.

    transformers changes the factors when a sequence grows past it, after which its cached keys no longer fit.
    """
    is_long = max_positions > scaling.original_max_positions
    return 1.0 / (torch.tensor(scaling.long_factors if is_long else scaling.short_factors) * wavelengths)


_FREQUENCIES: dict[str, Callable[[Tensor, RopeScaling, float, int], Tensor]] = {
    "none": lambda wavelengths, *_: 1.0 / wavelengths,
    "dynamic": lambda wavelengths, *_: 1.0 / wavelengths,
    "linear": lambda wavelengths, scaling, *_: 1.0 / wavelengths / scaling.factor,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
