"""Rotary tables equal transformers' to the bit, for every kind of scaling."""

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tightwire.model.checkpoint.config import LlamaConfig, RopeScaling
from tightwire.model.rope import rope_tables

_LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_OTHER_LLAMA3 = {**_LLAMA3, "low_freq_factor": 0.5}


def _llama3(stated: dict[str, float]) -> tuple[RopeScaling, dict[str, object]]:
    own = {name.replace("_position_embeddings", "_positions"): number for name, number in stated.items()}
    return RopeScaling(kind="llama3", **own), {"rope_type": "llama3", **stated}  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("scaling", "theirs"),
    [
        (RopeScaling(), {"rope_type": "default"}),
        (RopeScaling(kind="linear", factor=4.0), {"rope_type": "linear", "factor": 4.0}),
        _llama3(_LLAMA3),
        _llama3(_OTHER_LLAMA3),
    ],
    ids=["none", "linear", "llama3", "other-llama3"],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_equals_transformers(scaling: RopeScaling, theirs: dict[str, object], head_dim: int) -> None:
    config = LlamaConfig(
        num_layers=1,
        hidden_size=4 * head_dim,
        num_heads=4,
        num_kv_heads=4,
        head_dim=head_dim,
        mlp_size=16,
        vocab_size=16,
        max_positions=131072,
        rope_theta=500000.0,
        rope_scaling=scaling,
    )
    reference = LlamaRotaryEmbedding(
        transformers.LlamaConfig(
            hidden_size=4 * head_dim,
            num_attention_heads=4,
            head_dim=head_dim,
            max_position_embeddings=131072,
            rope_parameters={**theirs, "rope_theta": 500000.0},
        )
    )

    cos_SE, sin_SE = rope_tables(config, 20000, torch.device("cpu"))[0]
    their_cos, their_sin = reference(torch.zeros(1, 20000, 1), torch.arange(20000)[None])

    assert torch.equal(cos_SE, their_cos[0, :, : head_dim // 2])
    assert torch.equal(sin_SE, their_sin[0, :, : head_dim // 2])
