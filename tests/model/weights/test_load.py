"""Resident weights: slices of all ranks join to the whole; bytes are those of ``weight_bytes``; memory stays near the share."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.model.forked_cases import measure_each
from helpers.model.loading import load_resident
from helpers.model.tiny_gguf import make_tiny_gguf
from tiny import VARIANTS, make_tiny, tiny_config, tiny_tensors

from tightwire.large_file import PAGE_BYTES
from tightwire.model.layout import Shard, make_layout
from tightwire.model.open import open_checkpoint
from tightwire.model.weights.formats import WeightFormats, weight_bytes
from tightwire.model.weights.source import ResidentWeights


def tensors_of(weights: ResidentWeights) -> list[torch.Tensor]:
    values = [getattr(layer, name) for layer in weights.layers for name in layer.__slots__]
    values += [weights.outer.embedding, weights.outer.final_norm, weights.outer.head]
    return [value for value in values if value is not None]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_memory_and_progress_are_those_of_weight_bytes(tmp_path: Path, variant: str, world_size: int) -> None:
    checkpoint = open_checkpoint(str(make_tiny(tmp_path / "m", **VARIANTS[variant])))
    for shard in make_layout(checkpoint.config, world_size).shards:
        fractions: list[float] = []
        weights = load_resident(
            checkpoint.reader(), checkpoint.config, shard, dtype=torch.bfloat16, progress=fractions.append
        )
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(weights)}
        own = weight_bytes(checkpoint.config, shard, WeightFormats(), 2)
        gaps = 2 * PAGE_BYTES * len(storages) + 64 * len(tensors_of(weights))  # pages around buffers; lines in them
        assert own <= sum(storages.values()) <= own + gaps
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1.0


def cut(x: torch.Tensor, heads: range, head_dim: int) -> torch.Tensor:
    return x[heads.start * head_dim : heads.stop * head_dim]


def expected_layer(tensors: dict[str, torch.Tensor], shard: Shard, head_dim: int) -> dict[str, torch.Tensor | None]:
    """Layer 1 of one rank, written out tensor by tensor."""

    def get(name: str) -> torch.Tensor | None:
        return tensors.get(f"model.layers.1.{name}")

    def stack(kind: str) -> torch.Tensor | None:
        q, k, v = (get(f"self_attn.{n}_proj.{kind}") for n in "qkv")
        if q is None or k is None or v is None:
            return None
        parts = (
            cut(q, shard.query_heads, head_dim),
            cut(k, shard.kv_heads, head_dim),
            cut(v, shard.kv_heads, head_dim),
        )
        return torch.cat(parts)

    def gate_up(kind: str) -> torch.Tensor | None:
        gate, up = get(f"mlp.gate_proj.{kind}"), get(f"mlp.up_proj.{kind}")
        return None if gate is None or up is None else torch.cat([x[list(shard.mlp_columns)] for x in (gate, up)])

    out, down = get("self_attn.o_proj.weight"), get("mlp.down_proj.weight")
    assert out is not None
    assert down is not None
    first = shard.rank == 0
    return {
        "attention_norm": get("input_layernorm.weight"),
        "qkv": stack("weight"),
        "qkv_bias": stack("bias"),
        "attention_out": cut(out.T, shard.query_heads, head_dim).T,
        "attention_out_bias": get("self_attn.o_proj.bias") if first else None,
        "mlp_norm": get("post_attention_layernorm.weight"),
        "gate_up": gate_up("weight"),
        "gate_up_bias": gate_up("bias"),
        "down": down[:, list(shard.mlp_columns)],
        "down_bias": get("mlp.down_proj.bias") if first else None,
    }


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("variant", ["plain", "tied", "odd-heads", "one-kv-head", "mlp-bias", "head-dim"])
def test_each_rank_gets_its_slices(tmp_path: Path, variant: str, world_size: int) -> None:
    checkpoint = open_checkpoint(str(make_tiny(tmp_path / "m", **VARIANTS[variant])))
    tensors = tiny_tensors(tiny_config(**VARIANTS[variant]))
    for shard in make_layout(checkpoint.config, world_size).shards:
        weights = load_resident(checkpoint.reader(), checkpoint.config, shard, dtype=torch.float32)
        layer = weights.layer(1)
        for name, want in expected_layer(tensors, shard, checkpoint.config.head_dim).items():
            got = getattr(layer, name)
            assert (got is None) == (want is None), name
            if want is not None:
                assert torch.equal(got, want), name
        rows = list(shard.vocab_rows)
        embedding, table = weights.outer.embedding, weights.outer.head
        assert isinstance(embedding, torch.Tensor) and isinstance(table, torch.Tensor)
        assert torch.equal(embedding, tensors["model.embed_tokens.weight"][rows])
        head = "model.embed_tokens.weight" if checkpoint.config.tied_embeddings else "lm_head.weight"
        assert torch.equal(table, tensors[head][rows])
        assert torch.equal(weights.outer.final_norm, tensors["model.norm.weight"])
        assert (weights.outer.head is weights.outer.embedding) == checkpoint.config.tied_embeddings


# Each case in a child of a process that has imported everything.
_MEASURE = """
from tightwire.model.open import open_checkpoint
from tightwire.model.layout import make_layout
from tightwire.model.weights.formats import choose_formats, weight_bytes
from helpers.model.loading import load_resident

def measure(location, quantization):
    checkpoint = open_checkpoint(location)
    shard = make_layout(checkpoint.config, 2).shards[1]
    formats = choose_formats(checkpoint.reader(), checkpoint.config, quantization)
    torch.ones(100).bfloat16().float()
    before = peak_from_here()
    load = load_resident(checkpoint.reader(), checkpoint.config, shard, dtype=torch.bfloat16, formats=formats)
    print(json.dumps([status("VmHWM") - before, weight_bytes(checkpoint.config, shard, formats, 2)]), flush=True)
"""

_BIG: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 5, "vocab_size": 8192}


_KINDS = (("safetensors", "none"), ("Q8_0", "none"), ("Q8_0", "auto"), ("safetensors", "int8"))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[int, int]]:
    """What each kind's memory grew by, and its share."""
    folder = tmp_path_factory.mktemp("big")
    models = {
        "safetensors": make_tiny(folder / "m", dtype="bfloat16", **_BIG),
        "Q8_0": make_tiny_gguf(folder / "m.gguf", "Q8_0", **_BIG),
    }
    cases = [(str(models[kind]), name) for kind, name in _KINDS]
    return dict(zip(_KINDS, measure_each(_MEASURE, cases), strict=True))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("kind", "quantization"), _KINDS)
def test_peak_memory_of_a_rank_stays_near_its_share(
    kind: str, quantization: str, measured: dict[tuple[str, str], tuple[int, int]]
) -> None:
    """Pages of the file that are mapped count too, so this bounds anonymous and file memory together."""
    growth, share = measured[kind, quantization]
    assert share > (90e6 if quantization == "none" else 45e6)
    # The piece in hand: at most 8 MiB of file; where numbers are unpacked or packed, float32 copies and temporaries as well.
    piece = (48 if (kind, quantization) in (("Q8_0", "none"), ("safetensors", "int8")) else 24) << 20
    assert share * 0.98 <= growth <= share + piece, f"{growth / 1e6:.0f} MB for a share of {share / 1e6:.0f} MB"
