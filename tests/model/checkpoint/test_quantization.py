"""What a quantization_config may say, and what is refused by name."""

from typing import Any

import pytest

from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.quantization import parse_quantization

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


def test_no_quantization() -> None:
    assert parse_quantization({}) is None
    assert parse_quantization({"quantization_config": None}) is None


@pytest.mark.parametrize(
    ("stated", "name"),
    [
        (GPTQ, "gptq: 4 bits, groups of 128"),
        ({**GPTQ, "group_size": -1}, "gptq: 4 bits, rows"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, "awq: 4 bits, groups of 64"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "FP8, blocks of 128 x 128"),
        (
            {**GPTQ, "dynamic": {r"-:.*\.down_proj": {}}, "lm_head": True, "is_marlin_format": False, "adapter": None},
            "gptq: 4 bits, groups of 128",
        ),
    ],
)
def test_names_say_how_weights_are_stored(stated: dict[str, Any], name: str) -> None:
    found = parse_quantization({"quantization_config": stated})
    assert found is not None and found.name == name


def _rotated(*locations: str) -> dict[str, Any]:
    """Of compressed-tensors, with a transform at these places."""
    transform = {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": place} for place in locations]}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}},
        "transform_config": {"config_groups": {"R": transform}} if locations else {},
    }


@pytest.mark.parametrize("stated", [_rotated(), _rotated("weight_input", "weight_output")])
def test_transforms_that_are_in_the_weights_already_change_nothing(stated: dict[str, Any]) -> None:
    without = {key: value for key, value in stated.items() if key != "transform_config"}
    assert parse_quantization({"quantization_config": stated}) == parse_quantization({"quantization_config": without})


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quantized by 'bitsandbytes'; supported: awq"),
        ({}, None),
        ({"bits": 4}, "quantized by 'unknown'"),
        ({**GPTQ, "bits": 3}, "gptq with 3 bits is not supported"),
        ({**GPTQ, "group_size": 16}, "gptq with groups of 16 numbers is not supported"),
        ({"quant_method": "awq", "version": "GEMV"}, "awq with version 'GEMV' is not supported; supported: gemm"),
        ({"quant_method": "awq", "zero_point": False}, "awq with zero_point False is not supported; supported: true"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "gptq with checkpoint_format 'marlin' .* supported: gptq or gptq_v2"),
        ({**GPTQ, "format": "bitblas"}, "gptq with format 'bitblas' is not supported; supported: gptq or gptq_v2"),
        ({**GPTQ, "is_marlin_format": True}, "gptq with is_marlin_format True is not supported; supported: false"),
        ({**GPTQ, "pack_dtype": "int16"}, "gptq with pack_dtype 'int16' is not supported; supported: int32"),
        ({**GPTQ, "adapter": {"name": "lora"}}, "gptq with adapter {'name': 'lora'} is not supported; supported: none"),
        ({**GPTQ, "dynamic": {"-:lm_head": {}, r"+:.*\.3\..*": {"bits": 8}}}, r"gptq with dynamic '\+:\.\*"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 with fmt 'e5m2' is not supported; supported: e4m3"),
        ({**_rotated(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config with format 'sparse-24"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "needs two sizes, got 128"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "with 0 kinds of weights"),
        (_rotated("input", "weight_input"), "transform_config at input is not supported"),
        (_rotated("q_attn", "k_cache"), "transform_config at k_cache, q_attn is"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float"}}},
            },
            "format 'nvfp4-pack-quantized' is not supported",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(stated: dict[str, Any], message: str | None) -> None:
    if message is None:
        assert parse_quantization({"quantization_config": stated}) is None
        return
    with pytest.raises(ModelError, match=message):
        parse_quantization({"quantization_config": stated})
