"""Rotary tables: cosine and sine of every position and frequency, for each kind of scaling."""

from collections.abc import Callable

import torch
from torch import Tensor

from tightwire.kernels.spec import rope
from tightwire.model.checkpoint.config import LlamaConfig, RopeScaling

Angles = tuple[Tensor, Tensor]  # cosines and sines, both (positions, numbers rotated / 2) float32


def rope_tables(config: LlamaConfig, max_positions: int, device: torch.device) -> list[Angles]:
    """Return the tables of each layer; layers that rotate in the same way share them."""
    local = config.local_rope_theta
    whole = _table(config, config.rope_theta, config.rope_scaling, max_positions)
    tables = {"usual": whole, "local": whole, "nope": (torch.ones_like(whole[0]), torch.zeros_like(whole[1]))}
    if local is not None:
        tables["local"] = _table(config, local, RopeScaling(), max_positions)
    placed = {name: (cos.to(device), sin.to(device)) for name, (cos, sin) in tables.items()}
    names = ["local" if layer in config.sliding else "usual" for layer in range(config.num_layers)]
    names = ["nope" if layer in config.nope else name for layer, name in enumerate(names)]
    return [placed[name] for name in names]


def _table(config: LlamaConfig, theta: float, scaling: RopeScaling, max_positions: int) -> Angles:
    """Return cosine and sine of position x frequency; frequencies are ``theta ** (-2i/E)``, scaled."""
    width = config.rotary_dim or config.head_dim
    wavelengths = theta ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width)
    frequencies = _FREQUENCIES[scaling.kind](wavelengths, scaling, theta, max_positions)
    angles = torch.outer(torch.arange(max_positions).float(), frequencies)
    return angles.cos() * scaling.attention_factor, angles.sin() * scaling.attention_factor


_FREQUENCIES: dict[str, Callable[[Tensor, RopeScaling, float, int], Tensor]] = {
    "none": lambda wavelengths, *_: 1.0 / wavelengths,
    "dynamic": lambda wavelengths, *_: 1.0 / wavelengths,
    "linear": lambda wavelengths, own, *_: 1.0 / wavelengths / own.factor,
    "llama3": lambda wavelengths, own, *_: rope.llama3(
        wavelengths, own.factor, own.original_max_positions, own.low_freq_factor, own.high_freq_factor
    ),
    "yarn": lambda wavelengths, own, theta, _: rope.yarn(
        wavelengths, theta, own.factor, own.original_max_positions, own.beta_fast, own.beta_slow, own.truncate
    ),
    # The short factors if all sequences fit the original context: transformers changes the factors when a sequence grows past it,
    # after which its cached keys no longer fit.
    "longrope": lambda wavelengths, own, _, max_positions: rope.longrope(
        wavelengths, own.long_factors if max_positions > own.original_max_positions else own.short_factors
    ),
}
