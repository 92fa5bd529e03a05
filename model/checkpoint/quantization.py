"""The ``quantization_config`` of a config.json: what AWQ, GPTQ, compressed-tensors and FP8 say of their weights. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tightwire.model.checkpoint.errors import ModelError, naming

_SUPPORTED = "awq (gemm), gptq, compressed-tensors (W4A16, W8A16, W8A8-int, FP8), fp8; or plain safetensors, or GGUF"
_BITS = {"awq": (4,), "gptq": (4, 8), "packed": (4, 8), "plain": (8,)}
_GPTQ = "gptq", "gptq_v2"
# Keys that say how the numbers are stored, and the values that are read so; modules left out are seen by their tensors.
_READ: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "awq": {"version": ("gemm",), "zero_point": ("true",)},
    "gptq": {"checkpoint_format": _GPTQ, "format": _GPTQ, "is_marlin_format": ("false",), "pack_dtype": ("int32",)},
    "fp8": {"fmt": ("e4m3",)},
}
_NOT_READ = ("adapter", "rotation", "extra_config")  # such a key changes what the numbers mean, or adds to them
_GROUP_ELEMS = 32  # of the packed formats; a scale's columns must be whole groups


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the linear layers of a folder are stored."""

    layout: str  # awq, gptq, packed (compressed-tensors), or plain: one number of 8 bits an element
    bits: int = 8
    is_float: bool = False  # float8_e4m3fn instead of integers
    group_elems: int | None = None  # columns that share a scale; None: whole rows, or blocks with sizes of their own
    symmetric: bool = True  # the zero is the middle code
    stored_zero_offset: int = 0  # a stored zero is this much less than the zero
    block_elems: tuple[int, int] | None = None  # rows and columns that share a scale

    @property
    def name(self) -> str:
        """The storage in words, for messages."""
        kind = "FP8" if self.is_float else f"{self.bits} bits"
        shared = "rows" if self.group_elems is None else f"groups of {self.group_elems}"
        if self.block_elems is not None:
            shared = f"blocks of {self.block_elems[0]} x {self.block_elems[1]}"
        stored = {"packed": "compressed-tensors: ", "plain": ""}.get(self.layout, f"{self.layout}: ")
        return f"{stored}{kind}, {shared}"


@naming("config.json")
def parse_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Read ``quantization_config`` of a config.json; None: the weights are not quantized.

    Raises ModelError: a method, number of bits, group or packing that is not supported; it says which are.
    """
    stated = config.get("quantization_config")
    if not stated:
        return None
    if not isinstance(stated, Mapping):
        raise ModelError(f"quantization_config must be an object, got {stated!r:.80}")
    method = str(stated.get("quant_method", "unknown"))
    if method not in _PARSERS:
        raise ModelError(f"the checkpoint is quantized by {method!r}; supported: {_SUPPORTED}")
    for key, known in {**_READ.get(method, {}), **dict.fromkeys(_NOT_READ, ())}.items():
        if (value := stated.get(key)) not in (None, "", {}, []) and str(value).lower() not in known:
            possible = " or ".join(known) or "none"
            raise ModelError(f"{method} with {key} {value!r:.60} is not supported; supported: {possible}")
    found = _PARSERS[method](stated)
    group = found.group_elems
    if group is not None and (group < _GROUP_ELEMS or group % _GROUP_ELEMS):
        raise ModelError(f"{method} with groups of {group} numbers is not supported; supported: whole {_GROUP_ELEMS}s")
    if found.bits not in ((8,) if found.is_float else _BITS[found.layout]):
        kind = "floats of " if found.is_float else ""
        raise ModelError(f"{method} with {kind}{found.bits} bits is not supported; supported: {_SUPPORTED}")
    return found


def _group(size: object) -> int | None:
    """A group size as the files state it: -1 or nothing means whole rows."""
    return size if isinstance(size, int) and size > 0 else None


def _awq(stated: Mapping[str, Any]) -> Quantization:
    group = _group(stated.get("group_size", stated.get("q_group_size")))
    return Quantization("awq", int(stated.get("bits", stated.get("w_bit", 4))), group_elems=group, symmetric=False)


def _gptq(stated: Mapping[str, Any]) -> Quantization:
    if changed := [name for name in stated.get("dynamic") or () if not name.startswith("-:")]:
        raise ModelError(f"gptq with dynamic {changed[0]!r:.60} is not supported; supported: modules left out by -:")
    versions = stated.get("checkpoint_format"), stated.get("format")
    return Quantization(
        "gptq",
        int(stated.get("bits", 4)),
        group_elems=_group(stated.get("group_size")),
        symmetric=bool(stated.get("sym", True)),
        stored_zero_offset=int("gptq_v2" not in versions),  # the first version stores zero - 1
    )


def _compressed_tensors(stated: Mapping[str, Any]) -> Quantization:
    groups = list((stated.get("config_groups") or {}).values())
    layout = stated.get("format", "")
    kinds = {repr(group.get("weights")) for group in groups}
    if len(kinds) != 1 or not groups[0].get("weights"):
        raise ModelError(f"compressed-tensors with {len(kinds)} kinds of weights is not supported; use one")
    weights = groups[0]["weights"]
    known = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
    if layout not in known:
        raise ModelError(f"compressed-tensors format {layout!r} is not supported; supported: {', '.join(known)}")
    transforms = ((stated.get("transform_config") or {}).get("config_groups") or {}).values()
    if (sparse := (stated.get("sparsity_config") or {}).get("format", "dense")) != "dense":
        raise ModelError(f"sparsity_config with format {sparse!r:.60} is not supported; supported: dense")
    places = {str(each.get("location", "input")) for own in transforms for each in own.get("apply") or ()}
    if online := sorted(place for place in places if not place.startswith("weight_")):  # others are in the weights
        raise ModelError(f"transform_config at {', '.join(online)} is not supported; use a checkpoint without it")
    return Quantization(
        "packed" if layout == "pack-quantized" else "plain",
        int(weights.get("num_bits", 8)),
        is_float=weights.get("type") == "float",
        group_elems=_group(weights.get("group_size")),
        symmetric=bool(weights.get("symmetric", True)),
        block_elems=_blocks(weights.get("block_structure")),
    )


def _fp8(stated: Mapping[str, Any]) -> Quantization:
    return Quantization("plain", is_float=True, block_elems=_blocks(stated.get("weight_block_size")))


def _blocks(sizes: object) -> tuple[int, int] | None:
    if not sizes:
        return None
    if not isinstance(sizes, list | tuple) or len(sizes) != 2:
        raise ModelError(f"a block of weights needs two sizes, got {sizes!r}")
    return int(sizes[0]), int(sizes[1])


_PARSERS = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed_tensors, "fp8": _fp8, "fbgemm_fp8": _fp8}
