"""Runs one rank's layers for few rows on a CPU: the host side of ``kernels/cpu/native/layers.cpp``.

Buffers are kept between steps. With one rank, or if the ranks sum over shared memory, one call runs all layers;
otherwise each layer takes two calls.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from tightwire.comm.protocols import KernelSums
from tightwire.kernels.cpu.attention import cut_into_tiles, most_tile_tokens
from tightwire.kernels.cpu.library import ffi, lib, struct
from tightwire.kernels.cpu.linear import useful_threads, weight_parts
from tightwire.kernels.cpu.lora import native_site
from tightwire.kernels.cpu.run import CACHE_KIND, NUMBER_KIND, run_on_items
from tightwire.kernels.layer_ops import check_slots
from tightwire.kernels.spec.attention import LOG2_E
from tightwire.kernels.spec.lora import AdapterRows
from tightwire.kernels.spec.packed import Weight
from tightwire.model.adapters.product import SITES, AdapterProducts
from tightwire.model.cache.kv_cache import CacheSource, KeyBiases
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.layer_kernels import Layers, norm_form
from tightwire.model.layout import Shard
from tightwire.model.step import Batch
from tightwire.model.weights.source import LayerWeights

# Fields of both ``LayerWeights`` and ``tw_layer``.
_NORMS = ("attention_norm", "mlp_norm", "attention_update_norm", "mlp_update_norm", "q_norm", "k_norm")


class LayerProgram(Layers):
    """``Layers`` of a few rows, after ``begin``. Results are bit-identical to those of ``EagerLayers``.

    The kernel counts the halves of layers as parts: part 2l is layer l's attention, part 2l + 1 its MLP. Call from one
    thread; the kernel may use several.
    """

    def __init__(
        self,
        config: LlamaConfig,
        shard: Shard,
        cache: CacheSource,
        key_biases: KeyBiases,
        adapters: AdapterProducts | None = None,
    ) -> None:
        self._config, self._shard, self._cache, self._adapters = config, shard, cache, adapters
        self.form, self._key_biases = norm_form(config), key_biases
        angles = key_biases.angles  # kept alive by these: the program holds their addresses
        self._placed: list[LayerWeights | None] = [None] * config.num_layers
        self._placed_keys: list[Tensor | None] = [None] * config.num_layers  # values always move together with keys
        attention = config.hidden_size * 2 * (shard.local_heads + shard.local_kv_heads) * config.head_dim
        self._weights_per_part = [attention, config.hidden_size * 3 * len(shard.mlp_columns)] * config.num_layers
        num_phases = config.num_layers * lib.TW_PHASES_PER_LAYER
        self._phases = torch.empty(num_phases * ffi.sizeof("tw_phase"), dtype=torch.uint8)
        self._layers: Any = ffi.new(f"tw_layer[{config.num_layers}]")
        self._step: tuple[Batch, Tensor] | None = None  # kept alive for the same reason, as what follows
        self._adapted: tuple[AdapterRows, Tensor] | None = None
        kind, half = NUMBER_KIND[cache.dtype], angles[0][0].shape[1]
        heads = {"num_heads": shard.local_heads, "num_kv_heads": shard.local_kv_heads, "head_dim": config.head_dim}
        blocks = {"cache_block_stride": cache.block_stride_bytes, "tokens_per_block": cache.block_size}
        common = {**heads, **blocks, "kind": kind, "cache_kind": CACHE_KIND[cache.kv_dtype]}
        head_norms = {"whole": config.qk_norm == "projection", "eps": self.form.eps, "offset": self.form.offset}
        groups = shard.head_groups(config.heads_per_kv_head)._asdict()
        scores = {"scale_log2": config.scale * LOG2_E, "cap_log2": config.score_cap * LOG2_E}
        norm = {**self.form._asdict(), "size": config.hidden_size, "kind": kind, "sum_kind": NUMBER_KIND[torch.float32]}
        self._program: Any = struct(
            "tw_layer_program",
            {
                "layers": self._layers,
                "phases": ffi.cast("tw_phase *", self._phases.data_ptr()),
                "norm": norm,
                "rotate": {**common, "half": half, "norms": head_norms},
                "attend": {**common, **groups, **scores, "key_bias": {"half": half}},
                "swiglu": {"width": len(shard.mlp_columns), "kind": kind, "gelu": config.activation == "gelu_tanh"},
                "angle_stride": angles[0][0].stride(0) * angles[0][0].element_size(),
            },
        )
        for index, (cos_SE, sin_SE) in enumerate(angles):
            layer = self._layers[index]
            layer.cos, layer.sin, layer.window = cos_SE.data_ptr(), sin_SE.data_ptr(), config.window_of(index)
            layer.group, _ = cache.groups.places[index]
        self._num_positions = len(angles[0][0])
        self._make_buffers(1)

    def begin(self, residual_TD: Tensor, batch: Batch) -> Self:
        """Start a step of T rows. The layers add every sum but the last to the contiguous float32 ``residual_TD``.

        Raises ValueError: a position, slot, length or block is invalid.
        """
        program, attend, num_rows = self._program, self._program.attend, len(residual_TD)
        if num_rows > len(self._partial_TD):
            self._make_buffers(num_rows)
        _check_rows("the embeddings", residual_TD, self._partial_TD[:num_rows])
        check_slots(batch.slots_LT.flatten(), self._cache.num_blocks * self._cache.block_size)
        least, most = batch.positions_T.aminmax()
        if least < 0 or most >= self._num_positions:
            raise ValueError(f"positions are {least} to {most}; there are positions 0 to {self._num_positions - 1}")
        lens, sizes = (batch.query_start_B1, batch.context_lens_B), (self._cache.num_blocks, self._cache.block_size)
        most_tokens = most_tile_tokens(attend.heads_per_kv_head, num_rows * attend.num_heads)
        # The tiles are the same in every group; each table is checked.
        (tiles_W3, num_tiles, _), *_ = (
            cut_into_tiles((*lens, table), num_rows, most_tokens, *sizes) for table in batch.block_tables_LBM
        )
        self.residual_TD, self._step = residual_TD, (batch, tiles_W3)
        self._phases.zero_()
        program.num_rows = num_rows
        program.residual = residual_TD.data_ptr()
        program.positions = batch.positions_T.data_ptr()
        program.slots, program.group_slots_stride = batch.slots_LT.data_ptr(), batch.slots_LT.stride(0) * 4
        attend.query_start = batch.query_start_B1.data_ptr()
        attend.context_lens = batch.context_lens_B.data_ptr()
        tables_LBM = batch.block_tables_LBM
        attend.block_table = tables_LBM.data_ptr()
        program.group_table_stride, attend.table_stride = tables_LBM.stride(0) * 4, tables_LBM.stride(1) * 4
        attend.tiles = tiles_W3.data_ptr()
        program.num_tiles = num_tiles
        if batch.adapters_T is not None:
            self._begin_adapters(batch.adapters_T)
        elif self._adapted is not None:
            self._adapted, program.num_adapter_runs = None, 0
        return self

    def _begin_adapters(self, entries_T: Tensor) -> None:
        assert self._adapters is not None, "a step with adapters, and none were loaded"
        program, rows = self._program, AdapterRows.of(entries_T)
        assert rows.runs_S3 is not None, "the rows' entries are on the host"
        sites = [native_site(self._adapters.sites[name]) for name in SITES]
        shrunk_TR = torch.empty(len(entries_T), max(site.most_width for site in sites))
        self._adapted = rows, shrunk_TR
        program.num_adapter_runs = len(rows.runs_S3)
        program.adapter_runs = ffi.cast("tw_adapter_run *", rows.runs_S3.data_ptr())
        program.adapter_sites = sites
        program.shrunk = shrunk_TR.data_ptr()

    def place(self, index: int, weights: LayerWeights) -> None:
        """``Layers.place``. Cost: about 1 us for new keys and values, 20 us for new weights, nothing for those of the last time."""
        layer = self._layers[index]
        keys_NKPE, values_NKPE = self._cache.layer(index)
        if self._placed[index] is not weights:
            self._placed[index] = weights
            for name in _NORMS:
                norm: Tensor | None = getattr(weights, name)
                setattr(layer, name, 0 if norm is None else norm.data_ptr())
            bias_O, key_bias = self._key_biases.split(index, weights.qkv_bias)
            layer.qkv, layer.key_bias = _matrix(weights.qkv, bias_O), 0 if key_bias is None else key_bias[0].data_ptr()
            layer.attention_out = _matrix(weights.attention_out, weights.attention_out_bias)
            layer.gate_up = _matrix(weights.gate_up, weights.gate_up_bias)
            layer.down = _matrix(weights.down, weights.down_bias)
        if self._placed_keys[index] is not keys_NKPE:
            self._placed_keys[index] = keys_NKPE
            layer.k_cache, layer.v_cache = keys_NKPE.data_ptr(), values_NKPE.data_ptr()

    def attention(self, index: int, update_TD: Tensor | None) -> Tensor:
        return self._run_parts(2 * index, 2 * index + 1, update_TD)

    def mlp(self, index: int, update_TD: Tensor) -> Tensor:
        return self._run_parts(2 * index + 1, 2 * index + 2, update_TD)

    def run_layers(self, span: range, update_TD: Tensor | None) -> Tensor:
        """Run these layers without sums between them; see ``Layers.attention``. Returns the last MLP's result."""
        return self._run_parts(2 * span.start, 2 * span.stop, update_TD)

    def run_and_sum(self, span: range, update_TD: Tensor | None, sums: KernelSums, labels: Sequence[str]) -> Tensor:
        """Run these layers, and sum the result of each attention and each MLP over the ranks.

        ``labels``: the sums' names for the ledger. Returns (T, D) float32, the last sum, valid until the next sum; it
        may be the next ``update_TD``. Raises CollectiveMismatchError, CollectiveTimeoutError, PeerLostError: another
        rank calls something else, is late or is gone.
        """
        first, num_rows = 2 * span.start, self._program.num_rows
        partial_TD, total_TD = self._partial_TD[:num_rows], self._total_TD[:num_rows]
        kernel_sums = sums.begin(partial_TD, total_TD, "decode", labels)
        try:
            while (num_done := sums.wait()) < len(labels):
                # The loop repeats only if another rank was late for a sum.
                update_TD = total_TD if num_done else update_TD
                self._run(first + num_done, first + len(labels), update_TD, kernel_sums, first)
        finally:
            sums.end()
        return total_TD

    def _run_parts(self, first: int, stop: int, update_TD: Tensor | None) -> Tensor:
        """Run parts ``first`` to ``stop`` (exclusive) without sums between them.

        ``update_TD``: the ranks' sum of the previous part, contiguous; None for the first part. Returns (T, D) float32,
        the result of the last part, valid until the next run.
        """
        partial_TD = self._partial_TD[: self._program.num_rows]
        if update_TD is not None:
            _check_rows("the ranks' sum", update_TD, partial_TD)
        self._run(first, stop, update_TD)
        return partial_TD

    def _run(
        self, first: int, stop: int, update_TD: Tensor | None, kernel_sums: Any = ffi.NULL, first_summed: int = 0
    ) -> None:
        update = 0 if update_TD is None else update_TD.data_ptr()
        arguments = struct("tw_parts_args", (self._program, first, stop, update, kernel_sums, first_summed))
        max_threads = useful_threads(self._program.num_rows, sum(self._weights_per_part[first:stop]))
        num_threads = min(max_threads, torch.get_num_threads())
        run_on_items("tw_run_parts", arguments, num_threads, 1, num_threads)

    def _make_buffers(self, num_rows: int) -> None:
        config, shard = self._config, self._shard
        query, kv = shard.local_heads * config.head_dim, shard.local_kv_heads * config.head_dim
        mlp_size = len(shard.mlp_columns)
        widths = {"normed": config.hidden_size, "qkv": query + 2 * kv, "rotated": query, "mixed": query}
        widths |= {"gate_up": 2 * mlp_size, "gated": mlp_size}
        self._buffers = {name: torch.empty(num_rows, width, dtype=self._cache.dtype) for name, width in widths.items()}
        self._buffers["partial"] = torch.empty(num_rows, config.hidden_size)
        for name, buffer in self._buffers.items():
            setattr(self._program, name, buffer.data_ptr())
        self._partial_TD = self._buffers["partial"]
        self._total_TD = torch.empty_like(self._partial_TD)


def _matrix(weight_OD: Weight, bias_O: Tensor | None) -> tuple[list[tuple[int, int, int, int]], int, int]:
    """The fields of ``tw_matrix``."""
    parts = weight_parts(weight_OD)
    return parts, len(parts), 0 if bias_O is None else bias_O.data_ptr()


def _check_rows(what: str, rows_TD: Tensor, like_TD: Tensor) -> None:
    if rows_TD.shape != like_TD.shape or rows_TD.dtype != like_TD.dtype or not rows_TD.is_contiguous():
        raise ValueError(
            f"{what} must be {tuple(like_TD.shape)} {like_TD.dtype}, contiguous; "
            f"got {tuple(rows_TD.shape)} {rows_TD.dtype} with strides {rows_TD.stride()}"
        )
