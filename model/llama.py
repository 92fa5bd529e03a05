"""The Llama forward pass of one rank, over packed sequences and a paged cache.

Knows layers, not requests: it gets tokens, positions and a block table, and gives hidden states. Where weights live is
their ``WeightSource``'s business, where keys and values do the ``CacheSource``'s, how ranks meet is ``TensorParallel``'s.

Source: Llama 2, arXiv 2307.09288; Llama 3, arXiv 2407.21783.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tightwire.comm.lane import CommLane
from tightwire.kernels.attention import paged_attention
from tightwire.kernels.linear import linear, linear_to_float
from tightwire.kernels.norm import add_rms_norm, rms_norm
from tightwire.kernels.qkv import rotate_and_cache
from tightwire.kernels.swiglu import swiglu
from tightwire.model.cache.kv_cache import CacheSource
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.decode_program import DecodeProgram
from tightwire.model.parallel import TensorParallel
from tightwire.model.rope_table import rope_table
from tightwire.model.weights.source import LayerWeights, WeightSource

Together = Callable[[], Tensor]  # what ranks do together, and all in the same order


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One step on the device: B sequences packed into T rows, index tensors int32."""

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor  # where each row's key and value go: block * P + offset
    query_start_B1: Tensor  # first row of each sequence, and T at the end
    context_lens_B: Tensor
    block_tables_BM: Tensor
    num_decode_rows: int  # the first so many rows are generated tokens
    arm: int = 0  # which of the AllReduces that the model was given


class Llama:
    """One rank's layers. ``forward`` leaves the new tokens' keys and values in the cache."""

    def __init__(
        self,
        config: LlamaConfig,
        parallel: TensorParallel,
        weights: WeightSource,
        cache: CacheSource,
        max_positions: int,
    ) -> None:
        self._config = config
        self._parallel = parallel
        self._weights = weights
        self._cache = cache
        self._cos_SE, self._sin_SE = rope_table(config, max_positions, cache.device)
        # Of each arm; of attention in layer l at 2 l, of its MLP behind it: the parts of a ``DecodeProgram``.
        self._sums = [
            [
                parallel.row_sums(site, layer, arm)
                for layer in range(config.num_layers)
                for site in ("o_proj", "down_proj")
            ]
            for arm in range(parallel.num_arms)
        ]
        self._head_groups = parallel.shard.head_groups(config.heads_per_kv_head)
        self._spans = weights.spans
        if cache.layers_at_a_time is not None:
            self._spans = [range(layer, layer + 1) for layer in range(config.num_layers)]
        self._program = None
        if cache.device.type == "cpu":
            self._program = DecodeProgram(config, parallel.shard, cache, self._cos_SE, self._sin_SE)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """(T, D) hidden states, before the final norm."""
        if self._program is not None and batch.num_decode_rows == len(batch.token_ids_T):
            return self._forward_generated(batch, self._program)
        layers = self._layers(batch)
        together = next(layers)
        while True:
            try:
                together = layers.send(together())
            except StopIteration as end:
                return end.value

    @torch.inference_mode()
    def forward_overlapped(self, parts: Sequence[Batch], lane: CommLane) -> Tensor:
        """``forward`` of a step that was cut in ``parts``: while the ranks sum one, they compute the next.

        Each row's bits are those of ``forward`` where they do not depend on what travels beside it.
        """
        passes = [self._layers(part) for part in parts]
        flights = [lane.start(next(layers)) for layers in passes]
        hidden: list[Tensor] = []
        while not hidden:  # all come to their end in the same turn
            for number, layers in enumerate(passes):
                try:
                    flights[number] = lane.start(layers.send(flights[number].wait()))
                except StopIteration as end:
                    hidden.append(end.value)
        return torch.cat(hidden)

    @torch.inference_mode()
    def forward_in_parts(self, parts: Sequence[Batch]) -> Tensor:
        """``forward`` of a step that was cut in ``parts``: each layer computes all of them before the next one.

        So a layer that has to come from afar comes once for all, and what a layer needs beside its weights is one part's.
        """
        passes = [self._layers(part) for part in parts]
        sums = [next(layers)() for layers in passes]
        hidden: list[Tensor] = []
        while not hidden:
            for number, layers in enumerate(passes):
                try:
                    sums[number] = layers.send(sums[number])()
                except StopIteration as end:
                    hidden.append(end.value)
        return torch.cat(hidden)

    def _layers(self, batch: Batch) -> Generator[Together, Tensor, Tensor]:
        """A pass that yields whatever the ranks do together, to be called, takes the result, and returns (T, D)."""
        cos_TE, sin_TE = self._cos_SE[batch.positions_T], self._sin_SE[batch.positions_T]
        eps = self._config.norm_eps
        residual_TD = yield partial(self._embed, batch)
        update_TD: Tensor | None = None  # what the previous block adds; joined with the norm that follows it
        for index in range(self._config.num_layers):
            weights = self._weights.layer(index)
            if update_TD is None:
                normed_TD = rms_norm(residual_TD, weights.attention_norm, eps)
            else:
                normed_TD, residual_TD = add_rms_norm(update_TD, residual_TD, weights.attention_norm, eps)
            partial_TD = self._attention(normed_TD, weights, index, batch, cos_TE, sin_TE)
            update_TD = yield partial(self._summed, partial_TD, 2 * index, batch)
            normed_TD, residual_TD = add_rms_norm(update_TD, residual_TD, weights.mlp_norm, eps)
            partial_TD = self._mlp(normed_TD, weights, batch)
            update_TD = yield partial(self._summed, partial_TD, 2 * index + 1, batch)
            self._weights.release(index)
            self._cache.release(index)
        assert update_TD is not None, "a model has at least one layer"
        return residual_TD + update_TD

    def _summed(self, partial_TD: Tensor, part: int, batch: Batch) -> Tensor:
        sums = self._sums[batch.arm][part]
        if sums is None:
            return partial_TD
        return self._parallel.sum_rows(partial_TD, sums, num_single_rows=batch.num_decode_rows)

    def _forward_generated(self, batch: Batch, program: DecodeProgram) -> Tensor:
        """``forward`` where every row is a generated token, to the same bits."""
        residual_TD = self._embed(batch)
        program.begin(
            residual_TD,
            batch.positions_T,
            batch.slots_T,
            batch.query_start_B1,
            batch.context_lens_B,
            batch.block_tables_BM,
        )
        update_TD: Tensor | None = None
        for span in self._spans:
            for index in span:
                program.place(index, self._weights.layer(index), *self._cache.layer(index))
            update_TD = self._run_generated(span, batch, program, residual_TD, update_TD)
            for index in span:
                self._weights.release(index)
                self._cache.release(index)
        assert update_TD is not None, "a model has at least one layer"
        return residual_TD + update_TD

    def _run_generated(
        self, span: range, batch: Batch, program: DecodeProgram, residual_TD: Tensor, update_TD: Tensor | None
    ) -> Tensor:
        """These layers' parts; takes and gives the sum of the part before and of the last one."""
        first, stop = 2 * span.start, 2 * span.stop
        sums = [row_sums for row_sums in self._sums[batch.arm][first:stop] if row_sums is not None]
        if not sums:
            return program.run(first, stop, update_TD)
        in_kernel = self._parallel.sums_in_kernel({row_sums.generated for row_sums in sums}, residual_TD)
        if in_kernel is not None:
            return program.run_and_sum(first, update_TD, in_kernel, [row_sums.label for row_sums in sums])
        for part, row_sums in enumerate(sums, start=first):
            partial_TD = program.run(part, part + 1, update_TD)
            update_TD = self._parallel.sum_rows(partial_TD, row_sums, num_single_rows=len(partial_TD))
        assert update_TD is not None
        return update_TD

    def _embed(self, batch: Batch) -> Tensor:
        table, dtype = self._weights.outer.embedding, self._cache.dtype
        return self._parallel.embed(table, batch.token_ids_T, batch.arm, dtype)

    @torch.inference_mode()
    def last_chosen(self, chosen_R: Tensor | None, num: int) -> Tensor:
        """(num,) int32 on every rank; see ``TensorParallel.last_chosen``."""
        return self._parallel.last_chosen(chosen_R, num)

    @torch.inference_mode()
    def logits(self, hidden_RD: Tensor, num_candidates: int = 0) -> Tensor | None:
        """(R, V) float32 on rank 0, None elsewhere; see ``TensorParallel.logits``."""
        outer = self._weights.outer
        normed_RD = rms_norm(hidden_RD, outer.final_norm, self._config.norm_eps)
        return self._parallel.logits(normed_RD, outer.head, num_candidates)

    @torch.inference_mode()
    def local_logits(self, hidden_RD: Tensor) -> Tensor:
        """(R, local V) float32: this rank's columns."""
        outer = self._weights.outer
        return linear_to_float(rms_norm(hidden_RD, outer.final_norm, self._config.norm_eps), outer.head)

    def _attention(
        self, x_TD: Tensor, weights: LayerWeights, index: int, batch: Batch, cos_TE: Tensor, sin_TE: Tensor
    ) -> Tensor:
        """(T, D), this rank's part of the sum; a bias is rank 0's alone."""
        shard, head_dim = self._parallel.shard, self._config.head_dim
        num_heads, num_kv_heads = shard.local_heads, shard.local_kv_heads
        num_decode = batch.num_decode_rows
        qkv_TO = linear(x_TD, weights.qkv, weights.qkv_bias, num_single_rows=num_decode)
        qkv_THE = qkv_TO.view(-1, num_heads + 2 * num_kv_heads, head_dim)
        keys_NKPE, values_NKPE = self._cache.layer(index)
        q_THE = rotate_and_cache(qkv_THE, cos_TE, sin_TE, keys_NKPE, values_NKPE, batch.slots_T)
        mixed_THE = paged_attention(
            q_THE,
            keys_NKPE,
            values_NKPE,
            batch.query_start_B1,
            batch.context_lens_B,
            batch.block_tables_BM,
            head_dim**-0.5,
            num_decode_rows=num_decode,
            groups=self._head_groups,
        )
        return linear(
            mixed_THE.flatten(1), weights.attention_out, weights.attention_out_bias, num_single_rows=num_decode
        )

    def _mlp(self, x_TD: Tensor, weights: LayerWeights, batch: Batch) -> Tensor:
        """(T, D), this rank's part of the sum."""
        num_decode = batch.num_decode_rows
        gated_TF = swiglu(linear(x_TD, weights.gate_up, weights.gate_up_bias, num_single_rows=num_decode))
        return linear(gated_TF, weights.down, weights.down_bias, num_single_rows=num_decode)
