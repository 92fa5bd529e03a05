"""A model of packed weights on a GPU, which load arranges by plane: the CPU's tokens, and those of streamed layers."""

from pathlib import Path

import pytest
import torch
from helpers.model.tiny_gguf import make_tiny_gguf
from helpers.server.local_engine import local_engine, run_to_end
from helpers.server.staged_requests import params

from tightwire.kernels.spec.packed import PackedMatrix
from tightwire.model.open import Checkpoint, open_checkpoint
from tightwire.model.weights import EVERYTHING_RESIDENT, WeightPlan
from tightwire.server.ipc.messages import AddRequest

pytestmark = pytest.mark.gpu

_STREAMED = WeightPlan(source="stream", origin="host", streamed=(0, 1, 2))


def _tokens(checkpoint: Checkpoint, device: torch.device | None, plan: WeightPlan = EVERYTHING_RESIDENT) -> list[int]:
    options = {"device": device, "dtype": torch.float32, "max_model_len": 64, "weight_plan": plan}
    with local_engine(checkpoint, **options) as local:
        weights = local.runners[0].weights
        head = weights.outer.embedding
        assert isinstance(head, PackedMatrix) and head.split == (device is not None)
        local.engine.add(AddRequest("a", [5, 9, 200, 17], params({"temperature": 0.0, "max_tokens": 3})))
        return [token for output in run_to_end(local.engine)["a"] for token in output.token_ids]


def test_tokens_of_packed_weights(device: torch.device, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    mixed = {"attn_v": "Q6_K", "ffn_down": "Q5_K", "token_embd": "Q5_0"}
    file = make_tiny_gguf(tmp_path / "m.gguf", "Q4_0", others=mixed, num_hidden_layers=3, **sizes)
    checkpoint = open_checkpoint(str(file))
    want = _tokens(checkpoint, None)
    assert _tokens(checkpoint, device) == want
    assert _tokens(checkpoint, device, _STREAMED) == want
