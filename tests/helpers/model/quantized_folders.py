"""Tiny Llamas as AWQ, GPTQ, compressed-tensors and FP8 write them, by each format's own formula in numpy, one number at a time."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tiny import make_tiny
from torch import Tensor

GROUP = 64
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of the eight codes in an int32, from its lowest bits on


class Written(NamedTuple):
    """The tensors of one linear layer by ending, and the numbers that they stand for."""

    tensors: dict[str, Tensor]
    numbers: Tensor


class Scheme(NamedTuple):
    """A quantization_config, the writer of its layers, and the format that they are kept in."""

    stated: dict[str, Any]
    write: Callable[[np.ndarray, np.random.Generator], Written]
    kept_as: str
    is_rounded_again: bool = False


def _quantize(w: np.ndarray, group_D: np.ndarray, bits: int, symmetric: bool) -> tuple[np.ndarray, ...]:
    """Codes (O, D), scales (O, G) float16 and zeros (O, G)."""
    most, num_groups = 2**bits - 1, int(group_D.max()) + 1
    codes = np.zeros(w.shape, np.int64)
    scales, zeros = np.zeros((len(w), num_groups), np.float16), np.zeros((len(w), num_groups), np.int64)
    for g in range(num_groups):
        part = w[:, group_D == g]
        if symmetric:
            scale, zero = np.abs(part).max(1) / (most // 2), np.full(len(w), most // 2 + 1)
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scale = (high - low) / most
            zero = np.rint(-low / scale).astype(np.int64)
        scales[:, g], zeros[:, g] = scale.astype(np.float16), zero
        codes[:, group_D == g] = np.clip(np.rint(part / scales[:, g, None].astype(np.float64)) + zero[:, None], 0, most)
    return codes, scales, zeros


def _dequantize(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, group_D: np.ndarray) -> Tensor:
    exact = (codes - zeros[:, group_D]) * scales[:, group_D].astype(np.float64)
    return torch.from_numpy(exact.astype(np.float32))


def _pack(codes: np.ndarray, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """(A, B) codes as (A, B * bits / 32) int32; code ``places[i]`` of a group is in the i-th lowest bits."""
    count = 32 // bits
    out = np.zeros((codes.shape[0], codes.shape[1] // count), np.uint32)
    for i, place in enumerate(places or range(count)):
        out |= codes[:, place::count].astype(np.uint32) << np.uint32(bits * i)
    return torch.from_numpy(out.view(np.int32))


def _neighbours(num_columns: int) -> np.ndarray:
    return np.arange(num_columns) // GROUP


def _awq(w: np.ndarray, _: np.random.Generator) -> Written:
    group_D = _neighbours(w.shape[1])
    codes, scales, zeros = _quantize(w, group_D, 4, symmetric=False)
    return Written(
        {
            "qweight": _pack(codes.T, 4, _AWQ_COLUMNS),
            "qzeros": _pack(zeros.T, 4, _AWQ_COLUMNS),
            "scales": torch.from_numpy(scales.T.copy()),
        },
        _dequantize(codes, scales, zeros, group_D),
    )


def _gptq(bits: int, symmetric: bool, act_order: bool, stored_less: int) -> Callable[..., Written]:
    def write(w: np.ndarray, generator: np.random.Generator) -> Written:
        group_D = _neighbours(w.shape[1])
        if act_order:
            group_D = generator.permutation(group_D)
        codes, scales, zeros = _quantize(w, group_D, bits, symmetric)
        stored = (zeros.T - stored_less) % 2**bits
        tensors = {
            "qweight": _pack(codes, bits).t().contiguous(),
            "qzeros": _pack(stored, bits),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.from_numpy(group_D.astype(np.int32)),
        }
        return Written(tensors, _dequantize(codes, scales, zeros, group_D))

    return write


def _packed(bits: int, symmetric: bool, act_order: bool = False) -> Callable[..., Written]:
    def write(w: np.ndarray, generator: np.random.Generator) -> Written:
        group_D = _neighbours(w.shape[1])
        if act_order:
            group_D = generator.permutation(group_D)
        codes, scales, zeros = _quantize(w, group_D, bits, symmetric)
        tensors = {
            "weight_packed": _pack(codes, bits),
            "weight_scale": torch.from_numpy(scales),
            "weight_shape": torch.tensor(w.shape),
        }
        if act_order:
            tensors["weight_g_idx"] = torch.from_numpy(group_D.astype(np.int32))
        if not symmetric:
            tensors["weight_zero_point"] = _pack(zeros.T, bits).t().contiguous()
        return Written(tensors, _dequantize(codes, scales, zeros, group_D))

    return write


def _int8_rows(w: np.ndarray, _: np.random.Generator) -> Written:
    scale = torch.from_numpy((np.abs(w).max(1, keepdims=True) / 127).astype(np.float32)).bfloat16()
    codes = torch.from_numpy(np.rint(w / scale.float().numpy()).clip(-127, 127).astype(np.int8))
    return Written({"weight": codes, "weight_scale": scale}, codes.float() * scale.float())


def _fp8(block: tuple[int, int] | None, name: str) -> Callable[..., Written]:
    def write(w: np.ndarray, _: np.random.Generator) -> Written:
        rows, columns = block or (1, w.shape[1])
        shape = -(-w.shape[0] // rows), -(-w.shape[1] // columns)
        scale = np.zeros(shape, np.float32)
        for r in range(shape[0]):
            for c in range(shape[1]):
                part = w[r * rows : (r + 1) * rows, c * columns : (c + 1) * columns]
                scale[r, c] = np.abs(part).max() / 448
        spread = np.repeat(np.repeat(scale, rows, 0), columns, 1)[: w.shape[0], : w.shape[1]]
        codes = torch.from_numpy((w / spread).astype(np.float32)).to(torch.float8_e4m3fn)
        return Written(
            {"weight": codes, name: torch.from_numpy(scale)},
            codes.float() * torch.from_numpy(spread.astype(np.float32)),
        )

    return write


def _compressed(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
SCHEMES: dict[str, Scheme] = {
    "awq": Scheme({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, _awq, "Q4_1"),
    "gptq": Scheme(_GPTQ, _gptq(4, True, False, 1), "Q4_0"),
    "gptq-v2-asymmetric": Scheme(
        {**_GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}, _gptq(4, False, False, 0), "Q4_1"
    ),
    "gptq-asymmetric": Scheme({**_GPTQ, "sym": False}, _gptq(4, False, False, 1), "Q4_1"),
    "gptq-8": Scheme({**_GPTQ, "bits": 8}, _gptq(8, True, False, 1), "Q8_0"),
    "gptq-act-order": Scheme({**_GPTQ, "desc_act": True}, _gptq(4, True, True, 1), "Q8_0", is_rounded_again=True),
    "gptq-act-order-unsaid": Scheme(_GPTQ, _gptq(4, True, True, 1), "Q8_0", is_rounded_again=True),
    "w4a16-act-order": Scheme(
        _compressed("pack-quantized", strategy="group", group_size=GROUP, actorder="dynamic"),
        _packed(4, True, act_order=True),
        "Q8_0",
        is_rounded_again=True,
    ),
    "w4a16": Scheme(_compressed("pack-quantized", strategy="group", group_size=GROUP), _packed(4, True), "Q4_0"),
    "w4a16-asymmetric": Scheme(
        _compressed("pack-quantized", strategy="group", group_size=GROUP, symmetric=False), _packed(4, False), "Q4_1"
    ),
    "w8a16": Scheme(
        _compressed("pack-quantized", num_bits=8, strategy="group", group_size=GROUP), _packed(8, True), "Q8_0"
    ),
    "w8a8-int": Scheme(_compressed("int-quantized", num_bits=8, strategy="channel"), _int8_rows, "Q8_0"),
    "w8a8-fp8": Scheme(
        _compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        _fp8(None, "weight_scale"),
        "Q8_0",
        is_rounded_again=True,
    ),
    "fp8-blocks": Scheme(
        {"quant_method": "fp8", "weight_block_size": [32, 64]},
        _fp8((32, 64), "weight_scale_inv"),
        "Q8_0",
        is_rounded_again=True,
    ),
}


def make_quantized(path: Path, scheme: Scheme, **overrides: Any) -> dict[str, Tensor]:
    """Write a tiny Llama with quantized linear layers into ``path``; return the numbers that all its tensors stand for.

    Every input of a layer is a whole number of groups of ``GROUP``.
    """
    shape = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 192, **overrides}
    make_tiny(path, **shape)
    return quantize_folder(path, scheme)


def quantize_folder(path: Path, scheme: Scheme) -> dict[str, Tensor]:
    """Quantize the linear layers of a float folder in place; return the numbers that all its tensors stand for."""
    tensors, numbers, generator = {}, {}, np.random.default_rng(0)
    for name, tensor in load_file(path / "model.safetensors").items():
        if "layers" not in name or tensor.dim() == 1:
            tensors[name] = numbers[name] = tensor
            continue
        module = name.removesuffix(".weight")
        written = scheme.write(tensor.double().numpy(), generator)
        tensors |= {f"{module}.{ending}": part for ending, part in written.tensors.items()}
        numbers[name] = written.numbers
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": scheme.stated}))
    return numbers
