"""A model of packed weights on a GPU, which load arranges by plane: the CPU's tokens, and those of streamed layers."""

from pathlib import Path

import pytest
import torch
from helpers.model.tiny_gguf import make_tiny_gguf
from helpers.server.local_engine import local_engine, run_to_end
from helpers.server.staged_requests import params

from tightwire.kernels.spec.gguf_blocks import Q8_0
from tightwire.kernels.spec.packed import PackedMatrix
from tightwire.model.layout import make_layout
from tightwire.model.open import Checkpoint, open_checkpoint
from tightwire.model.weights import EVERYTHING_RESIDENT, WeightPlan
from tightwire.model.weights.formats import choose_formats
from tightwire.model.weights.load import load_weights
from tightwire.rollout_weights import SharedWeights
from tightwire.server.ipc.messages import AddRequest

pytestmark = pytest.mark.gpu

_STREAMED = WeightPlan(source="stream", origin="host", streamed=(0, 1, 2))


def _tokens(checkpoint: Checkpoint, device: torch.device | None, plan: WeightPlan = EVERYTHING_RESIDENT) -> list[int]:
    options = {"device": device, "dtype": torch.float32, "max_model_len": 64, "weight_plan": plan}
    with local_engine(checkpoint, **options) as local:
        weights = local.runners[0].weights
        head = weights.outer.embedding
        assert isinstance(head, PackedMatrix) and head.by_plane == (device is not None)
        local.engine.add(AddRequest("a", [5, 9, 200], params({"temperature": 0.0, "max_tokens": 2})))
        return [token for output in run_to_end(local.engine)["a"] for token in output.token_ids]


def test_tokens_of_packed_weights(device: torch.device, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    mixed = {"attn_v": "Q6_K", "ffn_down": "Q5_K", "token_embd": "Q5_0"}
    file = make_tiny_gguf(tmp_path / "m.gguf", "Q4_0", others=mixed, num_hidden_layers=3, **sizes)
    checkpoint = open_checkpoint(str(file))
    want = _tokens(checkpoint, None)
    assert _tokens(checkpoint, device) == want
    assert _tokens(checkpoint, device, _STREAMED) == want


def test_matrices_in_memory_of_others_stay_as_they_are(device: torch.device, tmp_path: Path) -> None:
    """A trainer reads its frozen blocks too, of which an engine on the same GPU has views."""
    file = make_tiny_gguf(tmp_path / "m.gguf", "Q8_0", hidden_size=256, intermediate_size=256, num_hidden_layers=3)
    checkpoint = open_checkpoint(str(file))
    reader, config = checkpoint.reader(), checkpoint.config
    formats, [shard] = choose_formats(reader, config, "auto"), make_layout(config, 1).shards
    rows, names = 256, [f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(3)]
    whole = {
        name: PackedMatrix(torch.empty(rows, Q8_0.row_bytes(rows), dtype=torch.uint8, device=device), Q8_0)
        for name in names
    }
    for name, matrix in whole.items():
        reader.read_into(matrix, name, rows=range(rows))
    before = {name: matrix.blocks_OB.cpu() for name, matrix in whole.items()}
    files = SharedWeights(config, formats, torch.bfloat16, whole).files(reader, shard)
    weights = load_weights(files, EVERYTHING_RESIDENT, device=device, timeout_s=60.0)
    for number, name in enumerate(names):
        layer, kept = weights.layer(number), whole[name].blocks_OB
        assert isinstance(layer.down, PackedMatrix) and isinstance(layer.attention_out, PackedMatrix)
        assert not layer.down.by_plane and layer.attention_out.by_plane
        assert layer.down.blocks_OB.data_ptr() == kept.data_ptr() and torch.equal(kept.cpu(), before[name])
