"""The layer program on models and steps drawn at random: the bits of the kernels called one by one, and near the references.

``TIGHTWIRE_FUZZ_CASES=2000 pytest tests/model/test_layer_program_fuzz.py`` draws more; `make sanitize` runs it too.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from helpers.fuzz import fuzz_seeds
from helpers.kernels.packed_blocks import common_blocks
from torch import Tensor

from tightwire.kernels.cpu.library import available
from tightwire.kernels.cpu.linear import interleave_cpu
from tightwire.kernels.spec import attention, layer_ops
from tightwire.kernels.spec.gguf_blocks import PACKED_FORMATS, Q4_0, Q4_1, Q8_0, PackedFormat
from tightwire.kernels.spec.int8_heads import parts_of
from tightwire.kernels.spec.packed import Matrix, PackedMatrix, StackedMatrix, Weight, quantize
from tightwire.model import layer_kernels as layers_file
from tightwire.model import layer_program
from tightwire.model.cache.kv_cache import KeyBiases, KVCache
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.layer_kernels import EagerLayers
from tightwire.model.layout import Shard, make_layout
from tightwire.model.rope import rope_tables
from tightwire.model.step import Batch
from tightwire.model.weights.source import LayerWeights

pytestmark = pytest.mark.skipif(not available(), reason="needs the compiled kernels")

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HEAD_DIMS = (2, 6, 8, 10, 16, 32, 40, 64, 80, 96, 128, 160)
# The references add in other orders and round packed weights to the dtype, so a result differs by some roundings. Of 600 cases
# the largest relative error was 4.5e-6 in float32, 0.7 eps in bfloat16 and 1.3 eps in float16. With activations or keys in 8 bits,
# where a rounding may move a code by a step, it was 0.016.
_FLOAT32_BOUND, _ROUNDINGS, _INT8_BOUND = 1e-4, 8, 1 / 16


@dataclass
class _Case:
    """One rank's layers, caches and one step."""

    config: LlamaConfig
    shard: Shard
    dtype: torch.dtype
    layers: list[LayerWeights]
    cache: KVCache
    batch: Batch
    residual_TD: Tensor
    has_int8_activations: bool


class _Draw:
    """Draws one case from a seed."""

    def __init__(self, seed: int, *, may_interleave: bool = True) -> None:
        self._random, self._may_interleave = random.Random(seed), may_interleave
        self._generator = torch.Generator().manual_seed(seed)
        self._dtype = self._random.choice(_DTYPES)
        self._int8_activations = self._random.random() < 0.4

    def case(self) -> _Case:
        draw = self._random
        num_kv_heads = draw.randint(1, 4)
        num_heads = num_kv_heads * draw.randint(1, 5)
        config = LlamaConfig(
            num_layers=draw.randint(1, 3),
            hidden_size=draw.choice((32 * draw.randint(1, 8), draw.randint(1, 100))),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=draw.choice(_HEAD_DIMS),
            mlp_size=draw.choice((32 * draw.randint(1, 12), draw.randint(4, 150))),
            vocab_size=64,
            max_positions=400,
        )
        config = self._described(config)
        world_size = draw.randint(1, min(3, num_heads))
        shard = draw.choice(make_layout(config, world_size).shards)
        block_size = draw.choice((1, 2, 8, 16, 17, 32))
        context_lens = [draw.choice((1, 16, 65, draw.randint(1, 200))) for _ in range(draw.randint(1, 40))]
        # Generated rows come first; then the last tokens of prompts.
        num_prompts = draw.choice((0, draw.randint(0, len(context_lens))))
        query_lens = [1] * (len(context_lens) - num_prompts)
        query_lens += [draw.choice((length, draw.randint(1, length))) for length in context_lens[len(query_lens) :]]
        counts = [-(-length // block_size) for length in context_lens]
        num_blocks = sum(counts) + draw.randint(0, 3)
        kv_dtype = draw.choice((None, None, torch.int8, torch.int8, *_DTYPES))
        sizes: dict[str, Any] = {"num_blocks": num_blocks, "block_size": block_size}
        cache = KVCache(config, shard, **sizes, dtype=self._dtype, kv_dtype=kv_dtype, device=torch.device("cpu"))
        batch = self._batch(context_lens, query_lens, num_prompts, num_blocks, block_size)
        self._fill(cache, config, batch)
        layers = [self._layer(config, shard) for _ in range(config.num_layers)]
        residual_TD = self._numbers(sum(query_lens), config.hidden_size)
        return _Case(config, shard, self._dtype, layers, cache, batch, residual_TD, self._int8_activations)

    def _described(self, config: LlamaConfig) -> LlamaConfig:
        """What the layers compute: often Llama's, else anything."""
        draw = self._random
        if draw.random() < 0.3:
            return config
        return replace(
            config,
            norms=draw.choice(("before", "after", "both")),
            qk_norm=draw.choice(("none", "heads", "projection")),
            norm_offset=draw.choice((0.0, 1.0)),
            activation=draw.choice(("silu", "gelu_tanh")),
            score_scale=draw.choice((0.0, 0.1)),
            score_cap=draw.choice((0.0, 4.0)),
            residual_scale=draw.choice((1.0, 0.3)),
            rotary_dim=draw.choice((0, 2)),
            local_rope_theta=draw.choice((None, 500.0)),
            window=(window := draw.choice((0, 1, 30, 64, 150))),
            sliding=tuple(layer for layer in range(3) if window and draw.random() < 0.6),
            nope=tuple(layer for layer in range(3) if draw.random() < 0.2),
        )

    def _batch(
        self, context_lens: list[int], query_lens: list[int], num_prompts: int, num_blocks: int, block_size: int
    ) -> Batch:
        draw, order = self._random, torch.randperm(num_blocks, generator=self._generator).tolist()
        counts = [-(-length // block_size) for length in context_lens]
        # Rows of the table are views of longer ones. Entries behind a sequence's last block may be anything.
        table_BM = torch.full((len(counts), max(counts) + draw.randint(0, 2)), draw.choice((0, -1, 1 << 30)))
        table_BM = table_BM.int()[:, : max(counts)]
        for row, count in enumerate(counts):
            table_BM[row, :count] = torch.tensor([order.pop() for _ in range(count)])
        places = [
            (row, position)
            for row, (length, queries) in enumerate(zip(context_lens, query_lens, strict=True))
            for position in range(length - queries, length)
        ]
        slots = [int(table_BM[row, at // block_size]) * block_size + at % block_size for row, at in places]
        return Batch(
            token_ids_T=torch.zeros(len(places), dtype=torch.int32),
            positions_T=torch.tensor([position for _, position in places], dtype=torch.int32),
            slots_LT=torch.tensor([slots], dtype=torch.int32),
            query_start_B1=torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32),
            context_lens_B=torch.tensor(context_lens, dtype=torch.int32),
            block_tables_LBM=table_BM[None],
            num_decode_rows=len(counts) - num_prompts,
        )

    def _fill(self, cache: KVCache, config: LlamaConfig, batch: Batch) -> None:
        """Keys and values of earlier tokens; NaN where no sequence has written."""
        for index in range(config.num_layers):
            layer = cache.layer(index)
            for numbers_NKPE in layer:
                parts_of(numbers_NKPE)[1].fill_(torch.nan) if numbers_NKPE.dtype == torch.int8 else numbers_NKPE.fill_(
                    torch.nan
                )
            num_before_B = batch.context_lens_B - batch.query_start_B1.diff()
            for num_before, table_M in zip(num_before_B.tolist(), batch.block_tables_LBM[0], strict=True):
                position_S = torch.arange(num_before)
                slot_S = table_M[position_S // cache.block_size] * cache.block_size + position_S % cache.block_size
                shape = (num_before, layer[0].shape[1], config.head_dim)
                k_SKE, v_SKE = (self._numbers(*shape).to(self._dtype) for _ in range(2))
                attention.write_kv_reference(k_SKE, v_SKE, *layer, slot_S)

    def _layer(self, config: LlamaConfig, shard: Shard) -> LayerWeights:
        hidden, mixed, mlp = config.hidden_size, shard.local_heads * config.head_dim, len(shard.mlp_columns)
        qkv = mixed + 2 * shard.local_kv_heads * config.head_dim
        return LayerWeights(
            **self._norms(config, shard),
            qkv=self._stack(qkv, hidden),
            qkv_bias=self._bias(qkv),
            attention_out=self._matrix(hidden, mixed),
            attention_out_bias=self._bias(hidden),
            gate_up=self._stack(2 * mlp, hidden),
            gate_up_bias=self._bias(2 * mlp),
            down=self._matrix(hidden, mlp),
            down_bias=self._bias(hidden),
        )

    def _norms(self, config: LlamaConfig, shard: Shard) -> dict[str, Tensor]:
        head_dim, whole = config.head_dim, config.qk_norm == "projection"
        names = [("attention_norm", "mlp_norm")] * (config.norms != "after")
        names += [("attention_update_norm", "mlp_update_norm")] * (config.norms != "before")
        sizes = {name: config.hidden_size for pair in names for name in pair}
        if config.qk_norm != "none":
            sizes["q_norm"] = head_dim * (shard.local_heads if whole else 1)
            sizes["k_norm"] = head_dim * (shard.local_kv_heads if whole else 1)
        return {name: 1 - config.norm_offset + self._vector(size) / 4 for name, size in sizes.items()}

    def _stack(self, num_outputs: int, num_inputs: int) -> Weight:
        """A matrix, or packed parts of up to three formats."""
        cuts = sorted(
            self._random.sample(range(1, num_outputs), min(self._random.choice((0, 0, 1, 2)), num_outputs - 1))
        )
        edges = pairwise((0, *cuts, num_outputs))
        parts = [self._matrix(stop - start, num_inputs, plain=not cuts) for start, stop in edges]
        packed = [part for part in parts if isinstance(part, PackedMatrix)]
        if len(packed) == len(parts) > 1:
            return StackedMatrix(tuple(packed))
        return self._matrix(num_outputs, num_inputs)

    def _matrix(self, num_outputs: int, num_inputs: int, *, plain: bool = True) -> Matrix:
        """Packed or plain; what no format can pack is plain."""
        weight_OD = self._numbers(num_outputs, num_inputs) * num_inputs**-0.5
        fitting = [packed for packed in PACKED_FORMATS.values() if num_inputs % packed.block_elems == 0]
        choices: list[PackedFormat | None] = [*fitting]
        packed = self._random.choice([*choices, None] if plain or not fitting else choices)
        if packed is None:
            return weight_OD.to(self._dtype)
        if packed in (Q8_0, Q4_0, Q4_1):
            matrix = quantize(weight_OD, packed)
        else:
            matrix = common_blocks(packed, num_outputs, num_inputs, self._random.getrandbits(32))
        matrix = replace(matrix, format=replace(packed, int8_activations=self._int8_activations))
        interleaves = self._random.random() < 0.7 and self._int8_activations and self._may_interleave
        return interleave_cpu(matrix) if interleaves else matrix

    def _bias(self, size: int) -> Tensor | None:
        return self._vector(size) if self._random.random() < 0.3 else None

    def _vector(self, size: int) -> Tensor:
        return self._numbers(size).to(self._dtype)

    def _numbers(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)


def _copy(case: _Case) -> KVCache:
    cache = KVCache(
        case.config,
        case.shard,
        num_blocks=case.cache.num_blocks,
        block_size=case.cache.block_size,
        dtype=case.dtype,
        kv_dtype=case.cache.kv_dtype,
        device=torch.device("cpu"),
    )
    for index in range(case.config.num_layers):
        for target, source in zip(cache.layer(index), case.cache.layer(index), strict=True):
            target.copy_(source)
    return cache


def _assert_same_bits(got: Tensor, want: Tensor) -> None:
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def _run_eagerly(case: _Case, cache: KVCache) -> list[Tensor]:
    """The result of each part. There is one rank, so a part's result is the sum."""
    angles = rope_tables(case.config, case.config.max_positions, cache.device)
    biases = KeyBiases(case.config, case.shard, cache, angles)
    layers = EagerLayers(case.config, case.shard, cache, biases, case.batch, case.residual_TD.clone())
    results: list[Tensor] = []
    for index, weights in enumerate(case.layers):
        layers.place(index, weights)
        results.append(layers.attention(index, results[-1] if results else None))
        results.append(layers.mlp(index, results[-1]))
    return [*results, layers.residual_TD]


def _run_program(case: _Case, cache: KVCache, together: bool) -> tuple[Tensor, Tensor]:
    angles = rope_tables(case.config, case.config.max_positions, cache.device)
    biases = KeyBiases(case.config, case.shard, cache, angles)
    program = layer_program.LayerProgram(case.config, case.shard, cache, biases)
    program.begin(case.residual_TD.clone(), case.batch)
    for index, weights in enumerate(case.layers):
        program.place(index, weights)
    num_layers = case.config.num_layers
    if together:
        return program.run_layers(range(num_layers), None), program.residual_TD
    update_TD: Tensor | None = None
    for index in range(num_layers):
        update_TD = program.attention(index, update_TD).clone()
        update_TD = program.mlp(index, update_TD).clone()
    assert update_TD is not None
    return update_TD, program.residual_TD


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Up to three threads, whatever the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    monkeypatch.setattr(layer_program, "useful_threads", lambda num_rows, num_weights: 1 + num_rows % 3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("seed", fuzz_seeds(40))
def test_the_bits_of_kernels_called_one_by_one(seed: int) -> None:
    case = _Draw(seed).case()
    eager_cache = _copy(case)
    *_, want, want_residual = _run_eagerly(case, eager_cache)
    for together in (True, False):
        cache = _copy(case)
        got, residual = _run_program(case, cache, together)
        _assert_same_bits(got, want)
        _assert_same_bits(residual, want_residual)
        for index in range(case.config.num_layers):
            for mine, other in zip(cache.layer(index), eager_cache.layer(index), strict=True):
                _assert_same_bits(mine, other)
    assert got.isfinite().all()


@pytest.mark.parametrize("seed", fuzz_seeds(26))
def test_near_the_references(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = _Draw(seed, may_interleave=False).case()  # the references read no interleaved matrix
    got, _ = _run_program(case, _copy(case), together=True)

    def linear(x_TD: Tensor, weight_OD: Weight, bias_O: Tensor | None, num_decode_rows: int, **out: Any) -> Tensor:
        parts = weight_OD.parts if isinstance(weight_OD, StackedMatrix) else (weight_OD,)
        biases = [None] * len(parts) if bias_O is None else bias_O.split([part.shape[0] for part in parts])
        each = zip(parts, biases, strict=True)
        return torch.cat([layer_ops.linear_reference(x_TD, *part, **out) for part in each], 1)

    def gated_linear(*given: Any, num_decode_rows: int, gelu: bool) -> Tensor:
        return layer_ops.swiglu_reference(linear(*given, num_decode_rows=num_decode_rows), gelu=gelu)

    def rotate_and_cache(*given: Any, slots_are_checked: bool) -> Tensor:
        return layer_ops.rotate_and_cache_reference(*given)

    for name in ("rms_norm", "add_rms_norm"):
        monkeypatch.setattr(layers_file, name, getattr(layer_ops, f"{name}_reference"))
    monkeypatch.setattr(layers_file, "gated_linear", gated_linear)
    monkeypatch.setattr(layers_file, "rotate_and_cache", rotate_and_cache)
    monkeypatch.setattr(layers_file, "paged_attention", attention.paged_attention_reference)
    monkeypatch.setattr(layers_file, "linear", linear)
    *_, want, _ = _run_eagerly(case, _copy(case))
    in_8_bits = case.has_int8_activations or case.cache.kv_dtype == torch.int8
    bound = max(_FLOAT32_BOUND, _ROUNDINGS * torch.finfo(case.dtype).eps, _INT8_BOUND * in_8_bits)
    if case.cache.kv_dtype.is_floating_point:
        bound = max(bound, torch.finfo(case.cache.kv_dtype).eps)  # a key may round to its neighbour
    assert (got - want).norm() < bound * want.norm()
