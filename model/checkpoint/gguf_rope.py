"""Reads the rotary embedding of a .gguf from its keys and its tensors of factors."""

import math
from typing import Any

import torch

from tightwire.model.checkpoint.config import RopeScaling
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.gguf import GgufFile
from tightwire.model.checkpoint.hf_rope import longrope_attention, yarn_attention
from tightwire.model.families import Family

_DIVISORS = "rope_freqs.weight"  # of Llama 3.1 and later
_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")  # of longrope


def shortest_float(value: float) -> float:
    """Return the shortest decimal that rounds to this float32, such as 1e-5 for 9.999999747378752e-06."""
    return float(f"{value:.6g}")


def rope_from_gguf(file: GgufFile, family: Family, head_dim: int) -> dict[str, Any]:
    """Return theta, scaling and width; raises ModelError for anything that is not supported."""
    rotary_dim = file.size("rope.dimension_count", head_dim)
    if rotary_dim != head_dim and not (family.partial_rotary and rotary_dim < head_dim and rotary_dim % 2 == 0):
        raise ModelError(f"{file.arch}.rope.dimension_count={rotary_dim} differs from head size {head_dim}")
    theta = shortest_float(float(file.own("rope.freq_base", 10000.0)))
    scaling = _scaling(file, rotary_dim, theta)
    return {"rope_theta": theta, "rope_scaling": scaling, "rotary_dim": rotary_dim if rotary_dim < head_dim else 0}


def _scaling(file: GgufFile, rotary_dim: int, theta: float) -> RopeScaling:
    """Read scaling from the keys, or from the divisors or factors that llama.cpp stores as tensors."""
    kind = file.own("rope.scaling.type")
    factor = shortest_float(float(file.own("rope.scaling.factor", 0) or file.own("rope.scale_linear", 0) or 1))
    if kind not in (None, "none", "linear", "yarn", "longrope"):
        raise ModelError(f"rope scaling {kind!r} is not supported; supported: none, linear, llama3, yarn, longrope")
    if _DIVISORS in file.tensors:
        if factor != 1.0:
            raise ModelError(f"{_DIVISORS} together with a scaling factor of {factor} is not supported")
        return _llama3(file, rotary_dim, theta)
    if all(name in file.tensors for name in _FACTORS):
        return _longrope(file, rotary_dim)
    if kind == "yarn":
        return RopeScaling(
            kind="yarn",
            factor=factor,
            original_max_positions=file.size("rope.scaling.original_context_length"),
            attention_factor=yarn_attention(factor) * float(file.own("rope.scaling.attn_factor") or 1.0),
            beta_fast=float(file.own("rope.scaling.yarn_beta_fast") or 32),
            beta_slow=float(file.own("rope.scaling.yarn_beta_slow") or 1),
        )
    if kind in ("none", "longrope") or factor == 1.0:
        return RopeScaling()
    return RopeScaling(kind="linear", factor=factor)


def _numbers(file: GgufFile, name: str, rotary_dim: int) -> list[float]:
    tensor = file.tensors[name]
    if tensor.kind.name != "F32" or tensor.shape != (rotary_dim // 2,):
        raise ModelError(f"{name} has an unexpected type or shape {tensor.shape}")
    return tensor.file.numbers(tensor.offset, tensor.shape, torch.float32).tolist()


def _longrope(file: GgufFile, rotary_dim: int) -> RopeScaling:
    original, length = file.size("rope.scaling.original_context_length"), file.size("context_length")
    factor = length / original
    short, long = (tuple(map(shortest_float, _numbers(file, name, rotary_dim))) for name in _FACTORS)
    return RopeScaling(
        kind="longrope",
        factor=factor,
        original_max_positions=original,
        attention_factor=float(file.own("rope.scaling.attn_factor") or longrope_attention(factor, original)),
        short_factors=short,
        long_factors=long,
    )


def _llama3(file: GgufFile, rotary_dim: int, theta: float) -> RopeScaling:
    """Recover Llama 3's scaling: the largest divisor is the factor, the others must match the released values."""
    divisors = _numbers(file, _DIVISORS, rotary_dim)
    if all(divisor == 1.0 for divisor in divisors):
        return RopeScaling()
    scaling = RopeScaling(kind="llama3", factor=shortest_float(max(divisors)))
    want = [llama3_divisor(scaling, 2 * math.pi * theta ** (2 * i / rotary_dim)) for i in range(rotary_dim // 2)]
    if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(divisors, want, strict=True)):
        raise ModelError(
            f"the rope divisors in {_DIVISORS} are not those of Llama 3 "
            f"(low_freq_factor {scaling.low_freq_factor}, high_freq_factor {scaling.high_freq_factor}, trained context "
            f"{scaling.original_max_positions}); other long-context scalings are not supported"
        )
    return scaling


def llama3_divisor(scaling: RopeScaling, wavelength: float) -> float:
    """The divisor that Llama 3's scaling applies to the frequency with this wavelength, in positions."""
    turns = scaling.original_max_positions / wavelength
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept_share = min(max(share, 0.0), 1.0)
    return 1 / ((1 - kept_share) / scaling.factor + kept_share)
