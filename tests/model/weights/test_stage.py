"""A stage's whole layers: in two parts the product of the whole matrix, and the bytes that the plan counts."""

from pathlib import Path

import pytest
import torch
from helpers.model.loading import load_resident
from tiny import VARIANTS, make_tiny

from tightwire.kernels.linear import linear
from tightwire.model.layout import make_layout, whole_shard
from tightwire.model.open import open_checkpoint
from tightwire.model.weights.formats import choose_formats
from tightwire.model.weights.stage import JoinedRows, embed_whole, load_stage, stage_bytes


@pytest.mark.parametrize(
    ("variant", "quantization"),
    [("odd-heads", "none"), ("mlp-bias", "none"), ("mlp-bias", "int8"), ("one-kv-head", "int8")],
)
def test_whole_layers_are_those_of_one_rank(variant: str, quantization: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_tiny(tmp_path, num_hidden_layers=3, **VARIANTS[variant])))
    config, reader, dtype = checkpoint.config, checkpoint.reader(), torch.bfloat16
    formats = choose_formats(reader, config, quantization)
    whole = load_resident(reader, config, whole_shard(config), dtype=dtype, formats=formats)
    x_TD = torch.randn(20, config.hidden_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    for shard, layers in zip(make_layout(config, 2).shards, (range(2), range(2, 3)), strict=True):
        own = load_resident(reader, config, shard, dtype=dtype, formats=formats)
        given = reader, config, shard, whole_shard(config), layers, formats, dtype
        stage, other_rows = load_stage(*given, own.layers, own.outer)
        for weights, index in zip(stage.layers, layers, strict=True):
            for name in ("qkv", "gate_up"):
                matrix, bias = getattr(whole.layers[index], name), getattr(whole.layers[index], f"{name}_bias")
                wanted = linear(x_TD, matrix, bias, num_decode_rows=0)
                assert torch.equal(getattr(weights, name).multiply(x_TD, getattr(weights, f"{name}_bias")), wanted)
            assert weights.attention_norm is own.layers[index].attention_norm, "what is equal is held once"
        assert (other_rows is None) == (shard.rank > 0), "rank 0 embeds"
        if other_rows is not None:
            ids = torch.tensor([0, 1, 150, 151, 152, config.vocab_size - 1])
            table = whole.outer.embedding
            rows = table[ids] if isinstance(table, torch.Tensor) else table.take(ids)
            wanted_TD = (
                rows.float() if isinstance(rows, torch.Tensor) else linear(torch.eye(config.hidden_size), rows).T
            )
            assert torch.equal(embed_whole(ids, stage.outer.embedding, other_rows), wanted_TD)


@pytest.mark.parametrize("ranks_each", [1, 2])
def test_bytes_are_those_of_what_is_loaded(ranks_each: int, tmp_path: Path) -> None:
    """Of stages of two, rank 0's shard is in its part of its stage, and rank 1's is not."""
    checkpoint = open_checkpoint(str(make_tiny(tmp_path, num_hidden_layers=3, **VARIANTS["odd-heads"])))
    config, reader = checkpoint.config, checkpoint.reader()
    formats, parts = choose_formats(reader, config, "none"), make_layout(config, ranks_each).shards
    joined = set[bool]()
    for shard in make_layout(config, 2 * ranks_each).shards:
        part, layers = parts[shard.rank % ranks_each], (range(2), range(2, 3))[shard.rank // ranks_each]
        own = load_resident(reader, config, shard, dtype=torch.bfloat16, formats=formats)
        given = config, shard, part, layers, formats
        stage, other_rows = load_stage(reader, *given, torch.bfloat16, own.layers, own.outer)
        matrices = [
            getattr(each, name) for each in stage.layers for name in ("attention_out", "down", "qkv", "gate_up")
        ]
        added = sum(weight.rest.nbytes if isinstance(weight, JoinedRows) else weight.nbytes for weight in matrices)
        joined |= {isinstance(each.gate_up, JoinedRows) for each in stage.layers}
        added += 0 if other_rows is None else other_rows.nbytes
        assert stage_bytes(*given, 2) == added
    assert joined == ({True} if ranks_each == 1 else {False, True})
