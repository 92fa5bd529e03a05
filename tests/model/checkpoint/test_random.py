"""Random weights: any split gives the same bits; the numbers look as they should."""

import math
import statistics

import pytest
import torch
from helpers.model.loading import load_resident

from tightwire.kernels.spec.packed import Weight
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.header import RANDOM_SHAPES
from tightwire.model.checkpoint.random import RandomReader
from tightwire.model.checkpoint.tensors import expected_tensors
from tightwire.model.layout import make_layout

CONFIG = LlamaConfig(
    num_layers=2,
    hidden_size=256,
    num_heads=9,
    num_kv_heads=3,
    head_dim=32,
    mlp_size=300,
    vocab_size=500,
    max_positions=64,
    qkv_bias=True,
    output_bias=True,
)
DOWN = "model.layers.1.mlp.down_proj.weight"


def whole(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    reader = RandomReader(CONFIG, seed)
    out = torch.empty(reader.shape(name), dtype=dtype)
    reader.read_into(out, name, rows=range(len(out)))
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [None, range(7, 300), range(299, 300)])
def test_a_slice_is_the_same_bits_as_in_the_whole(dtype: torch.dtype, columns: range | None) -> None:
    want = whole(DOWN, dtype=dtype)[100:201]
    want = want if columns is None else want[:, columns.start : columns.stop]
    out = torch.empty(want.shape, dtype=dtype)
    RandomReader(CONFIG, 0).read_into(out, DOWN, rows=range(100, 201), columns=columns)
    assert torch.equal(out, want)


def test_ranks_hold_parts_of_one_model() -> None:
    layout = make_layout(CONFIG, 2)
    parts = [load_resident(RandomReader(CONFIG, 3), CONFIG, shard, dtype=torch.bfloat16) for shard in layout.shards]
    (alone,) = (
        load_resident(RandomReader(CONFIG, 3), CONFIG, shard, dtype=torch.bfloat16)
        for shard in make_layout(CONFIG, 1).shards
    )
    assert torch.equal(torch.cat([_plain(p.layer(1).down) for p in parts], dim=1), _plain(alone.layer(1).down))
    outputs = [_plain(p.layer(0).attention_out) for p in parts]
    assert torch.equal(torch.cat(outputs, dim=1), _plain(alone.layer(0).attention_out))
    assert torch.equal(torch.cat([_plain(p.outer.embedding) for p in parts]), _plain(alone.outer.embedding))
    query_rows = [len(shard.query_heads) * CONFIG.head_dim for shard in layout.shards]
    queries = [_plain(p.layer(0).qkv)[:rows] for p, rows in zip(parts, query_rows, strict=True)]
    assert torch.equal(torch.cat(queries), _plain(alone.layer(0).qkv)[: sum(query_rows)])


def _plain(matrix: Weight) -> torch.Tensor:
    assert isinstance(matrix, torch.Tensor)
    return matrix


def test_standard_deviation_mean_and_independence() -> None:
    values = whole("model.embed_tokens.weight").flatten()
    bound = 5 / math.sqrt(values.numel())  # five standard errors
    assert abs(values.mean().item()) < bound * 0.02
    assert abs(values.std().item() / 0.02 - 1) < bound
    neighbours = torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1].item()
    assert abs(neighbours) < bound
    rows = whole(DOWN)
    across = torch.corrcoef(rows[:50])[~torch.eye(50, dtype=torch.bool)]
    assert across.abs().max().item() < 6 / math.sqrt(rows.shape[1])


def test_seed_and_name_change_everything() -> None:
    base, seeded = whole(DOWN), whole(DOWN, seed=1)
    other = whole("model.layers.0.mlp.down_proj.weight")
    for unlike in (seeded, other):
        assert (base == unlike).float().mean().item() < 0.01
    assert torch.equal(base, whole(DOWN))


def test_norms_are_one_and_biases_small() -> None:
    assert torch.equal(whole("model.norm.weight"), torch.ones(256))
    bias = whole("model.layers.0.self_attn.q_proj.bias")
    assert bias.shape == (288,)
    assert 0.01 < statistics.pstdev(bias.tolist()) < 0.03


def test_unknown_tensor() -> None:
    with pytest.raises(ModelError, match=r"lm\.nothing is not part of this model"):
        RandomReader(CONFIG, 0).shape("lm.nothing")


def test_parameter_counts_are_the_released_models() -> None:
    """In billions, as their model cards say."""
    counts = {"llama-3.2-1b": 1.236, "llama-3.2-3b": 3.213, "llama-3-8b": 8.030, "llama-3-70b": 70.554}
    for name, want in counts.items():
        sizes = [math.prod(shape) for _, shape in expected_tensors(RANDOM_SHAPES[name])]
        assert sum(sizes) / 1e9 == pytest.approx(want, abs=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_makes_the_same_bits() -> None:
    out = torch.empty(RandomReader(CONFIG, 0).shape(DOWN), dtype=torch.bfloat16, device="cuda")
    RandomReader(CONFIG, 0).read_into(out, DOWN, rows=range(len(out)))
    assert torch.equal(out.cpu(), whole(DOWN, dtype=torch.bfloat16))
