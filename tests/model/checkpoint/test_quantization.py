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
        ({**GPTQ, "group_size": -1, "desc_act": True}, "gptq: 4 bits, rows, act-order"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, "awq: 4 bits, groups of 64"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "FP8, blocks of 128 x 128"),
    ],
)
def test_names_say_how_weights_are_stored(stated: dict[str, Any], name: str) -> None:
    found = parse_quantization({"quantization_config": stated})
    assert found is not None and found.name == name


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quantized by 'bitsandbytes'; supported: awq"),
        ({}, None),
        ({"bits": 4}, "quantized by 'unknown'"),
        ({**GPTQ, "bits": 3}, "gptq with 3 bits is not supported"),
        ({**GPTQ, "group_size": 16}, "gptq with groups of 16 numbers is not supported"),
        ({"quant_method": "awq", "version": "gemv"}, "awq version 'gemv' is not supported"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "needs two sizes, got 128"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "with 0 kinds of weights"),
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
