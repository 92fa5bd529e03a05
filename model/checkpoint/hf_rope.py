"""Reads and writes the rotary embedding of a config.json, in the spellings of transformers 4 and 5."""

import math
from collections.abc import Mapping
from typing import Any

from tightwire.model.checkpoint.config import ROPE_KINDS, LlamaConfig, RopeScaling
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.families import Family

# Kinds of layers, and parts of ``rope_parameters`` where those with a window rotate otherwise.
FULL, SLIDING = "full_attention", "sliding_attention"
ORIGINAL = "original_max_position_embeddings"
# Kinds whose files say what the original context was, and what else they say by the names of ``RopeScaling``.
_WRITTEN = {
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "truncate"),
    "longrope": ("attention_factor",),
}


def rope_from_hf(config: Mapping[str, Any], family: Family, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return theta, scaling and width, from ``rope_theta`` and ``rope_scaling`` or transformers 5's ``rope_parameters``."""
    by_kind = "local_rope_theta" in family.keys  # layers with a window rotate otherwise
    rope, local = _stated(config, family, by_kind=by_kind)
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    found: dict[str, Any] = {"rope_theta": theta}
    if by_kind:
        found["local_rope_theta"] = float(local.get("rope_theta") or fields.get("local_rope_theta") or theta)
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        if not family.partial_rotary:
            raise ModelError(f"partial_rotary_factor {partial} of {family.names.name} is not supported; supported: 1.0")
        head_dim = fields["head_dim"]
        found["rotary_dim"] = rotary_dim = int(head_dim * partial)
        if rotary_dim % 2 or not 0 < rotary_dim < head_dim:
            rotates = f"partial_rotary_factor {partial} rotates {rotary_dim} of a head's {head_dim} numbers"
            raise ModelError(f"{rotates}; supported: an even number of them")
    kind = "longrope" if "short_factor" in rope else rope.get("rope_type") or rope.get("type") or "default"
    try:  # early files of Phi-3 call longrope su or yarn
        if rope.get("llama_4_scaling_beta"):  # temperatures of attention are 1 in the original context
            found["max_positions"] = min(fields["max_positions"], int(rope[ORIGINAL]))
        found["rope_scaling"] = _scaling("none" if kind == "default" else kind, rope, fields["max_positions"])
    except KeyError as error:
        raise ModelError(f"rope scaling {kind!r} lacks {error.args[0]!r}") from None
    return found


def _stated(config: Mapping[str, Any], family: Family, *, by_kind: bool) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return what a file says of the rotation of all layers, or ``by_kind`` of those without a window and of the others.

    With both spellings ``rope_scaling`` applies as in transformers, and keeps a theta that only ``rope_parameters`` has.
    """
    given = config.get("rope_parameters") or family.defaults.get("rope_parameters", {})
    scaling, local = config.get("rope_scaling") or {}, given.get(SLIDING) or {}
    if given and by_kind != (FULL in given or SLIDING in given):
        wanted = f"the keys {FULL} and {SLIDING}" if by_kind else "one theta and scaling for all layers"
        raise ModelError(f"rope_parameters of {family.names.name} must have {wanted}, got {given!r:.80}")
    if (kind := local.get("rope_type") or local.get("type") or "default") != "default":
        raise ModelError(f"rope scaling {kind!r} of {SLIDING} is not supported; supported: default")
    if by_kind:
        return {**(given.get(FULL) or {}), **scaling}, local
    kept = {key: given[key] for key in ("rope_theta", "partial_rotary_factor") if key in given}
    rope = {**(kept if scaling else given), **scaling}
    if original := config.get(ORIGINAL):
        rope[ORIGINAL] = original
    return rope, local


def _scaling(kind: str, rope: Mapping[str, Any], max_positions: int) -> RopeScaling:
    if kind == "none":
        return RopeScaling()
    if kind not in ROPE_KINDS:
        raise ModelError(f"rope scaling {kind!r} is not supported; supported: default, {', '.join(ROPE_KINDS[1:])}")
    if kind not in _WRITTEN:
        return RopeScaling(kind=kind, factor=float(rope["factor"]))
    original = int(rope.get(ORIGINAL) or max_positions)
    if kind == "llama3":
        bounds: dict[str, Any] = {name: float(rope[name]) for name in _WRITTEN[kind]}
        return RopeScaling(kind=kind, factor=float(rope["factor"]), original_max_positions=original, **bounds)
    factor = float(rope.get("factor") or max_positions / original)
    given: dict[str, Any] = {"kind": kind, "factor": factor, "original_max_positions": original}
    if kind == "yarn":
        mscale, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
        ratio = yarn_attention(factor, mscale) / yarn_attention(factor, of_all) if mscale and of_all else None
        usual = ratio or yarn_attention(factor)
        given |= {"beta_fast": float(rope.get("beta_fast") or 32), "beta_slow": float(rope.get("beta_slow") or 1)}
        given["truncate"] = bool(rope.get("truncate", True))
    else:
        usual = longrope_attention(factor, original)
        given |= {f"{name}s": tuple(map(float, rope[name])) for name in ("short_factor", "long_factor")}
    return RopeScaling(**given, attention_factor=float(rope.get("attention_factor") or usual))


def longrope_attention(factor: float, original_max_positions: int) -> float:
    """Return LongRoPE's factor of cosines and sines. Source: arXiv 2402.13753."""
    return math.sqrt(1 + math.log(factor) / math.log(original_max_positions)) if factor > 1 else 1.0


def yarn_attention(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's factor of cosines and sines. Source: arXiv 2309.00071, section 3.4."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """Return the keys of a config.json from which ``rope_from_hf`` reads the same."""
    rope, written = _scaling_to_hf(config.rope_scaling), {"rope_theta": config.rope_theta}
    if config.rotary_dim:
        # A little more, because rounding down must give the same number again.
        written["partial_rotary_factor"] = (config.rotary_dim + 0.25) / config.head_dim
    if config.local_rope_theta is not None:
        local = {"rope_type": "default", "rope_theta": config.local_rope_theta}
        return {"rope_parameters": {FULL: {"rope_type": "default", **(rope or {}), **written}, SLIDING: local}}
    if rope is not None and config.rope_scaling.kind == "longrope":
        written[ORIGINAL] = config.rope_scaling.original_max_positions
    if rope is None and "rope_parameters" in config.entry.defaults:  # without one the family's would be read
        rope = {"rope_type": "default"}
    return {**written, "rope_scaling": rope}


def _scaling_to_hf(scaling: RopeScaling) -> dict[str, Any] | None:
    if scaling.kind == "none":
        return None
    rope: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in _WRITTEN:
        rope[ORIGINAL] = scaling.original_max_positions
        rope |= {name: getattr(scaling, name) for name in _WRITTEN[scaling.kind]}
    if scaling.kind == "longrope":
        rope |= {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
    return rope
