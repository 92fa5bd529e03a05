"""Runs one rank's layers for decode rows on a CPU: the host side of ``kernels.cpu.decode_kernel``.

Buffers are kept between steps. With one rank, or if the ranks sum over shared memory, one call runs all layers;
otherwise each layer takes two calls.
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from tightwire.comm.protocols import KernelSums
from tightwire.kernels.cpu import decode_kernel as kernel
from tightwire.kernels.cpu.attention import LOG2_E, Tiles, cut_into_tiles
from tightwire.kernels.cpu.attention_kernels import scratch_floats
from tightwire.kernels.cpu.linear import matrix_integers, useful_threads
from tightwire.kernels.cpu.vector.simd import NUMBER_KIND
from tightwire.kernels.cpu.vector.threads import run_on_threads
from tightwire.model.cache.kv_cache import CacheSource
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.layout import Shard
from tightwire.model.step_arrays import Batch
from tightwire.model.weights.source import LayerWeights


class DecodeProgram:
    """Runs the parts of a step in order after ``begin``: part 2l is layer l's attention, part 2l + 1 its MLP.

    Call ``place`` for a layer before its parts run, and do not release it earlier. Results are bit-identical to
    ``EagerLayers``. Call from one thread; the kernel may use several.

    Cost: some microseconds per call; buffers of about 6 D + 3 H E + 4 K E + 3 F numbers per row.
    """

    def __init__(
        self,
        config: LlamaConfig,
        shard: Shard,
        cache: CacheSource,
        angles: tuple[Tensor, Tensor],
    ) -> None:
        """``angles``: cosine and sine (S, E/2) of every position."""
        cos_SE, sin_SE = angles
        self._config, self._shard, self._cache = config, shard, cache
        self._angles = angles  # kept alive: the program holds their addresses
        self._placed: list[LayerWeights | None] = [None] * config.num_layers
        self._placed_keys: list[Tensor | None] = [None] * config.num_layers  # values always move together with keys
        self._layers = torch.zeros(config.num_layers, kernel.LAYER_INTS, dtype=torch.int64)
        self._weights_per_part = _part_sizes(config, shard) * config.num_layers
        self._phases = torch.empty(config.num_layers * kernel.PHASES_PER_LAYER * kernel.PHASE_BYTES, dtype=torch.uint8)
        self._buffers: dict[int, Tensor] = {}
        self._step: tuple[Batch, Tiles] | None = None  # kept alive: the program holds their addresses
        self._program = torch.zeros(kernel.PROGRAM_INTS, dtype=torch.int64)
        groups = shard.head_groups(config.heads_per_kv_head)
        self._set(
            {
                kernel.HIDDEN_SIZE: config.hidden_size,
                kernel.NUM_HEADS: shard.local_heads,
                kernel.NUM_KV_HEADS: shard.local_kv_heads,
                kernel.HEADS_PER_KV_HEAD: groups.heads_per_kv_head,
                kernel.SKIPPED_HEADS: groups.skipped_heads,
                kernel.HEAD_DIM: config.head_dim,
                kernel.MLP_SIZE: len(shard.mlp_columns),
                kernel.KIND: NUMBER_KIND[cache.dtype],
                kernel.COS: cos_SE.data_ptr(),
                kernel.SIN: sin_SE.data_ptr(),
                kernel.ANGLE_STRIDE: cos_SE.stride(0) * cos_SE.element_size(),
                kernel.NUM_BLOCKS: cache.num_blocks,
                kernel.TOKENS_PER_BLOCK: cache.block_size,
                kernel.CACHE_BLOCK_STRIDE: cache.block_stride * cache.dtype.itemsize,
                kernel.PHASES: self._phases.data_ptr(),
            }
        )
        self._num_positions = len(cos_SE)
        self._num_rows = 0
        self._make_buffers(1)

    def begin(self, residual_TD: Tensor, batch: Batch) -> Self:
        """Start a step of T rows. The parts add every sum but the last to the contiguous ``residual_TD``.

        Raises:
            ValueError: a position, slot, length or block is invalid.
        """
        num_rows = len(residual_TD)
        if num_rows > len(self._buffers[kernel.PARTIAL]):
            self._make_buffers(num_rows)
        _check_rows("the embeddings", residual_TD, self._buffers[kernel.PARTIAL][:num_rows])
        _check_range("position", batch.positions_T, self._num_positions)
        _check_range("slot", batch.slots_T, self._cache.num_blocks * self._cache.block_size)
        tiles = cut_into_tiles(
            batch.query_start_B1,
            batch.context_lens_B,
            batch.block_tables_BM,
            num_rows,
            1,
            self._cache.num_blocks,
            self._cache.block_size,
        )
        self.residual_TD, self._step = residual_TD, (batch, tiles)
        self._num_rows = num_rows
        self._phases.zero_()
        self._set(
            {
                kernel.NUM_ROWS: num_rows,
                kernel.RESIDUAL: residual_TD.data_ptr(),
                kernel.POSITIONS: batch.positions_T.data_ptr(),
                kernel.SLOTS: batch.slots_T.data_ptr(),
                kernel.QUERY_START: batch.query_start_B1.data_ptr(),
                kernel.CONTEXT_LENS: batch.context_lens_B.data_ptr(),
                kernel.BLOCK_TABLE: batch.block_tables_BM.data_ptr(),
                kernel.TABLE_STRIDE: batch.block_tables_BM.stride(0) * 4,
                kernel.TILES: tiles.address,
                kernel.NUM_TILES: tiles.num_tiles,
            }
        )
        return self

    def place(self, index: int, weights: LayerWeights) -> None:
        """Use these weights, and the cache's layer ``index``, when the layer's parts run.

        Cost: nothing if both are unchanged; about 1 us for new keys and values, 20 us for new weights.
        """
        keys_NKPE, values_NKPE = self._cache.layer(index)
        if self._placed[index] is not weights:
            self._placed[index], self._placed_keys[index] = weights, None
            self._layers.numpy()[index] = _layer_integers(weights)
        if self._placed_keys[index] is not keys_NKPE:
            self._placed_keys[index] = keys_NKPE
            integers = self._layers.numpy()[index]
            integers[kernel.KEYS], integers[kernel.VALUES] = keys_NKPE.data_ptr(), values_NKPE.data_ptr()

    def run(self, part: int, update_TD: Tensor | None) -> Tensor:
        """Run one part; see ``run_parts``."""
        return self.run_parts(part, part + 1, update_TD)

    def run_parts(self, first: int, stop: int, update_TD: Tensor | None) -> Tensor:
        """Run parts ``first`` to ``stop`` (exclusive) without sums between them.

        Args:
            update_TD: the ranks' sum of the previous part, contiguous; None for the first part.
        Returns:
            (T, D), the result of the last part, valid until the next run.
        """
        if update_TD is not None:
            _check_rows("the ranks' sum", update_TD, self._buffers[kernel.PARTIAL][: self._num_rows])
        self._run(first, stop, update_TD)
        return self._buffers[kernel.PARTIAL][: self._num_rows]

    def run_and_sum(self, first: int, update_TD: Tensor | None, sums: KernelSums, labels: Sequence[str]) -> Tensor:
        """Run one part per label, and sum each part's result over the ranks.

        Args:
            labels: the sums' names for the ledger.
        Returns:
            (T, D), the last sum, valid until the next sum; it may be the next ``update_TD``.
        Raises:
            CollectiveMismatchError, CollectiveTimeoutError, PeerLostError: another rank calls something else, is late
                or is gone.
        """
        partial_TD, total_TD = self._buffers[kernel.PARTIAL][: self._num_rows], self._total_TD[: self._num_rows]
        table = sums.begin(partial_TD, total_TD, "decode", labels)
        try:
            while (num_done := sums.wait()) < len(labels):
                # The loop repeats only if another rank was late for a sum.
                update_TD = total_TD if num_done else update_TD
                self._run(first + num_done, first + len(labels), update_TD, table, first)
        finally:
            sums.end()
        return total_TD

    def _run(self, first: int, stop: int, update_TD: Tensor | None, sums: int = 0, first_summed: int = 0) -> None:
        max_threads = useful_threads(self._num_rows, sum(self._weights_per_part[first:stop]))
        scratch = torch.empty(min(max_threads, torch.get_num_threads()), self._scratch_floats, dtype=torch.float32)
        arguments = (
            self._program.data_ptr(),
            self._layers.data_ptr(),
            first,
            stop,
            0 if update_TD is None else update_TD.data_ptr(),
            self._config.norm_eps,
            self._config.head_dim**-0.5 * LOG2_E,
            sums,
            first_summed,
            scratch.data_ptr(),
            scratch.stride(0) * 4,
        )
        run_on_threads(kernel.run_parts, arguments, len(scratch))

    def _make_buffers(self, num_rows: int) -> None:
        config, shard = self._config, self._shard
        head_dim, num_heads, num_kv_heads = config.head_dim, shard.local_heads, shard.local_kv_heads
        mlp_size = len(shard.mlp_columns)
        widths = {
            kernel.NORMED: config.hidden_size,
            kernel.QKV: (num_heads + 2 * num_kv_heads) * head_dim,
            kernel.ROTATED: (num_heads + num_kv_heads) * head_dim,
            kernel.MIXED: num_heads * head_dim,
            kernel.GATE_UP: 2 * mlp_size,
            kernel.GATED: mlp_size,
            kernel.PARTIAL: config.hidden_size,
        }
        self._buffers = {
            field: torch.empty(num_rows, width, dtype=self._cache.dtype) for field, width in widths.items()
        }
        self._set({field: buffer.data_ptr() for field, buffer in self._buffers.items()})
        self._total_TD = torch.empty_like(self._buffers[kernel.PARTIAL])
        widest = max(config.hidden_size, num_heads * head_dim, mlp_size)
        self._scratch_floats = max(num_rows * widest, scratch_floats(config.heads_per_kv_head, head_dim))

    def _set(self, values: dict[int, int]) -> None:
        program = self._program.numpy()
        for field, value in values.items():
            program[field] = value


def _part_sizes(config: LlamaConfig, shard: Shard) -> list[int]:
    """Return the number of weights in each of a layer's two parts."""
    heads, kv_heads, mlp_size = shard.local_heads, shard.local_kv_heads, len(shard.mlp_columns)
    return [config.hidden_size * (2 * heads + 2 * kv_heads) * config.head_dim, config.hidden_size * 3 * mlp_size]


def _layer_integers(weights: LayerWeights) -> list[int]:
    """Return a layer's integers for the kernel, except the addresses of its keys and values."""
    values = [0] * kernel.LAYER_INTS
    values[kernel.ATTENTION_NORM] = weights.attention_norm.data_ptr()
    values[kernel.MLP_NORM] = weights.mlp_norm.data_ptr()
    for field, matrix, bias in (
        (kernel.QKV_MATRIX, weights.qkv, weights.qkv_bias),
        (kernel.OUT_MATRIX, weights.attention_out, weights.attention_out_bias),
        (kernel.GATE_UP_MATRIX, weights.gate_up, weights.gate_up_bias),
        (kernel.DOWN_MATRIX, weights.down, weights.down_bias),
    ):
        bias_address = 0 if bias is None else bias.data_ptr()
        values[field : field + kernel.MATRIX_INTS] = (*matrix_integers(matrix), bias_address)
    return values


def _check_rows(what: str, rows_TD: Tensor, like_TD: Tensor) -> None:
    if rows_TD.shape != like_TD.shape or rows_TD.dtype != like_TD.dtype or not rows_TD.is_contiguous():
        raise ValueError(
            f"{what} must be {tuple(like_TD.shape)} {like_TD.dtype}, contiguous; "
            f"got {tuple(rows_TD.shape)} {rows_TD.dtype} with strides {rows_TD.stride()}"
        )


def _check_range(what: str, numbers_T: Tensor, stop: int) -> None:
    numbers = numbers_T.numpy()
    wrong = (numbers < 0) | (numbers >= stop)
    if wrong.any():
        token = int(wrong.argmax())
        raise ValueError(f"token {token} has {what} {numbers[token]}; there are {what}s 0 to {stop - 1}")
