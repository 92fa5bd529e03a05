"""The budget adds up, and what does not fit is refused with a value that does."""

import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tightwire.model.cache.kv_cache import KVCache
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.random import RandomReader
from tightwire.model.checkpoint.tensors import expected_tensors
from tightwire.model.layer_program import LayerProgram
from tightwire.model.layout import make_layout
from tightwire.model.weights.formats import WeightFormats, choose_formats, weight_bytes
from tightwire.server.config.flags import make_config
from tightwire.server.config.limits import BLOCK_SIZE
from tightwire.server.config.serve import EngineOptions
from tightwire.server.plan.memory_budget import MemoryBudget, NotEnoughMemoryError, make_budget
from tightwire.server.plan.rank_bytes import MemoryInputs, Pool
from tightwire.sizes import format_bytes, parse_bytes

GIB = 1 << 30
PLAIN = WeightFormats()
MODEL = LlamaConfig(
    num_layers=16,
    hidden_size=2048,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    mlp_size=8192,
    vocab_size=128_256,
    max_positions=131_072,
    tied_embeddings=True,
)


# Gemma 3 1B: 22 of 26 layers have a window.
WINDOWED = LlamaConfig(
    num_layers=26,
    hidden_size=1152,
    num_heads=4,
    num_kv_heads=1,
    head_dim=256,
    mlp_size=6912,
    vocab_size=262_144,
    max_positions=32_768,
    tied_embeddings=True,
    window=512,
    sliding=tuple(layer for layer in range(26) if layer % 6 != 5),
)


def budget(gib: float, tp: int = 1, device: str = "cpu", **options: int) -> MemoryBudget:
    pools = [Pool(name="host memory", available_bytes=int(gib * GIB), ranks=range(tp))]
    if device == "cuda":
        pools = [Pool(name=f"cuda:{r}", available_bytes=int(gib * GIB), ranks=range(r, r + 1)) for r in range(tp)]
    return make_budget(inputs(pools, tp, device=device, options=make_config(options).engine))


def inputs(pools: Sequence[Pool], tp: int = 1, **given: Any) -> MemoryInputs:
    default: dict[str, Any] = {"dtype": "bfloat16", "formats": PLAIN, "device": "cpu", "options": EngineOptions()}
    model = given.pop("model", MODEL)
    return MemoryInputs(model=model, layout=make_layout(model, tp), pools=pools, **(default | given))


def test_packed_weights_leave_more_to_the_cache() -> None:
    pools = [Pool(name="host memory", available_bytes=4 * GIB, ranks=range(1))]
    packed = choose_formats(RandomReader(MODEL, 0), MODEL, "int4")
    made = {name: make_budget(inputs(pools, formats=formats)) for name, formats in (("plain", PLAIN), ("int4", packed))}
    saved = made["plain"].ranks[0].weights - made["int4"].ranks[0].weights
    layers, table = 16 * (2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 2048 * 8192), 128_256 * 2048
    assert saved == layers * (64 - 20) // 32 + table * (64 - 34) // 32
    assert made["int4"].num_blocks > made["plain"].num_blocks


def test_a_cache_in_8_bits_holds_nearly_twice_the_tokens() -> None:
    pools = [Pool(name="host memory", available_bytes=8 * GIB, ranks=range(1))]
    blocks = {}
    for name in ("auto", "bfloat16", "int8", "float32"):
        made = make_budget(inputs(pools, options=EngineOptions(kv_cache_dtype=name, kv_cache_memory=GIB)))
        assert made.ranks[0].block == 16 * 2 * 8 * BLOCK_SIZE * {"int8": 66, "float32": 256}.get(name, 128)
        blocks[name] = made.num_blocks
    assert blocks["auto"] == blocks["bfloat16"] and blocks["int8"] > 1.9 * blocks["auto"] > 3.6 * blocks["float32"]


def total(budget: MemoryBudget) -> int:
    return sum(rank.fixed + rank.block * budget.num_blocks for rank in budget.ranks)


@pytest.mark.parametrize(
    "model", [MODEL, replace(MODEL, tied_embeddings=False, qkv_bias=True, output_bias=True, mlp_bias=True)]
)
def test_one_rank_holds_every_tensor_of_the_model(model: LlamaConfig) -> None:
    numbers = 0
    for _, shape in expected_tensors(model):
        size = 1
        for length in shape:
            size *= length
        numbers += size
    assert weight_bytes(model, make_layout(model, 1).shards[0], PLAIN, 1) == numbers


@pytest.mark.parametrize("model", [MODEL, replace(MODEL, qkv_bias=True, output_bias=True, mlp_bias=True)])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_the_ranks_hold_the_model_together(tp: int, model: LlamaConfig) -> None:
    whole = weight_bytes(model, make_layout(model, 1).shards[0], PLAIN, 1)
    parts = sum(weight_bytes(model, shard, PLAIN, 1) for shard in make_layout(model, tp).shards)
    norms = MODEL.hidden_size * (2 * MODEL.num_layers + 1)
    assert parts == whole + (tp - 1) * norms  # the norms are on every rank


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_default_fits_and_holds_a_sequence(device: str, tp: int) -> None:
    made = budget(24, tp, device)
    available = 24 * GIB * (1 if device == "cpu" else tp)
    assert total(made) <= available
    assert made.num_blocks * 16 >= made.max_model_len


def test_graphs_keep_the_activations_and_the_logits_of_the_largest_decode_step() -> None:
    given = {"max_num_seqs": 48, "max_model_len": 4096}
    with_graphs, without = (budget(80, 2, "cuda", cuda_graphs=graphs, **given).ranks[0] for graphs in (True, False))
    layer = 2 * (4 * 2048 + 3 * 8192 // 2)
    assert with_graphs.activations - without.activations == 48 * (layer + 4 * 128_256 // 2)


def test_plenty_of_memory_gives_what_all_sequences_need() -> None:
    made = budget(1000, max_num_seqs=4, max_model_len=4096)
    assert made.num_blocks == 4 * 4096 // 16


def test_little_memory_shortens_the_context_that_was_not_asked_for() -> None:
    made = budget(4)
    assert 16 <= made.max_model_len < MODEL.max_positions
    assert made.max_model_len == made.num_blocks * 16


def test_a_shortened_context_is_said() -> None:
    assert f"context: {budget(4).max_model_len} of 131072 tokens" in budget(4).table()
    assert "context:" not in budget(1000, max_model_len=4096).table()


def test_carried_errors_take_memory_of_every_rank_and_are_shown() -> None:
    pools = [Pool(name="host memory", available_bytes=64 * GIB, ranks=range(2))]
    without, with_errors = (make_budget(inputs(pools, 2, feedback_elem_bytes=size)) for size in (0, 4))
    each = 4 * EngineOptions().max_num_batched_tokens * MODEL.hidden_size
    assert [after.fixed - before.fixed for before, after in zip(without.ranks, with_errors.ranks, strict=True)] == [
        each
    ] * 2
    assert "carried errors" in with_errors.table() and "carried errors" not in without.table()


@pytest.mark.parametrize(("tp", "share"), [(1, [1.0]), (2, [0.5, 0.5]), (4, [0.25] * 4)])
def test_rows_of_logits_take_the_columns_that_each_rank_holds(tp: int, share: list[float]) -> None:
    """Once for each prompt row that a step may score, three times for each that generates."""
    few, many = ([rank.activations for rank in budget(64, tp, max_num_seqs=rows).ranks] for rows in (16, 112))
    row = [4 * part * MODEL.vocab_size for part in share]
    assert [b - a for a, b in zip(few, many, strict=True)] == pytest.approx([3 * 96 * each for each in row])
    assert all((256 + 3 * 16) * each < a < (256 + 3 * 16 + 200) * each for a, each in zip(few, row, strict=True))


def test_the_cache_asked_for_is_the_cache_given() -> None:
    made = budget(64, tp=2, kv_cache_memory=GIB)
    per_block = sum(rank.block for rank in made.ranks)
    assert made.num_blocks == GIB // per_block
    assert per_block == 2 * 16 * 16 * 8 * 64 * 2


def test_weights_that_do_not_fit_are_refused_with_a_table() -> None:
    with pytest.raises(NotEnoughMemoryError) as error:
        budget(2)
    assert "the weights do not fit" in str(error.value)
    assert "host memory:" in str(error.value) and "of 2GiB available" in str(error.value)
    assert "--dtype" not in str(error.value)  # it is bfloat16 already
    assert "context:" not in str(error.value)


def test_weights_of_float32_that_do_not_fit_may_be_halved() -> None:
    pools = [Pool(name="host memory", available_bytes=4 * GIB, ranks=range(1))]
    with pytest.raises(NotEnoughMemoryError, match="the weights do not fit; .* or --dtype bfloat16"):
        make_budget(inputs(pools, dtype="float32"))


def test_steps_that_do_not_fit_are_refused_with_steps_that_do() -> None:
    with pytest.raises(NotEnoughMemoryError) as error:
        budget(6, max_num_batched_tokens=10_000_000, max_num_seqs=1_000_000)
    found = re.search(r"--max-num-batched-tokens (\d+) --max-num-seqs (\d+) fits", str(error.value))
    assert found and "the weights" not in str(error.value)
    budget(6, max_num_batched_tokens=int(found[1]), max_num_seqs=int(found[2]))


def test_a_recommended_cache_leaves_the_host_some_memory() -> None:
    with pytest.raises(NotEnoughMemoryError) as error:
        budget(6, kv_cache_memory=900 * GIB)
    found = re.search(r"--kv-cache-memory (\S+) fits", str(error.value))
    assert found and total(budget(6, kv_cache_memory=parse_bytes(found[1]))) < 0.95 * 6 * GIB


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"kv_cache_memory": 900 * GIB}, "--kv-cache-memory"),
        ({"kv_cache_memory": 1 << 20, "max_model_len": 4096}, "--kv-cache-memory"),
        ({"max_model_len": 131_072}, "--max-model-len"),
    ],
)
def test_the_value_that_a_refusal_names_works(options: dict[str, int], flag: str) -> None:
    with pytest.raises(NotEnoughMemoryError) as error:
        budget(6, 1, "cpu", **options)
    found = re.findall(rf"{flag} (\d\S*) fits|give at least --kv-cache-memory ([^ ,]+)", str(error.value))
    assert found, str(error.value)
    value = parse_bytes("".join(found[0]))
    name = flag[2:].replace("-", "_")
    budget(6, 1, "cpu", **{**options, name: value})


def test_more_than_the_trained_context_is_refused() -> None:
    with pytest.raises(ValueError, match="exceeds the model's context of 131072"):
        budget(100, max_model_len=131_073)


def test_the_tightest_device_decides() -> None:
    pools = [
        Pool(name="cuda:0", available_bytes=80 * GIB, ranks=range(1)),
        Pool(name="cuda:1", available_bytes=8 * GIB, ranks=range(1, 2)),
    ]
    made = make_budget(inputs(pools, 2, device="cuda"))
    used = made.ranks[1].fixed + made.ranks[1].block * made.num_blocks
    assert 0.85 * 8 * GIB < used <= 8 * GIB


@pytest.mark.parametrize("options", [{}, {"max_model_len": 4096}, {"kv_cache_memory": GIB}])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_below_the_runtime_is_refused_with_the_least_that_works(device: str, options: dict[str, int]) -> None:
    with pytest.raises(NotEnoughMemoryError, match="before it has any tensor") as error:
        budget(1 / GIB, 2, device, **options)
    found = re.search(r"each rank needs (\d+MiB) in all", str(error.value))
    assert found
    ranks_of_a_pool = 2 if device == "cpu" else 1
    least = ranks_of_a_pool * parse_bytes(found[1])
    budget(least / GIB, 2, device, **options)
    with pytest.raises(NotEnoughMemoryError):
        budget((least - ranks_of_a_pool * (2 << 20)) / GIB, 2, device, **options)


@pytest.mark.parametrize("tp", [1, 4])
def test_what_ranks_of_a_host_share_is_counted_once(tp: int) -> None:
    shared = Pool(name="host memory", available_bytes=4 * GIB, ranks=range(tp), shared_bytes=128 << 20)
    alone, together = (make_budget(inputs([pool], tp)) for pool in (replace(shared, shared_bytes=0), shared))
    saved = (tp - 1) * 128 << 20
    assert total(together) - saved <= 4 * GIB and (together.num_blocks > alone.num_blocks) == (tp > 1)
    ((_, needed),) = together.needs()
    assert needed == f"{format_bytes(total(together) - saved)} of 4GiB available"
    # The least that is enough, which the refusal names.
    with pytest.raises(NotEnoughMemoryError, match="each rank needs") as error:
        make_budget(inputs([replace(shared, available_bytes=1)], tp))
    found = re.search(r"each rank needs (\d+MiB) in all", str(error.value))
    assert found
    make_budget(inputs([replace(shared, available_bytes=tp * parse_bytes(found[1]))], tp))


@pytest.mark.parametrize(("tp", "max_num_seqs"), [(1, 64), (4, 256)])
def test_the_buffers_of_few_rows_are_counted_on_a_cpu(tp: int, max_num_seqs: int) -> None:
    options = make_config({"max_num_seqs": max_num_seqs, "cuda_graphs": False}).engine
    pools = [Pool(name="memory", available_bytes=64 * GIB, ranks=range(tp))]
    cpu, cuda = (make_budget(inputs(pools, tp, device=name, options=options)).ranks for name in ("cpu", "cuda"))
    for shard, on_cpu, on_cuda in zip(make_layout(MODEL, tp).shards, cpu, cuda, strict=True):
        cache, program = SimpleNamespace(dtype=torch.bfloat16), SimpleNamespace()
        made: Any = SimpleNamespace(_config=MODEL, _shard=shard, _cache=cache, _program=program)
        LayerProgram._make_buffers(made, max(128, max_num_seqs))
        buffers = [*made._buffers.values(), made._total_TD]
        assert on_cpu.activations - on_cuda.activations == sum(buffer.nbytes for buffer in buffers)


def windowed(gib: float, model: LlamaConfig = WINDOWED, **options: Any) -> MemoryBudget:
    pools = [Pool(name="host memory", available_bytes=int(gib * GIB), ranks=range(1))]
    return make_budget(inputs(pools, model=model, options=make_config(options).engine))


@pytest.mark.parametrize("tokens", [32_768, 20_000])
def test_a_token_beyond_the_window_costs_the_layers_without_one(tokens: int) -> None:
    """A block holds 4 layers: one group of layers without a window, and six with one, whose last has 2 layers."""
    layer, step_tokens = 2 * 256 * 2 * BLOCK_SIZE, EngineOptions().max_num_batched_tokens
    ring = -(-(512 + step_tokens + 62) // BLOCK_SIZE)
    needed = -(-tokens // BLOCK_SIZE) + 6 * ring
    made = windowed(8, max_model_len=tokens, kv_cache_memory=needed * 4 * layer)
    assert made.ranks[0].block == 4 * layer and made.num_blocks == needed and made.max_model_len == tokens
    with pytest.raises(NotEnoughMemoryError, match="less than one sequence"):
        windowed(8, max_model_len=tokens, kv_cache_memory=(needed - 1) * 4 * layer)


def test_the_plan_shows_blocks_by_kind_of_layer_and_the_tokens_that_follow() -> None:
    given: dict[str, Any] = {"kv_cache_memory": 256 << 20, "max_num_seqs": 4, "max_num_batched_tokens": 256}
    bounded, masked = windowed(8, **given), windowed(8, replace(WINDOWED, window=0, sliding=()), **given)
    assert masked.max_model_len == 10_080 and bounded.max_model_len == 32_768 < bounded.room_tokens
    expected = (
        "KV cache: 4096 blocks; a sequence of 32768 tokens takes 2048 for layers that attend to all tokens and at most 312 "
        "for those with a window of 512 (a block: 16 tokens, 4 layers)"
    )
    assert expected in bounded.table() and "window" not in masked.table()


def test_the_cache_takes_the_bytes_of_the_plan() -> None:
    made = windowed(6)
    groups, given = (
        made.shape.groups,
        {"num_blocks": made.num_blocks, "block_size": BLOCK_SIZE, "dtype": torch.bfloat16},
    )
    shard = make_layout(WINDOWED, 1).shards[0]
    cache = KVCache(WINDOWED, shard, **given, device=torch.device("meta"), groups=groups)
    storages = {id(tensor): tensor.nbytes for layer in range(26) for tensor in cache.layer(layer)}
    assert len(storages) == 2 * 4, "layers of different groups share their memory"
    assert sum(storages.values()) == made.cache_bytes(made.ranks[0])


def test_windows_of_a_cache_on_the_host_only_mask() -> None:
    made = windowed(8, kv_offload=True)
    assert made.ranks[0].block == 26 * 2 * 256 * 2 * BLOCK_SIZE and made.shape.groups.num == 1
